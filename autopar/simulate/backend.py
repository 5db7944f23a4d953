"""The backend: a torch.distributed process group whose operations meet those of other threads.

Depending on its version, torch calls some methods by an old name or by a new one; both are there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work
from torch.futures import Future

from autopar.errors import ArgumentError, MismatchError
from autopar.simulate import diagnosis
from autopar.simulate.calls import Call, Group, Terms
from autopar.simulate.operations import REDUCTIONS, Part
from autopar.simulate.rendezvous import Rendezvous
from autopar.simulate.sites import Site, caller
from autopar.simulate.torch_private import BACKEND, describe
from autopar.storages import unobserved

# Their declared signatures are those of C++ overloads, not of the methods that may override them.
_ProcessGroup: Any = ProcessGroup
_Work: Any = Work


class SimulatedWork(_Work):  # type: ignore[misc]
    """A launched operation. Time-outs are ignored: one that can't end is a deadlock, and seen at once."""

    def __init__(self, rendezvous: Rendezvous, calls: Sequence[Call]) -> None:
        super().__init__()
        self._rendezvous = rendezvous
        self._calls = calls

    def wait(self, timeout: timedelta | None = None) -> bool:
        for call in self._calls:
            self._rendezvous.wait(call)
        return True

    synchronize = wait

    def is_completed(self) -> bool:
        """Lets the other ranks run first, so that polling comes to an end."""
        if not self.is_success():
            self._rendezvous.baton.pause()
        if not self.is_success():
            return False
        return self.wait()

    def is_success(self) -> bool:
        return all(call.is_done for call in self._calls)

    def get_future(self) -> Future[list[Tensor]]:
        """A future that is done: C++ that waits for one would do so where the scheduler can't see it."""
        self.wait()
        future: Future[list[Tensor]] = Future()
        future.set_result(self.result())
        return future

    def result(self) -> list[Tensor]:
        return [tensor for call in self._calls for part in call.parts for tensor in part.outputs]

    def source_rank(self) -> int:
        """The peer of a send or of a finished receive, as a rank of the group."""
        peer = self._calls[0].peer
        return -1 if peer is None else peer

    _source_rank = source_rank


class CoalescedWork(SimulatedWork):
    """An operation inside a coalescing block, which only the end of the block waits for."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True


class SimulatedGroup(_ProcessGroup):  # type: ignore[misc]
    """One rank's side of a process group; ``ranks`` are global, in group order."""

    is_simulated = True

    def __init__(self, rendezvous: Rendezvous, rank: int, name: str, ranks: tuple[int, ...]) -> None:
        super().__init__(ranks.index(rank), len(ranks))
        self._rendezvous = rendezvous
        self._rank = rank
        self._ranks = ranks
        self._name = name
        self._coalesced: list[Call] | None = None

    def __repr__(self) -> str:
        return f"SimulatedGroup(rank {self._rank} of {self._group.label})"

    @property
    def group_name(self) -> str:
        """torch's name for the group, which the base class only knows where it wraps a backend."""
        return self._name

    @cached_property
    def _group(self) -> Group:
        return Group(self._name, self._ranks, self._label())

    def getBackendName(self) -> str:
        return BACKEND

    def new_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        pg_options: object = None,
        group_name: str = "",
        group_desc: str | None = None,
    ) -> SimulatedGroup | None:
        """What ``dist.new_group`` calls from torch 2.13 on, whatever backend it is asked for."""
        if self._rank not in ranks:
            return None
        group = type(self)(self._rendezvous, self._rank, group_name, tuple(ranks))
        describe(group, group_desc or "undefined")
        return group

    def shutdown(self) -> None:
        """Nothing to shut down."""

    abort = shutdown

    # Collectives: what this rank brings, and whether its peers must bring the same shapes.

    def allreduce(self, tensors: list[Tensor], opts: Any) -> SimulatedWork:
        return self._collective("all_reduce", _in_place(tensors), tensors, opts, same_shapes=True)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: list[Tensor], opts: Any) -> SimulatedWork:
        return self._collective("broadcast", _in_place(tensors), tensors, opts, same_shapes=True)

    def reduce(self, tensors: list[Tensor], opts: Any) -> SimulatedWork:
        return self._collective("reduce", _in_place(tensors), tensors, opts, same_shapes=True)

    def barrier(self, opts: Any) -> SimulatedWork:
        return self._collective("barrier", [Part()], [], opts)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> SimulatedWork:
        parts = [Part([i], self._one_each(o)) for i, o in zip(inputs, outputs, strict=True)]
        return self._collective("all_gather", parts, inputs, opts)

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> SimulatedWork:
        by_input = [list(of_ranks) for of_ranks in zip(*outputs, strict=True)]
        return self.allgather(by_input, inputs, opts)

    def all_gather_single(self, output: Tensor, input_: Tensor, opts: Any) -> SimulatedWork:
        return self.all_gather_single_coalesced([output], [input_], opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> SimulatedWork:
        parts = [Part([i], self._equal_parts(o)) for i, o in zip(inputs, outputs, strict=True)]
        return self._collective("all_gather", parts, inputs, opts, same_shapes=True)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> SimulatedWork:
        parts = [Part(self._one_each(i), [o]) for i, o in zip(inputs, outputs, strict=True)]
        return self._collective("reduce_scatter", parts, [t for i in inputs for t in i], opts)

    def reduce_scatter_single(self, output: Tensor, input_: Tensor, opts: Any) -> SimulatedWork:
        return self.reduce_scatter_single_coalesced([output], [input_], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> SimulatedWork:
        parts = [Part(self._equal_parts(i), [o]) for i, o in zip(inputs, outputs, strict=True)]
        return self._collective("reduce_scatter", parts, inputs, opts, same_shapes=True)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> SimulatedWork:
        is_root = self.rank() == opts.rootRank
        parts = [Part(inputs, self._one_each(outputs[0]) if is_root else [])]
        return self._collective("gather", parts, inputs, opts)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> SimulatedWork:
        is_root = self.rank() == opts.rootRank
        parts = [Part(self._one_each(inputs[0]) if is_root else [], outputs)]
        return self._collective("scatter", parts, outputs, opts)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> SimulatedWork:
        parts = [Part(self._one_each(inputs), self._one_each(outputs))]
        return self._collective("all_to_all", parts, inputs, opts)

    def all_to_all_single(
        self, output: Tensor, input_: Tensor, output_rows: list[int], input_rows: list[int], opts: Any
    ) -> SimulatedWork:
        peers = [place for place, rows in enumerate(zip(input_rows, output_rows, strict=False)) if any(rows)]
        parts = [Part(self._split(input_, input_rows), self._split(output, output_rows), peers)]
        return self._collective("all_to_all", parts, [input_], opts)

    alltoall_base = all_to_all_single

    # Sends and receives; peers are ranks of the group.

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> SimulatedWork:
        call = self._call(Terms("send"), [Part(inputs=tensors)], tensors, peer=peer, tag=tag)
        return self._launch(self._rendezvous.send, call)

    def recv(self, tensors: list[Tensor], peer: int | None, tag: int) -> SimulatedWork:
        call = self._call(Terms("recv"), [Part(outputs=tensors)], tensors, peer=peer, tag=tag)
        return self._launch(self._rendezvous.receive, call)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> SimulatedWork:
        return self.recv(tensors, None, tag)

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> SimulatedWork:
        calls, self._coalesced = self._coalesced or [], None
        return SimulatedWork(self._rendezvous, calls)

    # How a call is made.

    def _collective(
        self,
        operation: str,
        parts: list[Part],
        tensors: list[Tensor],
        opts: Any,
        *,
        same_shapes: bool = False,
    ) -> SimulatedWork:
        terms = Terms(
            operation,
            len(parts),
            tuple(tensor.dtype for tensor in tensors),
            tuple(tensor.shape for tensor in tensors) if same_shapes else None,
            self._reduction(opts) if hasattr(opts, "reduceOp") else None,
            opts.rootRank if hasattr(opts, "rootRank") else None,
        )
        call = self._call(terms, parts, tensors, is_async=opts.asyncOp)
        return self._launch(self._rendezvous.collective, call)

    def _call(
        self,
        terms: Terms,
        parts: Sequence[Part],
        shown: Sequence[Tensor],
        *,
        is_async: bool = True,
        peer: int | None = None,
        tag: int = 0,
    ) -> Call:
        return Call(terms, self._group, self._rank, parts, shown, self._site(), is_async, peer, tag)

    def _site(self) -> Site:
        """Where the program is, for whoever reads what went wrong."""
        return caller()

    def _launch(self, meet: Callable[[Call], None], call: Call) -> SimulatedWork:
        self._rendezvous.baton.check()
        meet(call)
        if self._coalesced is None:
            return SimulatedWork(self._rendezvous, [call])
        self._coalesced.append(call)
        return CoalescedWork(self._rendezvous, [call])

    def _label(self) -> str:
        description: str = self.group_desc
        if description.startswith("mesh_"):  # DeviceMesh puts this before the name of the axis
            return description.removeprefix("mesh_")
        if description not in ("", "undefined", "default_pg"):
            return description
        if len(self._ranks) == self._rendezvous.world_size:
            return "world"
        return f"ranks {','.join(map(str, self._ranks))}"

    def _reduction(self, opts: Any) -> str:
        name: str = opts.reduceOp.op.name
        if name not in REDUCTIONS:
            known = ", ".join(REDUCTIONS)
            raise ArgumentError(f"reduce operation {name} is not simulated; use one of {known}")
        return name

    # Tensors that hold something for every rank.

    def _one_each(self, tensors: list[Tensor]) -> list[Tensor]:
        if len(tensors) != self.size():
            raise self._unusable(f"a list of {len(tensors)} tensors in a group of {self.size()} ranks")
        return tensors

    def _equal_parts(self, tensor: Tensor) -> list[Tensor]:
        """In memory order, each flat."""
        if tensor.numel() % self.size() or not tensor.is_contiguous():
            what = f"{'' if tensor.is_contiguous() else 'non-contiguous '}tensor of shape {list(tensor.shape)}"
            raise self._unusable(f"a {what} can't be {self.size()} equal parts in memory")
        return self._cut(tensor, [])

    def _split(self, tensor: Tensor, rows: list[int]) -> list[Tensor]:
        """Along dim 0: so many ``rows`` for each rank, or equally many where that is empty."""
        rows = rows or [tensor.shape[0] // self.size()] * self.size()
        if sum(rows) != tensor.shape[0] or len(rows) != self.size():
            raise self._unusable(f"{tensor.shape[0]} rows can't be split as {rows} over {self.size()} ranks")
        return self._cut(tensor, rows)

    def _cut(self, tensor: Tensor, rows: list[int]) -> list[Tensor]:
        """So many ``rows`` for each rank, or equal parts in memory where that is empty."""
        with unobserved():
            if rows:
                return list(torch.split(tensor.detach(), rows))
            return list(tensor.detach().view(self.size(), tensor.numel() // self.size()).unbind())

    def _unusable(self, why: str) -> BaseException:
        error: MismatchError = diagnosis.unusable(self._rank, why, caller())
        return self._rendezvous.baton.fail(error)


def _in_place(tensors: list[Tensor]) -> list[Part]:
    return [Part([tensor], [tensor]) for tensor in tensors]
