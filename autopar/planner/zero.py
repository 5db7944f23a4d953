"""What ZeRO, offload and masters move in a step, and how long that takes."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Final

import torch
from torch import fx

from autopar.cluster import Link
from autopar.cost_models import collective, step
from autopar.cost_models.step import Collectives
from autopar.graph import Model, info
from autopar.mesh import DATA
from autopar.options import Options, masters_on_host, weights_streamed
from autopar.passes.hoist import parameter_sums
from autopar.passes.recompute import own_modules
from autopar.planner.alike import Alike
from autopar.planner.block_costs import DataLine, Machine
from autopar.planner.packing import Message, Sent, Weight, gathers, places, sums, units_of
from autopar.planner.rank_memory import is_own_master, rank_shape, stored_elements, table_dims
from autopar.schedules.weight_moves import MESSAGES, MessageSizes, WeightMoves

_NONE: Final = frozenset[str]()
_NOTHING: Final = Collectives(0.0, 0.0)


def weight_moves(model: Model, options: Options, lines: Iterable[DataLine]) -> WeightMoves:
    """Which GATHER and SCATTER actions a schedule needs."""
    shards = max(line.shards for line in lines) if options.zero else 1
    streamed = weights_streamed(options.zero, options.offload, shards)
    has_copies = any(known.master is not None for known in model.parameters.values())
    twice = shards > 1 or has_copies or masters_on_host(options.offload)
    return WeightMoves("pass" if streamed else "step" if twice else "", options.zero >= 2 and shards > 1)


@dataclass(frozen=True)
class _Over:
    """Which ranks have terms of a gradient: those of a line along ``data``, which differ along ``axes`` of them, of
    ``further`` axes, and the pipeline ranks that hold the weight. ``is_other``: not just those of all of the line."""

    line: DataLine
    data: tuple[str, ...]
    axes: tuple[str, ...]
    further: tuple[str, ...]
    holders: tuple[int, ...]
    is_other: bool

    @property
    def is_shared(self) -> bool:
        """Whether several pipeline ranks have terms: what STEP sums."""
        return len(self.holders) > 1


@dataclass
class _Moved:
    """What moves together: collectives, and seconds of copies to the host or from it."""

    sent: list[Collectives] = field(default_factory=list)
    copied: list[float] = field(default_factory=list)

    @cached_property
    def seconds(self) -> float:
        return math.fsum((*(each.seconds for each in self.sent), *self.copied))

    @cached_property
    def collectives(self) -> Collectives:
        return Collectives(*(math.fsum(each) for each in zip(*self.sent, strict=True))) if self.sent else _NOTHING


@dataclass(frozen=True)
class MoveCosts:
    """Seconds that the weights of some calls and their gradients are on their way.

    Masters on the host are cast there (``host_memory_bytes_per_second`` of the device), and copied at its
    ``host_bytes_per_second``: this rank's part, before it is gathered, and back once its gradient is summed. ``stages``
    and their ``placement`` say which weights are tied across ranks, ``sizes`` what travels in one message.
    """

    model: Model
    options: Options
    machine: Machine
    stages: Sequence[Sequence[int]] = ()
    placement: Sequence[int] = ()
    sizes: MessageSizes = MESSAGES

    def gather_seconds(self, calls: Sequence[int], parts: int = 1) -> float:
        """One gather of all weights of ``calls``, in the dtype that is computed with: small ones of a layer together.

        ``parts``: over so many ranks beside are the rows of each split.
        """
        return self._gathered(calls, parts).seconds

    def gathering(self, calls: Sequence[int]) -> Collectives:
        """The collectives of that gather."""
        return self._gathered(calls, 1).collectives

    def _gathered(self, calls: Sequence[int], parts: int) -> _Moved:
        key = self.key(calls), parts
        if key not in self._gathers:
            moved = _Moved()
            for message in self._messages(calls, parts):
                line = message.weights[0].line
                self._send(moved, "all_gather", message.bytes_, self.shards(line), line.shard)
                moved.copied.append(self._host(message.bytes_, line))
            if self._on_host:  # where they are cast, the next ones while some are copied
                cast = step.host_cast_seconds(self._cast_bytes(calls, parts), self.machine.device)
                moved.copied.append(max(0.0, cast - math.fsum(moved.copied)))
            self._gathers[key] = moved
        return self._gathers[key]

    def _messages(self, calls: Sequence[int], parts: int) -> list[Message]:
        """Those of that gather."""
        key = self.key(calls), parts
        if key not in self._found_messages:
            once = parts > 1 or not self.streams  # rows of tables stay from step to step
            weights = self._weights(calls, parts, borrowed=self.streams)
            self._found_messages[key] = list(gathers((weight for weight, _ in weights), once=once, sizes=self.sizes))
        return self._found_messages[key]

    @cached_property
    def _found_messages(self) -> dict[tuple[Hashable, int], list[Message]]:
        return {}

    def unpack_seconds(self, calls: Sequence[int], parts: int = 1) -> float:
        """Of copying, in one gather, what travels in one message with others: the rank's part of it to where it is sent
        from, and all of it from where it arrives. ``parts`` as in :meth:`gather_seconds`."""
        packed = (message for message in self._messages(calls, parts) if message.is_packed)
        copied = math.fsum(m.bytes_ + m.bytes_ / m.weights[0].shards for m in packed)
        return step.copy_seconds(copied, 1, 1, self.machine.device)

    def _send(self, moved: _Moved, kind: str, bytes_: int, size: int, link: Link) -> None:
        """One more collective, if there is anything to send."""
        if bytes_:
            seconds = collective.seconds(kind, bytes_, size, link)
            moved.sent.append(Collectives(seconds, seconds * self.machine.device.held_share(link)))

    def cast_seconds(self, calls: Sequence[int], parts: int = 1) -> float:
        """Of casting what the rank stores of masters to the dtypes that are computed with, before one gather; nothing
        where they lie on the host, which casts them there. ``parts`` as in :meth:`gather_seconds`."""
        key = self.key(calls), parts
        if key not in self._casts:
            elements = {} if self._on_host else self._cast_elements(calls, parts)
            self._casts[key] = math.fsum(
                step.copy_seconds(count, master, copy, self.machine.device)
                for (master, copy), count in elements.items()
            )
        return self._casts[key]

    @cached_property
    def _casts(self) -> dict[tuple[Hashable, int], float]:
        return {}

    def copied(self, calls: Sequence[int]) -> int:
        """How many weights one gather makes copies of: those that are cast, gathered, or on the host."""
        key = self.key(calls)
        if key not in self._copies:
            used = self._used(calls, frozen=self.options.zero == 3, borrowed=self.streams)
            self._copies[key] = sum(
                self._on_host
                or self.shards_of(name, node) > 1
                or self.model.parameters[name].master not in (None, info(node).meta.dtype)
                for _, name, node in used
            )
        return self._copies[key]

    @cached_property
    def _copies(self) -> dict[Hashable, int]:
        return {}

    def _cast_bytes(self, calls: Sequence[int], parts: int) -> int:
        """Read and written, of masters and their casts."""
        elements = self._cast_elements(calls, parts)
        return sum(count * (master + copy) for (master, copy), count in elements.items())

    def _cast_elements(self, calls: Sequence[int], parts: int) -> Mapping[tuple[int, int], int]:
        """By bytes of an element of a master and of its copy in another dtype, how many the rank stores."""
        elements: Counter[tuple[int, int]] = Counter()
        for _, name, node in self._used(calls, frozen=self.options.zero == 3, borrowed=self.streams):
            dtype, master = info(node).meta.dtype, self.model.parameters[name].master
            if master not in (None, dtype):
                stored = self.whole_elements(name, node, parts) // self.shards_of(name, node)
                elements[master.itemsize, dtype.itemsize] += stored
        return elements

    def key(self, calls: Sequence[int]) -> Hashable:
        """Equal for stages whose weights move alike."""
        return self._alike.key(calls), self.borrowed(calls), self.lent(calls)

    def borrowed(self, calls: Sequence[int]) -> frozenset[str]:
        """Weights of a stage that an earlier one of its rank has too: they are moved with that one's, and once."""
        return self._borrowed.get(tuple(calls), (_NONE, _NONE))[0]

    def lent(self, calls: Sequence[int]) -> frozenset[str]:
        """Weights of a stage that a later one of its rank borrows."""
        return self._borrowed.get(tuple(calls), (_NONE, _NONE))[1]

    @cached_property
    def _borrowed(self) -> dict[tuple[int, ...], tuple[frozenset[str], frozenset[str]]]:
        """Stage -> what it borrows, and lends; those that do neither are absent."""
        if len(set(self.placement)) == len(self.placement) or not self._stages_of:
            return {}
        stages = [
            (home, tuple(stage), self._stages_of.keys() & {n for i in stage for n in self.model.calls[i].parameters})
            for home, stage in zip(self.placement, self.stages, strict=True)
        ]
        found = {}
        for number, (home, stage, names) in enumerate(stages):
            before, after = (
                frozenset(name for other, _, theirs in some if other == home for name in theirs & names)
                for some in (stages[:number], stages[number + 1 :])
            )
            if before or after:
                found[stage] = before, after - before
        return found

    @cached_property
    def _alike(self) -> Alike:
        return Alike(self.model)

    @cached_property
    def _gathers(self) -> dict[tuple[Hashable, int], _Moved]:
        return {}

    def arrivals(self, forward_seconds: Sequence[float]) -> tuple[float, ...]:
        """Of each of ``stages``, what its one GATHER of a step has left to do before its first forward, which takes so
        long, can begin: its layers wait for their own weights alone (:meth:`autopar.runtime.store.Store.arriving`).

        What of a gather runs beside that forward is still to be done when the rank's next one begins. Weights that are
        gathered for each pass, or copied from the host, have all of their gather left.
        """
        late = [0.0] * (1 + max(self.placement))
        left = []
        for home, calls, forward in zip(self.placement, self.stages, forward_seconds, strict=True):
            first = self.first_gathered(calls, forward)
            left.append(late[home] + first)
            late[home] = self.gather_seconds(calls) - first
        return tuple(left)

    def first_gathered(self, calls: Sequence[int], forward_seconds: float) -> float:
        """What of their one gather of a step doesn't run beside the first forward."""
        seconds = self.gather_seconds(calls)
        if self.streams or self._on_host:
            return seconds
        return step.left_seconds(seconds, self.places(calls), forward_seconds)

    def places(self, calls: Sequence[int]) -> int:
        """At how many units of a stage its first forward waits for weights."""
        return places(self._messages(calls, 1))

    def scatter_seconds(self, calls: Sequence[int]) -> float:
        """One SCATTER of their gradients."""
        return self.scattering(calls).seconds

    def scattering(self, calls: Sequence[int]) -> Collectives:
        """The collectives that it is."""
        if self.options.zero < 2:
            return _NOTHING
        key = self.key(calls)
        if key not in self._scatters:
            moved = _Moved()
            for message in self.sums(calls):
                if message[0].in_pass and self._over_of(message).axes:
                    line = message[0].weight.line
                    sent = sum(each.sent for each in message)
                    self._send(moved, "reduce_scatter", sent, self.shards(line), line.shard)
            self._scatters[key] = moved.collectives
        return self._scatters[key]

    @cached_property
    def _scatters(self) -> dict[Hashable, Collectives]:
        return {}

    def reduce_seconds(self, calls: Sequence[int], parts: int = 1) -> float:
        """What REDUCE has left to sum, and to copy to the host: of each parameter over all ranks that have terms, but
        for :meth:`shared_seconds`.

        ``parts`` as in :meth:`gather_seconds`; of such tables all is summed once, at the end.
        """
        return self._reduced(calls, parts).seconds

    def reducing(self, calls: Sequence[int]) -> Collectives:
        """The collectives of that."""
        return self._reduced(calls, 1).collectives

    def _reduced(self, calls: Sequence[int], parts: int) -> _Moved:
        key = self.key(calls), parts
        if key not in self._reduces:
            self._reduces[key] = self._made_reduced(calls, parts)
        return self._reduces[key]

    @cached_property
    def _reduces(self) -> dict[tuple[Hashable, int], _Moved]:
        return {}

    def _made_reduced(self, calls: Sequence[int], parts: int) -> _Moved:
        messages = self.sums(calls, parts)
        moved = _Moved(copied=[self._host(each.sent, each.weight.line) for message in messages for each in message])
        for message in messages:
            if not self._over_of(message).is_shared:
                self._sum(moved, message)
        return moved

    def shared_seconds(self, stages: Iterable[Sequence[int]]) -> float:
        """What STEP sums over pipeline ranks once all backwards are over, of weights that several of them hold:
        ``stages`` are those of one rank."""
        moved = _Moved()
        for message in (message for stage in stages for message in self.sums(stage)):
            if self._over_of(message).is_shared:
                self._sum(moved, message)
        return moved.seconds

    def _sum(self, moved: _Moved, message: Sequence[Sent]) -> None:
        """What is left of a message once a step: the sum of those who share rows, unless a SCATTER's, then that of
        their parts."""
        over, sent = self._over_of(message), sum(each.sent for each in message)
        shards = self.shards(over.line)
        if over.axes and not message[0].in_pass:
            self._send(moved, "reduce_scatter", sent, shards, over.line.shard)
        self._send(moved, "all_reduce", sent // shards, *self._rest(over))

    def left_to_reduce(self, calls: Sequence[int], pass_seconds: float) -> float:
        """What REDUCE has left when the stage's last backward, or its weight gradients, end."""
        return step.left_seconds(self.reduce_seconds(calls), len(calls), pass_seconds)

    def left_to_scatter(self, calls: Sequence[int], pass_seconds: float) -> float:
        """What SCATTER has left when a backward ends."""
        return step.left_seconds(self.scatter_seconds(calls), len(calls), pass_seconds)

    def is_summed(self, name: str, node: fx.Node) -> bool:
        """Whether several ranks have terms of a parameter's gradient."""
        over = self._over(name, node)
        return bool(over.further) or len(over.holders) > 1 or (bool(over.axes) and over.line.size > 1)

    def is_summed_again(self, name: str, node: fx.Node) -> bool:
        """Whether the sum of those who share rows is one term of a sum over further ranks."""
        over = self._over(name, node)
        shards = self.shards(over.line)
        return shards > 1 and (self._joint(over, shards)[0] if over.is_other else over.line.size // shards) > 1

    def _rest(self, over: _Over) -> tuple[int, Link]:
        """Who sums parts across shards: ranks of the group that have the same part, if there are several."""
        line, shards = over.line, self.shards(over.line)
        if over.is_other:
            return self._joint(over, shards)
        return (line.size, line.whole) if shards == 1 else (line.size // shards, line.replicate)

    def sums(self, calls: Sequence[int], parts: int = 1) -> list[list[Sent]]:
        """The messages in which the gradients of a stage are summed; ``parts`` as in :meth:`gather_seconds`."""
        key = self.key(calls), parts
        if key not in self._found_sums:
            weights = self._weights(calls, parts)
            trained = ((w, node) for w, node in weights if self.model.parameters[w.name].trainable)
            self._found_sums[key] = sums([self._sent(w, node, parts) for w, node in trained], self.sizes)
        return self._found_sums[key]

    @cached_property
    def _found_sums(self) -> dict[tuple[Hashable, int], list[list[Sent]]]:
        return {}

    def _sent(self, weight: Weight, node: fx.Node, parts: int) -> Sent:
        """Gradients travel together that ranks store, and sum, alike: over one object, of masters of one dtype."""
        over, dtype = self._over(weight.name, node), info(node).meta.dtype
        master = self.model.parameters[weight.name].master or dtype
        own = is_own_master(weight.shards, dtype, master, self.options)
        like = id(over), weight.shards, master, own, self._stages_of.get(weight.name)
        is_summed = self.is_summed(weight.name, node)
        return Sent(
            weight,
            self._sent_bytes(weight.name, node, parts),
            weight.shards if weight.shards > 1 else self._rest(over)[0],
            None if own and not is_summed else like,
            over,
            in_pass=self.options.zero >= 2 and weight.shards > 1 and parts == 1,
            in_place=own and (not is_summed or self._sent_dtype(master) == master),
            kept=info(node).meta.numel * master.itemsize,
        )

    @staticmethod
    def _over_of(message: Sequence[Sent]) -> _Over:
        """Which ranks have terms of all of it."""
        over = message[0].over
        assert isinstance(over, _Over)
        return over

    def _over(self, name: str, node: fx.Node) -> _Over:
        """The same object, with the same line, for all that are equal."""
        if (name, node) not in self._overs:
            over = self._made_over(name, node)
            over = replace(over, line=self._lines.setdefault(over.line, over.line))
            self._overs[name, node] = self._distinct.setdefault(over, over)
        return self._overs[name, node]

    @cached_property
    def _lines(self) -> dict[DataLine, DataLine]:
        return {}

    @cached_property
    def _overs(self) -> dict[tuple[str, fx.Node], _Over]:
        return {}

    @cached_property
    def _distinct(self) -> dict[_Over, _Over]:
        return {}

    def _made_over(self, name: str, node: fx.Node) -> _Over:
        """Ranks that compute the same of a weight have no terms of their own. Without a cluster that says what other
        groups cost, a gradient is a sum over its line. Scalars have no rows to be split."""
        mesh, types, sums = self.machine.mesh, info(node).types(), self._sums[name]
        line, ranks = mesh.data_axes([axis for axis, kind in types.items() if kind.is_shard]), self.machine.line(types)
        if not info(node).meta.shape:
            ranks = replace(ranks, shards=1)
        if self.machine.cluster is None:
            return _Over(ranks, line, line, (), (0,), is_other=False)
        axes = tuple(axis for axis in line if axis in sums)
        further = tuple(axis for axis in sums if axis not in DATA and mesh.size(axis) > 1)
        holders = self._holders.get(name, (0,))
        is_other = bool(further) or len(holders) > 1 or axes != line
        return _Over(ranks, line, axes, further, holders, is_other)

    def _joint(self, over: _Over, shards: int) -> tuple[int, Link]:
        """Size and link of a group along several axes. Of rows that are shared, all of the line gives parts, if any of
        its terms differ: those that are equal are divided."""
        mesh, cluster = self.machine.mesh, self.machine.cluster
        assert cluster is not None
        line = mesh.group(0, *(over.data if over.axes and shards > 1 else over.axes))[::shards]
        across = [index * mesh.stride("pp") for index in over.holders]
        ranks = sorted(r + o + p for r in line for o in mesh.group(0, *over.further) for p in across)
        stride = min((b - a for a, b in pairwise(ranks)), default=1)
        return len(ranks), cluster.link(len(ranks), stride, mesh.world)

    @cached_property
    def _sums(self) -> Mapping[str, tuple[str, ...]]:
        return parameter_sums(self.model)

    @cached_property
    def _holders(self) -> Mapping[str, tuple[int, ...]]:
        """Pipeline ranks that hold a weight of several stages."""
        found: dict[str, set[int]] = {}
        for home, stage in zip(self.placement, self.stages, strict=True):
            for name in {name for call in stage for name in self.model.calls[call].parameters}:
                found.setdefault(name, set()).add(home)
        return {name: tuple(sorted(homes)) for name, homes in found.items()}

    @cached_property
    def _stages_of(self) -> Mapping[str, tuple[int, ...]]:
        """Weights of several stages, with these. What isn't trained each stage has for itself."""
        found: dict[str, list[int]] = defaultdict(list)
        for number, stage in enumerate(self.stages):
            for name in dict.fromkeys(name for call in stage for name in self.model.calls[call].parameters):
                if self.model.parameters[name].trainable and not self.model.parameters[name].is_buffer:
                    found[name].append(number)
        return {name: tuple(numbers) for name, numbers in found.items() if len(numbers) > 1}

    def shards(self, line: DataLine) -> int:
        """How many ranks share the rows of a parameter along ``line``."""
        return line.shards if self.options.zero else 1

    def shards_of(self, name: str, node: fx.Node) -> int:
        """The same for one parameter."""
        return self.shards(self._over(name, node).line)

    def _host(self, bytes_: int, line: DataLine) -> float:
        """Of copying this rank's part of so many bytes, where masters lie on the host."""
        rate = self.machine.device.host_bytes_per_second
        return bytes_ / self.shards(line) / rate if self._on_host and rate else 0.0

    @property
    def _on_host(self) -> bool:
        """Whether masters lie there."""
        return masters_on_host(self.options.offload)

    @cached_property
    def streams(self) -> bool:
        """Whether weights are gathered for each pass."""
        shards = max((line.shards for line in self.machine.lines.values()), default=1)
        return weights_streamed(self.options.zero, self.options.offload, shards)

    def _weights(
        self, calls: Sequence[int], parts: int = 1, *, borrowed: bool = False
    ) -> Iterator[tuple[Weight, fx.Node]]:
        """Of a stage, in the order of their first use. Under ZeRO 3 weights that aren't trained are split, too.
        ``parts`` as in :meth:`gather_seconds`, ``borrowed`` as in :meth:`trained`."""
        units = units_of(self.model, calls, self._own)
        users = Counter(name for i in calls for name in {*self.model.calls[i].parameters}) if self.streams else {}
        for call, name, node in self._used(calls, frozen=self.options.zero == 3, borrowed=borrowed):
            over, meta = self._over(name, node), info(node).meta
            shape = rank_shape(meta.shape, self._table_dims[name], parts) if parts > 1 else meta.shape
            weight = Weight(
                name,
                0 if parts > 1 else units[call],  # split tables are in a module without layers
                as_used=math.prod(shape) * meta.dtype.itemsize,
                gathered=self.whole_elements(name, node, parts) * meta.dtype.itemsize,
                line=over.line,
                shards=self.shards(over.line),
                spanning=parts == 1 and (users.get(name, 1) > 1 or name in self._handed_on),
                tied=name in self._stages_of,
            )
            yield weight, node

    @cached_property
    def _table_dims(self) -> dict[str, int]:
        return table_dims(self.model)

    @cached_property
    def _own(self) -> frozenset[int]:
        return own_modules(self.model)

    @cached_property
    def _handed_on(self) -> frozenset[str]:
        return self.model.handed_on() if self.streams else frozenset()

    def whole_elements(self, name: str, node: fx.Node, parts: int = 1) -> int:
        """Of a parameter, with the padding that makes the rows of those who share them equally many: what they gather,
        and send as terms of a gradient. ``parts`` ranks of the pipeline have rows each, of a vocabulary table."""
        if (node, parts) not in self._wholes:
            shards = self.shards_of(name, node)
            shape = rank_shape(info(node).meta.shape, self._table_dims[name] if parts > 1 else None, parts)
            self._wholes[node, parts] = shards * stored_elements(self.model.parameters[name], shape, shards)
        return self._wholes[node, parts]

    @cached_property
    def _wholes(self) -> dict[tuple[fx.Node, int], int]:
        return {}

    def trained(self, calls: Sequence[int], *, borrowed: bool = False) -> Iterator[tuple[str, fx.Node]]:
        """The trained parameters of calls by name, each once; with those that are :meth:`borrowed`, or without."""
        yield from ((name, node) for _, name, node in self._used(calls, borrowed=borrowed))

    def _used(
        self, calls: Sequence[int], *, frozen: bool = False, borrowed: bool = False
    ) -> Iterator[tuple[int, str, fx.Node]]:
        """The trained parameters of calls by name, each once; maybe those that are ``frozen`` and whose rows several
        ranks share, or that are :meth:`borrowed`, too."""
        seen: set[str] = set() if borrowed else {*self.borrowed(calls)}
        for index in calls:
            call = self.model.calls[index]
            for name, node in zip(call.parameters, self._parameters[call.block], strict=True):
                known = self.model.parameters[name]
                is_moved = known.trainable or (frozen and self.shards_of(name, node) > 1)
                if is_moved and not known.is_buffer and name not in seen:
                    seen.add(name)
                    yield index, name, node

    @cached_property
    def _parameters(self) -> Sequence[Sequence[fx.Node]]:
        """By block."""
        return [block.parameters for block in self.model.blocks]

    def _sent_bytes(self, name: str, node: fx.Node, parts: int = 1) -> int:
        dtype = self._sent_dtype(self.model.parameters[name].master or info(node).meta.dtype)
        return self.whole_elements(name, node, parts) * dtype.itemsize

    def _sent_dtype(self, master: torch.dtype) -> torch.dtype:
        return getattr(torch, self.options.reduce_dtype) if self.options.reduce_dtype else master
