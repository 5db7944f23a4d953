"""The user's own line: of an error, of a call that is under way, of a captured node."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Final

import torch

_NOT_THE_USERS: Final = (
    str(Path(torch.__file__).parent),
    str(Path(__file__).parent),
    str(Path("transformers", "integrations")),  # which only passes calls on, to what a config names
)


def line_of_error(error: BaseException) -> str:
    """The innermost frame of the user's own code, of the error or of what caused it: ``file:line: text``."""
    chain: BaseException | None = error
    while chain is not None:
        found = _innermost(traceback.extract_tb(chain.__traceback__))
        if found:
            return found
        chain = chain.__cause__ or chain.__context__
    return "an unknown line"


def calling_line() -> str:
    """The innermost frame of the user's own code that is running now: ``file:line: text``."""
    return _innermost(traceback.extract_stack()) or "an unknown line"


def line_of_trace(stack_trace: str) -> str:
    """``file.py:line`` of the innermost frame of a printed stack that is the user's; "" where there is no frame."""
    lines = [line for line in stack_trace.splitlines() if line.lstrip().startswith("File ")]
    if not lines:
        return ""
    own = [line for line in lines if _is_users(line)]
    parts = (own or lines)[-1].strip().split('"')
    number = parts[2].split("line ")[1].split(",")[0] if "line " in parts[2] else "?"
    return f"{Path(parts[1]).name}:{number}"


def _innermost(frames: traceback.StackSummary) -> str:
    for frame in reversed(frames):
        if _is_users(frame.filename) and not frame.filename.startswith("<"):
            return f"{frame.filename}:{frame.lineno}: {frame.line}"
    return ""


def _is_users(place: str) -> bool:
    return not any(part in place for part in _NOT_THE_USERS)
