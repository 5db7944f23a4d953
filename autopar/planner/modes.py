"""Where the vocabulary's layers (embedding, head, loss) are computed: what ``compile(vocabulary=...)`` may be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from autopar.errors import ArgumentError


@dataclass(frozen=True)
class Mode:
    """``head`` is the algorithm of a split head (:data:`autopar.schedules.actions.HEADS`), "" where it is whole.

    ``schedule`` is the one schedule that goes with it ("": any). ``balanced`` says whether stages are cut by cost.
    """

    summary: str
    head: str = ""
    schedule: str = ""
    balanced: bool = True


MODES: Final[Mapping[str, Mode]] = {
    "stage": Mode("embedding on the first stage, head on the last, equal numbers of layers on all", balanced=False),
    "redistributed": Mode("the same, and stages cut so that the slowest is as fast as can be"),
    "naive": Mode("rows over all pipeline ranks, three barriers per microbatch", "naive"),
    "vocab-1": Mode("rows over all pipeline ranks, two barriers", "vocab-1"),
    "vocab-2": Mode("rows over all pipeline ranks, one barrier", "vocab-2"),
    "interlaced": Mode(
        "rows over all pipeline ranks, all of them at once, between their layers", "vocab-1", "interlaced"
    ),
}


def mode_of(name: str) -> Mode:
    """Raises ArgumentError for an unknown name."""
    if not isinstance(name, str) or name not in MODES:
        raise ArgumentError(f"vocabulary={name!r} is none of {', '.join(map(repr, MODES))}")
    return MODES[name]
