"""What emitted programs and the job around them run on."""

from __future__ import annotations

from autopar.runtime.axes import Axes, Axis
from autopar.runtime.collectives import all_gather, all_reduce, all_to_all, convert, reduce_scatter
from autopar.runtime.contractions import linear, matmul
from autopar.runtime.float8 import float8_linear, float8_matmul
from autopar.runtime.local_ops import mean_of_whole
from autopar.runtime.modules import Container, declare
from autopar.runtime.ops import cross_entropy_sharded, embedding_rows, embedding_sharded
from autopar.runtime.program import Input, Parameter, Program, Tensor, Total, VocabularyProgram
from autopar.runtime.random import rng
from autopar.spmd import I, P, R, S

__all__ = [
    "Axes",
    "Axis",
    "Container",
    "I",
    "Input",
    "P",
    "Parameter",
    "Program",
    "R",
    "S",
    "Tensor",
    "Total",
    "VocabularyProgram",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "convert",
    "cross_entropy_sharded",
    "declare",
    "embedding_rows",
    "embedding_sharded",
    "float8_linear",
    "float8_matmul",
    "linear",
    "matmul",
    "mean_of_whole",
    "reduce_scatter",
    "rng",
]
