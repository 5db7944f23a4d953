"""Emitted text becomes a module namespace: its ``Stage`` or ``Vocabulary`` class and its ``PROGRAM``."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import nn

from autopar.errors import PlanError
from autopar.runtime.axes import Axes
from autopar.runtime.program import Program, VocabularyProgram


@dataclass(frozen=True)
class Loaded:
    """``stage(axes)`` builds the module, parameters on the meta device; ``program`` is its interface."""

    stage: Callable[[Axes], nn.Module]
    program: Program

    def of_plan(self, digest: str) -> Loaded:
        """The same, of the plan with this ``digest``."""
        return replace(self, program=replace(self.program, plan_digest=digest))


@dataclass(frozen=True)
class LoadedVocabulary:
    """``vocabulary(axes)`` builds the module, parameters on the meta device; ``program`` is its interface."""

    vocabulary: Callable[[Axes], nn.Module]
    program: VocabularyProgram

    def of_plan(self, digest: str) -> LoadedVocabulary:
        """The same, of the plan with this ``digest``."""
        return replace(self, program=replace(self.program, plan_digest=digest))


def load_program(text: str, *, filename: str) -> Loaded:
    """Execute emitted ``text``; ``filename`` is what tracebacks show. Raises PlanError where it is no program."""
    return Loaded(*_load(text, filename, "Stage", Program))


def load_vocabulary(text: str, *, filename: str) -> LoadedVocabulary:
    """The same for the text of the vocabulary's layers. Raises PlanError where it is another text."""
    return LoadedVocabulary(*_load(text, filename, "Vocabulary", VocabularyProgram))


P = TypeVar("P")


def _load(text: str, filename: str, name: str, kind: type[P]) -> tuple[Callable[[Axes], nn.Module], P]:
    namespace: dict[str, Any] = {"__name__": filename.removesuffix(".py")}
    try:
        exec(compile(text, filename, "exec"), namespace)
    except SyntaxError as error:
        raise PlanError(f"{filename} is no complete program ({error}); write the job again") from error
    made, program = namespace.get(name), namespace.get("PROGRAM")
    if not (isinstance(made, type) and issubclass(made, nn.Module) and isinstance(program, kind)):
        raise PlanError(f"{filename} defines no {name} and PROGRAM; write the job again")
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    return made, program
