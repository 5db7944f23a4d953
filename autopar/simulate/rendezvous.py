"""Where the calls of all ranks meet: matching, moving the data, and counting what each rank sent."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from autopar.errors import RankError
from autopar.simulate import diagnosis
from autopar.simulate.baton import Baton
from autopar.simulate.calls import Call, Group, Meeting, Waiting
from autopar.simulate.operations import KINDS, Flow, fits, move, sent_bytes
from autopar.storages import is_data, unobserved

_Queue = tuple[Group, int, int]
"""Sends and receives meet by group, receiving rank within the group, and tag."""


class Rendezvous:
    """The collectives of a group meet in the order in which each rank calls them; sends and receives by tag.

    The last rank to arrive moves the data; :meth:`wait` blocks the others. A send is done when it is
    received: a program that relies on more buffering than that doesn't run on every backend.
    """

    def __init__(self, world_size: int, seed: int) -> None:
        self.world_size = world_size
        self.baton: Baton[Waiting] = Baton(world_size, seed, self._stuck)
        self.calls: list[Counter[tuple[str, str]]] = [Counter() for _ in range(world_size)]
        self.sent_bytes: list[Counter[tuple[str, str]]] = [Counter() for _ in range(world_size)]
        self._called: Counter[tuple[Group, int]] = Counter()
        self._meetings: dict[tuple[Group, int], Meeting] = {}
        self._sends: defaultdict[_Queue, list[Call]] = defaultdict(list)
        self._receives: defaultdict[_Queue, list[Call]] = defaultdict(list)

    def collective(self, call: Call) -> None:
        """Bring a rank's call of a collective. Raises MismatchError where its peers called another."""
        self._called[call.group, call.rank] += 1
        key = (call.group, self._called[call.group, call.rank])
        meeting = self._meetings.setdefault(key, Meeting(*key))
        first = next(iter(meeting.calls.values()), call)
        if first.terms != call.terms or first.site.purpose != call.site.purpose:
            raise self.baton.fail(diagnosis.disagreement(first, call, meeting))
        meeting.calls[call.rank] = call
        call.launch(meeting)
        if len(meeting.calls) == len(call.group.ranks):
            del self._meetings[key]
            self._exchange([meeting.calls[rank] for rank in call.group.ranks])

    def send(self, call: Call) -> None:
        """Bring a send. Raises MismatchError where the tensor doesn't fit the receive that it meets."""
        call.launch()
        queue = (call.group, call.receiver, call.tag)
        match = next((r for r in self._receives[queue] if r.peer in (None, call.index)), None)
        if match is None:
            self._sends[queue].append(call)
        else:
            self._receives[queue].remove(match)
            self._deliver(call, match)

    def receive(self, call: Call) -> None:
        """Bring a receive; a ``peer`` of None takes what was sent first. Raises as :meth:`send` does."""
        queue = (call.group, call.receiver, call.tag)
        match = next((s for s in self._sends[queue] if call.peer in (None, s.index)), None)
        if match is None:
            self._receives[queue].append(call)
        else:
            self._sends[queue].remove(match)
            self._deliver(match, call)

    def wait(self, call: Call) -> None:
        """Block until the call is done. Raises MismatchError where its inputs were written to meanwhile."""
        while not call.is_done:
            self.baton.block(call)
        self.baton.check()
        self._check_inputs(call)
        call.release()

    def unmatched(self) -> list[Call]:
        """Calls that never met their peers."""
        queues = [*self._sends.values(), *self._receives.values()]
        calls = [call for meeting in self._meetings.values() for call in meeting.calls.values()]
        return calls + [call for queue in queues for call in queue]

    def _exchange(self, calls: Sequence[Call]) -> None:
        terms = calls[0].terms
        root = terms.root or 0
        for call in calls:
            self._check_inputs(call)
        for parts in zip(*(call.parts for call in calls), strict=True):
            self._carry_out(list(KINDS[terms.operation].flows(parts, root)), calls, terms.reduction)
            self._count(calls, sent_bytes(terms.operation, parts, root))
        self._finish(calls)

    def _deliver(self, send: Call, receive: Call) -> None:
        self._check_inputs(send)
        sent = send.parts[0].inputs[0]
        self._carry_out([Flow([(0, sent)], [(1, receive.parts[0].outputs[0])])], [send, receive], None)
        self._count([send, receive], [sent.nbytes, 0])
        receive.peer = send.index
        self._finish([send, receive])

    def _carry_out(self, flows: Sequence[Flow], calls: Sequence[Call], reduction: str | None) -> None:
        for flow in flows:
            self._check_fit(flow, calls)
        with unobserved(), _in_order(flows):
            for flow in flows:
                if all(is_data(tensor) for _, tensor in flow.slots()):
                    move(flow, reduction)

    def _check_fit(self, flow: Flow, calls: Sequence[Call]) -> None:
        sender, sent = flow.inputs[0]
        for rank, tensor in flow.slots():
            if not fits(sent, tensor):
                raise self.baton.fail(diagnosis.unfit(calls[sender], sent, calls[rank], tensor))

    def _check_inputs(self, call: Call) -> None:
        if call.inputs_changed():
            raise self.baton.fail(diagnosis.mutation(call))

    def _count(self, calls: Sequence[Call], sizes: Sequence[int]) -> None:
        for call, size in zip(calls, sizes, strict=True):
            key = (call.group.label, call.terms.operation)
            self.calls[call.rank][key] += 1
            self.sent_bytes[call.rank][key] += size

    def _finish(self, calls: Sequence[Call]) -> None:
        for call in calls:
            call.finish()
            self.baton.wake(call.rank, call)

    def _stuck(self, waiting: Mapping[int, Waiting]) -> RankError:
        return diagnosis.stuck(waiting, self.world_size)


@contextmanager
def _in_order(flows: Sequence[Flow]) -> Iterator[None]:
    """Within, data is moved on the stream of the last rank to arrive; its peers have theirs, on the same GPU."""
    on_gpu = any(tensor.is_cuda for flow in flows for _, tensor in flow.slots())
    if on_gpu:
        torch.cuda.synchronize()
    yield
    if on_gpu:
        torch.cuda.synchronize()
