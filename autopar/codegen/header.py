"""The docstring of an emitted module: what it is part of, who runs it, on what."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.codegen.classes import paths_text
from autopar.codegen.cuts import Part
from autopar.codegen.job import Job
from autopar.codegen.names import reads_parameter
from autopar.codegen.text import WIDTH, spans
from autopar.graph import INPUT_CALL, Block, Value, info, short_dtype
from autopar.mesh import AXES
from autopar.runtime.program import Program, VocabularyProgram


def header(job: Job, part: Part, program: Program) -> list[str]:
    """The docstring's lines, and an empty one."""
    title = f"Stage {part.index} of {len(job.stages)}"
    return _docstring(job, title, ("Runs", _units(job, part)), ("Ranks", _ranks(job, part)), program)


def vocabulary_header(job: Job, part: Part, program: VocabularyProgram) -> list[str]:
    """The same for a vocabulary that is split over all pipeline ranks."""
    ranks = f"all {job.mesh.world}, each with its rows of every table, of mesh {job.mesh}"
    return _docstring(job, "The vocabulary", ("Runs", _units(job, part)), ("Ranks", ranks), program)


def _docstring(
    job: Job, title: str, runs: tuple[str, str], ranks: tuple[str, str], program: Program | VocabularyProgram
) -> list[str]:
    rows = [runs, ranks, ("Batch", _batch(job)), ("Loss", _loss(job, program)), ("Plan", job.digest or "not sealed")]
    name = job.model.name.replace("\\", "").replace('"', "")
    first = f'"""{title} of {name}; written by autopar, not by hand.'
    body = [line for label, text in rows for line in _row(label, text)]
    legend = "Comments show local shapes; S(1)@tp: dim 1 is split over tp, P@tp: a pending sum over tp."
    return [first, "", *body, *(["", legend] if job.axes else []), '"""', ""]


def _row(label: str, text: str) -> list[str]:
    words, lines, line = text.split(" "), [], f"{label:<6} "
    for word in words:
        if len(line) + len(word) > WIDTH - 2:
            lines.append(line.rstrip())
            line = " " * 7
        line += word + " "
    return [*lines, line.rstrip()]


def _units(job: Job, part: Part) -> str:
    """``embed_tokens, model.layers.0 … 3, norm, lm_head``."""
    names: list[str] = []
    for index in part.calls:
        call = job.model.calls[index]
        names += [call.path] if call.path else _modules(job.model.block_of(call))
    return paths_text(list(dict.fromkeys(names))) or "code between modules"


def _modules(block: Block) -> list[str]:
    """The modules that read parameters, in order."""
    return [info(node).module for node in block.ops if info(node).module and reads_parameter(node)]


def _ranks(job: Job, part: Part) -> str:
    mesh, home = job.mesh, job.placement[part.index]
    ranks = range(home * mesh.stride("pp"), (home + 1) * mesh.stride("pp"))
    axes = [axis for axis in AXES[1:] if axis not in ("ep", "cp") or mesh.size(axis) > 1]
    places = [f"pp {home}", *(f"{axis} {spans(range(mesh.size(axis)))}" for axis in axes)]
    return f"{spans(ranks)} ({', '.join(places)}) of mesh {mesh}"


def _batch(job: Job) -> str:
    shapes = []
    for position, item in enumerate(job.model.inputs):
        local = job.meta(Value(INPUT_CALL, position))
        here = f", here {list(local.shape)}" if local.shape != item.meta.shape else ""
        shapes.append(f"{item.name} {short_dtype(item.meta.dtype)}{list(item.meta.shape)}{here}")
    count = f"; {job.microbatches} microbatches" if job.microbatches > 1 else ""
    return "; ".join(shapes) + count


def _loss(job: Job, program: Program | VocabularyProgram) -> str:
    if isinstance(program, Program) and job.vocabulary is not None:
        return "in the vocabulary, of which every rank has a part"
    over: Sequence[str] = [*(["microbatches"] if job.microbatches > 1 else []), *program.loss_axes]
    return f"a pending sum over {' and '.join(over)}" if over else "whole on every rank"
