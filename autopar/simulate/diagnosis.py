"""The errors of simulated ranks: which ranks, in which operations, called from where."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from itertools import combinations, takewhile

from torch import Tensor

from autopar.errors import DeadlockError, DeadRankError, MismatchError, RankError
from autopar.simulate.calls import Call, Meeting, Terms, Waiting, described
from autopar.simulate.sites import LONGEST, Site, raised_at

_NAMES = {
    "operation": "operations",
    "tensors": "numbers of tensors",
    "dtypes": "dtypes",
    "shapes": "shapes",
    "reduction": "reduce operations",
    "root": "source or destination ranks",
}


def disagreement(first: Call, second: Call, meeting: Meeting) -> MismatchError:
    """Two ranks whose calls should be the same collective, but are not."""
    names = [field.name for field in fields(Terms)]
    differing = [_NAMES[name] for name in names if getattr(first.terms, name) != getattr(second.terms, name)]
    what = differing[0] if differing else _purposes(first, second)
    return MismatchError(
        f"ranks {first.rank} and {second.rank} have different {what} in collective "
        f"{meeting.number} of group {meeting.group.label!r}:\n{_calls([first, second])}\n"
        "all ranks of a group must call the same collectives, in the same order, with equal arguments"
    )


def _purposes(first: Call, second: Call) -> str:
    """Two purposes, of long ones no more than from where they part."""
    words = [str(call.site.purpose).split() for call in (first, second)]
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*words, strict=False)))
    one, other = (" ".join(["…", *own[same:]] if len(" ".join(own)) > LONGEST else own)[:LONGEST] for own in words)
    return f"purposes ({one!r} and {other!r})"


def unfit(sender: Call, sent: Tensor, receiver: Call, expected: Tensor) -> MismatchError:
    """A tensor that arrives where another shape or dtype is expected."""
    ranks = f"rank {sender.rank} gives {described(sent)} where rank {receiver.rank} takes {described(expected)}"
    return MismatchError(f"{ranks}:\n{_calls([sender, receiver])}")


def unusable(rank: int, why: str, site: Site) -> MismatchError:
    """A call that fits no peer, whatever the peer does."""
    return MismatchError(f"rank {rank}: {why}, at {site}")


def mutation(call: Call) -> MismatchError:
    """A write to an input between the launch of an operation and the wait for it."""
    return MismatchError(
        f"rank {call.rank} wrote to an input of an operation in flight:\n{_calls([call])}\n"
        "call wait() on what it returned before you change the tensor, or give it a copy"
    )


def unmatched(calls: Sequence[Call]) -> MismatchError:
    """All ranks have returned, but some calls never met their peers."""
    return MismatchError(
        f"all ranks returned, but these operations never met their counterparts:\n{_calls(calls)}\n"
        "every rank of the group must call them, and wait for what it called"
    )


def stuck(waiting: Mapping[int, Waiting], world_size: int) -> RankError:
    """No rank can run: MismatchError where two ranks wait for each other in different collectives."""
    graph = _graph(waiting, world_size)
    pairs = combinations(sorted(waiting), 2)
    crossed = next((pair for pair in pairs if _crossed(*pair, waiting)), None)
    if crossed is None:
        return DeadlockError(f"no rank can run:\n{graph}")
    return MismatchError(
        f"ranks {crossed[0]} and {crossed[1]} wait for each other in different collectives:\n{graph}\n"
        "ranks must create groups in the same order, and call the collectives they share in the same order"
    )


def dead(rank: int, error: BaseException) -> DeadRankError:
    """``rank`` ended with ``error``; raise it ``from error``."""
    site = raised_at(error.__traceback__)
    place = f" at {site}" if site is not None else ""
    return DeadRankError(f"rank {rank} ended with {type(error).__name__}{place}: {error}")


def _crossed(a: int, b: int, waiting: Mapping[int, Waiting]) -> bool:
    collectives = all(isinstance(call, Call) and call.meeting for call in (waiting[a], waiting[b]))
    return collectives and b in waiting[a].needs() and a in waiting[b].needs()


def _graph(waiting: Mapping[int, Waiting], world_size: int) -> str:
    return _lines((rank, _state(waiting.get(rank))) for rank in range(world_size))


def _state(waiting: Waiting | None) -> str:
    if waiting is None:
        return "returned"
    needs = waiting.needs()
    peers = f" for {_ranks(needs)}" if needs else ""
    return f"waits in {waiting}{peers}, at {waiting.site}"


def _calls(calls: Iterable[Call]) -> str:
    return _lines((call.rank, f"{call}, at {call.site}") for call in calls)


def _lines(states: Iterable[tuple[int, str]]) -> str:
    """One line for all ranks of which the same is said."""
    lines: dict[str, list[int]] = {}
    for rank, state in states:
        lines.setdefault(state, []).append(rank)
    return "\n".join(f"  {_ranks(ranks)}: {state}" for state, ranks in lines.items())


def _ranks(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0-2, 7``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"
