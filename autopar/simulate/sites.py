"""Where in the user's program a rank called an operation."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType

import torch
import typing_extensions

_HERE = Path(__file__).parent
_RUNTIME = str(_HERE.parent / "runtime") + os.sep
_HIDDEN = (
    str(Path(torch.__file__).parent) + os.sep,
    str(_HERE) + os.sep,
    _RUNTIME,
    typing_extensions.__file__,  # torch's deprecated functions are wrapped in it
    "<frozen ",
)
_STANDARD = str(Path(os.__file__).parent) + os.sep
LONGEST = 80
"""Characters that an error shows of what a program says of itself."""


@dataclass(frozen=True)
class Site:
    """A line of the user's program, what an executor further up the stack was doing, if there is one, and what the
    operation is for, as the runtime says (:attr:`autopar.runtime.axes.Axis.purpose`)."""

    file: str
    line: int
    function: str
    action: object = None
    purpose: object = None

    def __str__(self) -> str:
        place = f"{self.file}:{self.line} in {self.function}"
        action = f", action {str(self.action)[:LONGEST]}" if self.action is not None else ""
        return place + action + (f", for {str(self.purpose)[:LONGEST]}" if self.purpose is not None else "")


def caller() -> Site:
    """The innermost line that led here, outside of torch, Python's library and this package's machinery.

    An executor shows what it is doing by a local variable called ``action``, anywhere in the stack: so it
    needs to know nothing of simulations. Nor does the runtime, whose innermost function has an ``axis`` that says what
    it is for.
    """
    user: FrameType | None = None
    runtime: FrameType | None = None
    action: object = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (user is None or action is None):
        code = frame.f_code
        if user is None and not _is_hidden(code.co_filename):
            user = frame
        if user is None and runtime is None and code.co_filename.startswith(_RUNTIME):
            runtime = frame
        if action is None and ("action" in code.co_varnames or "action" in code.co_cellvars):
            action = _unless_tensor(frame.f_locals.get("action"))
        frame = frame.f_back
    purpose = getattr(runtime.f_locals.get("axis"), "purpose", None) if runtime is not None else None
    if user is None:
        return Site("<unknown>", 0, "<unknown>", action, purpose)
    return Site(user.f_code.co_filename, user.f_lineno, user.f_code.co_name, action, purpose)


def raised_at(trace: TracebackType | None) -> Site | None:
    """The innermost line of the user's program in a traceback."""
    site = None
    while trace is not None:
        code = trace.tb_frame.f_code
        if not _is_hidden(code.co_filename):
            site = Site(code.co_filename, trace.tb_lineno, code.co_name)
        trace = trace.tb_next
    return site


def _is_hidden(file: str) -> bool:
    return file.startswith(_HIDDEN) or (file.startswith(_STANDARD) and "-packages" not in file)


def _unless_tensor(action: object) -> object:
    """A tensor that happens to have the name must not be kept alive."""
    return None if isinstance(action, torch.Tensor) else action
