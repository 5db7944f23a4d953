"""Emitted text becomes a module namespace: its ``Stage`` class and its ``PROGRAM``."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from autopar.errors import PlanError
from autopar.runtime.axes import Axes
from autopar.runtime.program import Program


@dataclass(frozen=True)
class Loaded:
    """``stage(axes)`` builds the module, parameters on the meta device; ``program`` is its interface."""

    stage: Callable[[Axes], nn.Module]
    program: Program


def load_program(text: str, *, filename: str) -> Loaded:
    """Execute emitted ``text``; ``filename`` is what tracebacks show. Raises PlanError where it is no program."""
    namespace: dict[str, Any] = {"__name__": filename.removesuffix(".py")}
    try:
        exec(compile(text, filename, "exec"), namespace)
    except SyntaxError as error:
        raise PlanError(f"{filename} is no complete program ({error}); write the job again") from error
    stage, program = namespace.get("Stage"), namespace.get("PROGRAM")
    if not (isinstance(stage, type) and issubclass(stage, nn.Module) and isinstance(program, Program)):
        raise PlanError(f"{filename} defines no Stage and PROGRAM; write the job again")
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    return Loaded(stage, program)
