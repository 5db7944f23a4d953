"""Runs lowered lists the slow way, with queues of real messages; knows nothing of how check works."""

from __future__ import annotations

from collections import Counter, defaultdict, deque

from autopar.schedules import Action, Schedule

PASSES = {"": (), "naive": ("S", "U", "T"), "vocab-1": ("S", "T"), "vocab-2": ("S", "T")}
EXCHANGES = {
    "": (),
    "naive": ("CAST_X", "MAX", "STATS", "SUM_X"),
    "vocab-1": ("CAST_X", "STATS", "SUM_X"),
    "vocab-2": ("CAST_X", "STATS", "SUM_X"),
}
# What a rank has to have done before it runs a vocabulary pass or brings its part into an exchange; and the exchanges
# that have to be over. X stands for the last stage's output, Y for the gradient of the first stage's input.
OWN = {
    "naive": {"U": "S", "T": "U", "MAX": "S", "STATS": "U", "SUM_X": "T", "CAST_X": "X"},
    "vocab-1": {"T": "S", "STATS": "S", "SUM_X": "T", "CAST_X": "X"},
    "vocab-2": {"T": "S", "STATS": "S", "SUM_X": "S", "CAST_X": "X"},
}
OVER = {
    "naive": {"S": "CAST_X", "U": "MAX", "T": "STATS"},
    "vocab-1": {"S": "CAST_X", "T": "STATS"},
    "vocab-2": {"S": "CAST_X", "T": "STATS", "SUM_X": "STATS"},
}


def ends_well(schedule: Schedule) -> bool:
    """Whether all ranks get to their end, having done everything once and in an order that makes sense."""
    try:
        Interpreter(schedule).run()
    except AssertionError:
        return False
    return True


class Interpreter:
    def __init__(self, schedule: Schedule) -> None:
        self.schedule, self.last = schedule, schedule.stages - 1
        self.queues: dict[tuple[int, int, str], deque[tuple[int, int]]] = defaultdict(deque)
        self.done: list[Counter[Action]] = [Counter() for _ in schedule.lists]
        self.here: list[set[tuple[str, int, int]]] = [set() for _ in schedule.lists]
        self.posts: list[list[Action]] = [[] for _ in schedule.lists]

    def run(self) -> None:
        """Raises AssertionError."""
        left = [deque(actions) for actions in self.schedule.lists]
        moved = True
        while moved:
            moved = False
            for rank, actions in enumerate(left):
                while actions and self.runs(rank, actions[0]):
                    self.done[rank][actions.popleft()] += 1
                    moved = True
        assert not any(left)
        assert not any(self.queues.values())
        for rank in range(self.schedule.ranks):
            assert self.done[rank] == self.due(rank)

    def due(self, rank: int) -> Counter[Action]:
        """All that a rank has to do, apart from receives: whether they came is for their queue to say."""
        schedule = self.schedule
        kinds = (*PASSES[schedule.head], *EXCHANGES[schedule.head])
        kinds += ("E", "G", "SUM_E", "CAST_E") if schedule.embedding else ()
        due = Counter(Action(kind, m) for kind in kinds for m in range(schedule.microbatches))
        due[Action("STEP")] = 1
        due[Action("REDUCE_V")] = int(bool(schedule.head))
        updates = any(action.kind == "UPDATE" for row in schedule.lists for action in row)
        for stage in (stage for stage, home in enumerate(schedule.placement) if home == rank):
            due[Action("REDUCE", stage=stage)] = int(not updates)
            for m in range(schedule.microbatches):
                split = Action("I", m, stage) in self.done[rank]
                for kind in ("F", *(("I", "W") if split else ("B",)), *(("UPDATE",) if updates else ())):
                    due[Action(kind, m, stage)] = 1
                for kind, other in (("SEND_F", stage + 1), ("SEND_B", stage - 1)):
                    if 0 <= other <= self.last and schedule.placement[other] != rank:
                        due[Action(kind, m, stage, schedule.placement[other])] = 1
        for action, count in self.done[rank].items():
            if action.kind.startswith("RECV"):
                due[action] = count
        return +due

    def runs(self, rank: int, action: Action) -> bool:
        """Run ``action``; False if it has to wait."""
        assert not self.done[rank][Action("STEP")]
        if action.stage >= 0 and not action.kind.startswith("RECV"):
            assert self.schedule.placement[action.stage] == rank
        if action.kind.startswith("RECV"):
            return self.receive(rank, action)
        if action.kind.startswith("SEND"):
            return self.send(rank, action)
        if action.kind in ("F", "B", "I", "W", "UPDATE"):
            return self.stage_pass(rank, action)
        if action.kind.startswith(("REDUCE", "STEP")):
            return self.end(rank, action)
        return self.vocabulary(rank, action)

    def receive(self, rank: int, action: Action) -> bool:
        direction = action.kind[-1]
        queue = self.queues[action.peer, rank, direction]
        if not queue:
            return False
        source = action.stage - 1 if direction == "F" else action.stage + 1
        assert queue.popleft() == (action.microbatch, source)
        self.here[rank].add((direction, action.microbatch, source))
        return True

    def send(self, rank: int, action: Action) -> bool:
        assert (action.kind[-1], action.microbatch, action.stage) in self.here[rank]
        self.queues[rank, action.peer, action.kind[-1]].append((action.microbatch, action.stage))
        return True

    def stage_pass(self, rank: int, action: Action) -> bool:
        kind, m, stage = action.kind, action.microbatch, action.stage
        here = self.here[rank]
        if kind == "F":
            if stage == 0 and self.schedule.embedding and not self.over("SUM_E", m):
                return False
            assert stage == 0 or ("F", m, stage - 1) in here
        elif kind in ("B", "I"):
            assert ("F", m, stage) in here
            if stage == self.last and self.schedule.head and not self.over("SUM_X", m):
                return False
            assert stage == self.last or ("B", m, stage + 1) in here
            assert ("B", m, stage) not in here
        else:
            assert ("B", m, stage) in here
        if kind in "FBI":
            here.add(("F" if kind == "F" else "B", m, stage))
        return True

    def vocabulary(self, rank: int, action: Action) -> bool:
        kind, m, head = action.kind, action.microbatch, self.schedule.head
        own = {**OWN[head], "SUM_E": "E", "CAST_E": "Y", "G": "E"}.get(kind)
        over = {**OVER[head], "G": "CAST_E"}.get(kind)
        if own == "X":
            assert rank != self.schedule.placement[-1] or ("F", m, self.last) in self.here[rank]
        elif own == "Y":
            assert rank != self.schedule.placement[0] or ("B", m, 0) in self.here[rank]
        elif own:
            assert self.done[rank][Action(own, m)]
        if over and not self.over(over, m):
            assert over in ("MAX", "STATS", "CAST_X", "CAST_E")
            return False
        if len(kind) > 1:
            self.posts[rank].append(action)
            index = len(self.posts[rank]) - 1
            assert all(len(row) <= index or row[index] == action for row in self.posts)
        return True

    def over(self, kind: str, microbatch: int) -> bool:
        return all(Action(kind, microbatch) in row for row in self.posts)

    def end(self, rank: int, action: Action) -> bool:
        """A reduction, or the optimizer: everything of the kind that it ends has to be done."""
        due, done = self.due(rank), self.done[rank]
        for other, count in due.items():
            if action.kind == "REDUCE":
                before = other.kind in ("B", "I", "W") and other.stage == action.stage
            elif action.kind == "REDUCE_V":
                before = other.kind in ("T", "G")
            else:
                before = other != action
            assert not before or done[other] == count
        return True
