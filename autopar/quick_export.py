"""torch.export without what nothing here reads: stacks of all frames, and code of graphs between its passes.

Both take about a quarter of the time of a capture.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch.fx.proxy
from torch.fx._lazy_graph_module import _use_lazy_graph_module

_TORCH = "torch/__init__.py"


@contextmanager
def quick_export() -> Iterator[None]:
    """Within, graphs are made into code when that is asked for, and stacks of nodes have the frames of ``forward``
    methods alone, which are all that torch keeps of them, without their text."""
    proxy: Any = torch.fx.proxy
    symbolized = proxy.CapturedTraceback
    try:
        proxy.CapturedTraceback = _Stack
        with _use_lazy_graph_module(True):
            yield
    finally:
        proxy.CapturedTraceback = symbolized


class _Stack:
    """In the place of torch's, which also finds the names of all frames of C++."""

    def __init__(self, frame: FrameType | None) -> None:
        self._frame = frame

    @classmethod
    def extract(cls, **_: object) -> _Stack:
        return cls(sys._getframe(1))

    def summary(self) -> traceback.StackSummary:
        """The outermost first."""
        found, frame = [], self._frame
        while frame is not None:
            code = frame.f_code
            if code.co_name == "forward" or code.co_filename.endswith(_TORCH):
                place = code.co_filename, frame.f_lineno, code.co_name
                found.append(traceback.FrameSummary(*place, lookup_line=False, line=""))
            frame = frame.f_back
        return traceback.StackSummary.from_list(found[::-1])
