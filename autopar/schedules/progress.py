"""What runs when: the execution semantics of action lists, which executor, checker and timeline share.

- A rank takes its actions one after another.
- A **send** is asynchronous: it starts when its turn comes, and keeps its tensors until the peer has them.
- A **receive** blocks until its message has arrived. An executor may post it earlier, in the same order.
- Each channel (sender, receiver, forward or backward) delivers in the order of its sends and waits for no
  other channel. On NCCL that takes a communicator per channel: two ranks that each first send, then receive,
  on one shared communicator would block each other.
- An **exchange** (a collective of all pipeline ranks) is posted without waiting for the others; what uses its
  result blocks until all have posted it. All ranks post exchanges in the same order, on a communicator of
  their own.
- **REDUCE** and **REDUCE_V** are asynchronous; **STEP** waits for the rank's reductions.
- **OFFLOAD** and **FETCH** are asynchronous and concern one rank; a **FREE** blocks until its OFFLOAD has ended, a
  backward waits for its FETCH.
- Gathers and **SCATTER** are asynchronous; a pass waits for the gathers of its weights. What takes part in them are
  ranks that run one and the same list (dp), each in a pipeline of its own. They can't block each other: take any order
  in which one pipeline can run, and let all of them take each action together; so an order exists, and by the
  argument below all orders end.

A receive names the one channel it waits on, and no action looks whether a message has arrived. Such a
network computes the same, and ends or gets stuck alike, however fast its ranks and links are (Kahn, 1974,
"The semantics of a simple language for parallel programming"; an exchange is a token on a channel to every other
rank). So one run that ends proves that all do.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator

from autopar.errors import ScheduleError
from autopar.schedules.actions import Action, Schedule
from autopar.schedules.flow import RECEIVES, SENDS, Channel, channel, exchanged, is_exchange


def run_order(schedule: Schedule) -> Iterator[tuple[int, Action]]:
    """Every (rank, action) in an order in which the ranks can run them; linear in the number of actions.

    Raises ScheduleError when all ranks that are left wait for each other, naming the actions they wait in.
    """
    run = _Run(schedule)
    while run.ready:
        rank = run.ready.popleft()
        actions = schedule.lists[rank]
        while run.position[rank] < len(actions):
            action = actions[run.position[rank]]
            if not run.take(rank, action):
                break
            run.position[rank] += 1
            yield rank, action
    if run.waiting or run.awaiting:
        raise ScheduleError(_stuck(run))


class _Run:
    """Where each rank is, what is under way, and who waits for what."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.position = [0] * schedule.ranks
        self.ready = deque(range(schedule.ranks))
        self.in_flight: dict[Channel, int] = defaultdict(int)
        self.waiting: dict[Channel, int] = {}
        self.posted: dict[Action, set[int]] = defaultdict(set)
        self.awaiting: dict[Action, list[int]] = {}

    def take(self, rank: int, action: Action) -> bool:
        """Run ``action``, or wait before it: the rank is woken when it can go on."""
        kind = action.kind
        if kind in RECEIVES:
            stream = channel(rank, action)
            if not self.in_flight[stream]:
                self.waiting[stream] = rank
                return False
            self.in_flight[stream] -= 1
        elif kind in SENDS:
            stream = channel(rank, action)
            self.in_flight[stream] += 1
            if stream in self.waiting:
                self.ready.append(self.waiting.pop(stream))
        elif self.schedule.head:
            return self._take_with_exchanges(rank, action)
        return True

    def _take_with_exchanges(self, rank: int, action: Action) -> bool:
        for need in exchanged(self.schedule, action):
            if len(self.posted[need]) < self.schedule.ranks:
                self.awaiting.setdefault(need, []).append(rank)
                return False
        if is_exchange(action):
            posted = self.posted[action]
            posted.add(rank)
            if len(posted) == self.schedule.ranks:
                self.ready.extend(self.awaiting.pop(action, ()))
        return True

    def waits_for(self) -> dict[int, tuple[int, str]]:
        """Waiting rank -> a rank it waits for, and what it waits in."""
        found: dict[int, tuple[int, str]] = {}
        for stream, rank in self.waiting.items():
            found[rank] = (stream.source, str(self._action(rank)))
        for exchange, ranks in self.awaiting.items():
            missing = min(set(range(self.schedule.ranks)) - self.posted[exchange])
            for rank in ranks:
                found[rank] = (missing, f"{self._action(rank)}, which needs its {exchange}")
        return found

    def _action(self, rank: int) -> Action:
        return self.schedule.lists[rank][self.position[rank]]


def _stuck(run: _Run) -> str:
    """The ranks of one cycle of the wait-for graph, or of a path in it to a rank that has ended."""
    waits_for = run.waits_for()
    path = [min(waits_for)]
    while (peer := waits_for[path[-1]][0]) in waits_for and peer not in path:
        path.append(peer)
    ranks = path[path.index(peer) :] if peer in path else path
    waits = (f"rank {rank} waits for rank {waits_for[rank][0]} in {waits_for[rank][1]}" for rank in ranks)
    return f"schedule {run.schedule.name!r} can't go on: {', '.join(waits)}"
