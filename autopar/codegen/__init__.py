"""A solved model as Python modules that read as if written by hand (DESIGN 9)."""

from __future__ import annotations

from autopar.codegen.emit import EmittedStage, emit
from autopar.codegen.vocabulary import EmittedVocabulary, emit_vocabulary

__all__ = ["EmittedStage", "EmittedVocabulary", "emit", "emit_vocabulary"]
