"""Which pipeline ranks and stages run the same code but for names and numbers: what one of them takes, all do."""

from __future__ import annotations

import re
from typing import Final

from autopar.runtime.job import Job

_COMMENT: Final = re.compile(r"#.*")
_NUMBER: Final = re.compile(r"(?<=\.)\d+(?=[.\"'])|(?<=\w\[)\d+(?=\])")
"""A number in a module's path: in a name, ``layers.12.mlp``, or in code, ``self.layers[12](x)``."""

_RANGE: Final = re.compile(r"range\((\d+), (\d+)\)")
"""Of modules that a loop goes through."""

_STAGE: Final = re.compile(r"\bstage=\d+,|\bplan_digest=\"\w*\",")


def likeness(job: Job, rank: int) -> dict[int, str]:
    """By stage of ``rank``, a text that is equal for those with the same code, parameters of the same shapes, and
    neighbours alike: ranks are alike if their stages are, in this order."""
    stages = job.stages(rank)
    return {stage: _canonical(job, stage) + _place(job, stage, stages) for stage in stages}


def _canonical(job: Job, stage: int) -> str:
    """The stage's text without comments and layout; numbers of modules count from 0 in the order of appearance."""
    body = job.texts[stage].split('"""', 2)[-1]  # behind the docstring, which names ranks
    numbers: dict[str, str] = {}
    body = _RANGE.sub(lambda found: f"range({int(found[2]) - int(found[1])})", body)
    body = _NUMBER.sub(lambda found: numbers.setdefault(found[0], str(len(numbers))), _COMMENT.sub("", body))
    return "".join(_STAGE.sub("", body).split()).replace(",)", ")")


def _place(job: Job, stage: int, stages: list[int]) -> str:
    """What the text doesn't say: whether it is the first or the last, and which neighbours are on another rank."""
    ends = (stage == 0, stage == len(job.texts) - 1, stage - 1 in stages, stage + 1 in stages)
    return "".join(map(str, ends))
