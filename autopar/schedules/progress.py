"""What runs when: the execution semantics of action lists, which executor, checker and timeline share.

- A rank takes its actions one after another.
- A **send** is asynchronous: it starts when its turn comes, and keeps its tensors until the peer has them.
- A **receive** blocks until its message has arrived. An executor may post it earlier, in the same order.
- Each channel (sender, receiver, forward or backward) delivers in the order of its sends and waits for no
  other channel. On NCCL that takes a communicator per channel: two ranks that each first send, then receive,
  on one shared communicator would block each other.
- **REDUCE** is asynchronous; **STEP** waits for the rank's reductions.

A receive names the one channel it waits on, and no action looks whether a message has arrived. Such a
network computes the same, and ends or gets stuck alike, however fast its ranks and links are (Kahn, 1974,
"The semantics of a simple language for parallel programming"). So one run that ends proves that all do.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator

from autopar.errors import ScheduleError
from autopar.schedules.actions import Action, Schedule
from autopar.schedules.flow import Channel, channel, is_receive, is_send


def run_order(schedule: Schedule) -> Iterator[tuple[int, Action]]:
    """Every (rank, action) in an order in which the ranks can run them; linear in the number of actions.

    Raises ScheduleError when all ranks that are left wait for each other, naming the actions they wait in.
    """
    position = [0] * schedule.ranks
    in_flight: Counter[Channel] = Counter()
    waiting: dict[Channel, int] = {}
    ready = deque(range(schedule.ranks))
    while ready:
        rank = ready.popleft()
        actions = schedule.lists[rank]
        while position[rank] < len(actions):
            action = actions[position[rank]]
            if is_receive(action):
                stream = channel(rank, action)
                if not in_flight[stream]:
                    waiting[stream] = rank
                    break
                in_flight[stream] -= 1
            elif is_send(action):
                stream = channel(rank, action)
                in_flight[stream] += 1
                if stream in waiting:
                    ready.append(waiting.pop(stream))
            position[rank] += 1
            yield rank, action
    if waiting:
        raise ScheduleError(_stuck(schedule, position, waiting))


def _stuck(schedule: Schedule, position: list[int], waiting: dict[Channel, int]) -> str:
    """The ranks of one cycle of the wait-for graph, or of a path in it to a rank that has ended."""
    waits_for = {rank: stream.source for stream, rank in waiting.items()}
    path = [min(waits_for)]
    while (peer := waits_for[path[-1]]) in waits_for and peer not in path:
        path.append(peer)
    ranks = path[path.index(peer) :] if peer in path else path
    waits = (
        f"rank {rank} waits for rank {waits_for[rank]} in {schedule.lists[rank][position[rank]]}" for rank in ranks
    )
    return f"schedule {schedule.name!r} can't go on: {', '.join(waits)}"
