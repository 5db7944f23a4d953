"""What ranks keep of their stages, by their lists alone."""

from __future__ import annotations

from autopar.schedules.actions import Schedule


def kept_stages(schedule: Schedule) -> tuple[int, ...]:
    """Per stage, how many microbatches its rank keeps of it when it keeps the most of all its stages."""
    most = [0] * schedule.stages
    for rank, actions in enumerate(schedule.lists):
        kept = {stage: 0 for stage, home in enumerate(schedule.placement) if home == rank}
        total = peak = 0
        for kind, _, stage, _ in actions:
            if kind == "F":
                total += 1
                kept[stage] += 1
            elif kind in ("B", "W"):
                total -= 1
                kept[stage] -= 1
            if total > peak:
                peak = total
                for held, count in kept.items():
                    most[held] = count
    return tuple(most)


def embedded_ahead(schedule: Schedule) -> int:
    """How many microbatches a split embedding has looked up that the first stage hasn't begun, when its rank keeps the
    most of all its stages."""
    total = ahead = 0
    most = 0, 0
    for kind, _, stage, _ in schedule.lists[schedule.placement[0]]:
        total += (kind == "F") - (kind in ("B", "W"))
        ahead += (kind == "E") - (kind == "F" and stage == 0)
        most = max(most, (total, ahead))
    return max(0, most[1])
