"""A solved model as Python modules that read as if written by hand (DESIGN 9)."""

from __future__ import annotations

from autopar.codegen.emit import EmittedStage, emit

__all__ = ["EmittedStage", "emit"]
