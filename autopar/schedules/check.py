"""The proof that the lists of a lowered schedule fit together."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

from autopar.errors import ScheduleError
from autopar.schedules.actions import KINDS, Action, Schedule
from autopar.schedules.flow import (
    BACKWARDS,
    COMPUTE,
    Channel,
    channel,
    counterpart,
    is_exchange,
    is_receive,
    is_send,
    maker,
    needs,
    rank_exchanges,
    rank_passes,
    sends,
)
from autopar.schedules.offloads import before_offloads, offloaded, offloads_of
from autopar.schedules.progress import run_order
from autopar.schedules.weight_moves import (
    GATHERS,
    PASSES,
    WeightMoves,
    gather_of,
    gathers_of,
    moves_of,
    scatter_of,
    scatters,
)


def check(schedule: Schedule) -> None:
    """Raise ScheduleError, naming ranks and actions, unless the lists are right. Linear in their length.

    Right means: each rank has exactly the actions that its stages call for, once; each comes after what it
    needs on that rank (a gather before the passes that it is for, a REDUCE after its stage's backwards, STEP
    last); the two ends of every channel agree on the order of its messages, and all ranks on that of exchanges;
    and the ranks reach the end under the semantics of
    :mod:`autopar.schedules.progress`, whatever the speed of ranks and links.
    """
    _check_complete(schedule)
    for rank in range(schedule.ranks):
        _check_order(schedule, rank)
    _check_channels(schedule)
    _check_exchanges(schedule)
    for _ in run_order(schedule):
        pass


def _check_complete(schedule: Schedule) -> None:
    expected = _expected(schedule, moves_of(schedule))
    for rank, actions in enumerate(schedule.lists):
        count = Counter(actions)
        missing = [action for action in expected[rank] if action not in count]
        extra = [action for action in count if action not in expected[rank]]
        twice = [action for action in count if count[action] > 1]
        problems = [
            f"{what} {_some(wrong)}"
            for what, wrong in (("lacks", missing), ("doesn't need", extra), ("repeats", twice))
            if wrong
        ]
        if problems:
            hint = _belongs(schedule, rank, extra) or _not_lowered(schedule)
            raise ScheduleError(f"schedule {schedule.name!r}, rank {rank} {' and '.join(problems)}{hint}")


def _expected(schedule: Schedule, moves: WeightMoves) -> list[dict[Action, None]]:
    """Per rank, the actions it must have; dicts, so that errors list them in a fixed order."""
    return [dict.fromkeys(_expected_of(schedule, rank, moves)) for rank in range(schedule.ranks)]


def _expected_of(schedule: Schedule, rank: int, moves: WeightMoves) -> Iterator[Action]:
    yield from gathers_of(schedule, rank, moves)
    yield from offloads_of(schedule, rank)
    for action in rank_passes(schedule, rank):
        yield from filter(is_receive, needs(schedule, action, rank))
        yield action
        yield from sends(schedule, action)
        if moves.scatters and scatters(action):
            yield scatter_of(action)
    yield from rank_exchanges(schedule)
    if not schedule.is_asynchronous:
        for stage in (stage for stage, home in enumerate(schedule.placement) if home == rank):
            yield Action("REDUCE", stage=stage)
    if schedule.head:
        yield Action("REDUCE_V")
    yield Action("STEP")


def _some(actions: list[Action]) -> str:
    more = f" and {len(actions) - 3} more" if len(actions) > 3 else ""
    return ", ".join(map(str, actions[:3])) + more


def _belongs(schedule: Schedule, rank: int, extra: list[Action]) -> str:
    """Whose the first stray action is, where it lies on the wrong rank."""
    for action in extra:
        if 0 <= action.stage < schedule.stages and schedule.placement[action.stage] != rank:
            return f"; {action} belongs on rank {schedule.placement[action.stage]}"
    return ""


def _not_lowered(schedule: Schedule) -> str:
    if any(action.kind not in COMPUTE for actions in schedule.lists for action in actions):
        return ""
    return "; lower() adds the communication that a list of compute actions lacks"


def _check_order(schedule: Schedule, rank: int) -> None:
    done: set[Action] = set()
    actions = schedule.lists[rank]
    stored, away = _stored(schedule, rank), offloaded(schedule, rank)
    for action in actions:
        for need in (*stored.get(action, ()), *before_offloads(action, away), *_before(schedule, rank, action)):
            if need not in done:
                raise ScheduleError(
                    f"schedule {schedule.name!r}, rank {rank}: {action} comes before {need}, which it needs"
                )
        done.add(action)
    if actions[-1] != Action("STEP"):
        raise ScheduleError(
            f"schedule {schedule.name!r}, rank {rank}: {actions[-1]} comes after STEP, which must be last"
        )


def _stored(schedule: Schedule, rank: int) -> dict[Action, list[Action]]:
    """What moves of weights ask for: pass -> its gather, gather -> the pass of its stage before it (which frees what it
    gathers), REDUCE -> the stage's scatters."""
    needed: dict[Action, list[Action]] = defaultdict(list)
    there = {action for action in schedule.lists[rank] if action.kind in GATHERS}
    before: dict[int, Action] = {}
    for action in schedule.lists[rank]:
        at_start = Action("GATHER", stage=action.stage) if action.stage >= 0 else Action("GATHER_V")
        ahead = gather_of(action) if action.kind in PASSES else action
        if action.kind in COMPUTE:
            needed[action] += [gather for gather in (at_start, ahead) if gather in there]
        if action.kind in PASSES:
            if ahead in there and action.stage in before:
                needed[ahead].append(before[action.stage])
            before[action.stage] = action
        if action.kind == "SCATTER":
            needed[Action("REDUCE", stage=action.stage)].append(action)
    return needed


def _before(schedule: Schedule, rank: int, action: Action) -> Iterable[Action]:
    """What must come before ``action`` on the same rank, STEP apart."""
    if action.kind in COMPUTE or is_exchange(action):
        return needs(schedule, action, rank)
    if is_send(action):
        return (maker(schedule, action),)
    if action.kind == "SCATTER":
        split = (action.microbatch, action.stage) in schedule.split
        return (Action("W" if split else "B", action.microbatch, action.stage),)
    if action.kind in ("REDUCE", "REDUCE_V"):
        return (a for a in rank_passes(schedule, rank) if _is_summed(a, action))
    return ()


def _is_summed(action: Action, reduce: Action) -> bool:
    """Whether ``action`` makes gradients that ``reduce`` sums."""
    if reduce.kind == "REDUCE_V":
        return action.kind in ("T", "G")
    return action.kind in BACKWARDS and action.stage == reduce.stage


def _check_exchanges(schedule: Schedule) -> None:
    """All ranks post the same exchanges in the same order."""
    rows = [list(filter(is_exchange, actions)) for actions in schedule.lists]
    for rank, row in enumerate(rows):
        for index, (first, own) in enumerate(zip(rows[0], row, strict=True)):
            if first != own:
                raise ScheduleError(
                    f"schedule {schedule.name!r}: exchange {index} is {first} on rank 0, but {own} on rank {rank}; "
                    "all ranks must have the same order"
                )


def _check_channels(schedule: Schedule) -> None:
    sent: dict[Channel, list[Action]] = defaultdict(list)
    received: dict[Channel, list[Action]] = defaultdict(list)
    for rank, action in _communication(schedule):
        (sent if is_send(action) else received)[channel(rank, action)].append(action)
    for stream, messages in sent.items():
        for index, (send, receive) in enumerate(zip(messages, received[stream], strict=True)):
            if counterpart(stream.source, send) != receive:
                raise ScheduleError(
                    f"schedule {schedule.name!r}: message {index} from rank {stream.source} to rank "
                    f"{stream.destination} is {send} at the sender, but {receive} at the receiver; "
                    "both ends must have the same order"
                )


def _communication(schedule: Schedule) -> Iterator[tuple[int, Action]]:
    for rank, actions in enumerate(schedule.lists):
        for action in actions:
            if KINDS[action.kind].arrow:
                yield rank, action
