"""What emitted programs and the job around them run on."""

from __future__ import annotations

from autopar.runtime.axes import Axes, Axis
from autopar.runtime.chunked_entropy import chunked_cross_entropy
from autopar.runtime.collectives import all_gather, all_reduce, all_to_all, convert, reduce_scatter
from autopar.runtime.contractions import linear, matmul
from autopar.runtime.float8 import float8_linear, float8_matmul
from autopar.runtime.gist import (
    dropout_replayed,
    hardtanh_kept_as_bits,
    kept_in_8_bits,
    leaky_relu_kept_as_bits,
    max_pool2d_kept_as_places,
    relu6_kept_as_bits,
    relu_kept_as_bits,
    threshold_kept_as_bits,
)
from autopar.runtime.local_ops import mean_of_whole
from autopar.runtime.modules import Container, declare
from autopar.runtime.ops import cross_entropy_sharded, embedding_rows, embedding_sharded
from autopar.runtime.program import Input, Parameter, Program, Tensor, Total, VocabularyProgram
from autopar.runtime.random import rng
from autopar.runtime.recomputation import recompute
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
    "chunked_cross_entropy",
    "convert",
    "cross_entropy_sharded",
    "declare",
    "dropout_replayed",
    "embedding_rows",
    "embedding_sharded",
    "float8_linear",
    "float8_matmul",
    "hardtanh_kept_as_bits",
    "kept_in_8_bits",
    "leaky_relu_kept_as_bits",
    "linear",
    "matmul",
    "max_pool2d_kept_as_places",
    "mean_of_whole",
    "recompute",
    "reduce_scatter",
    "relu6_kept_as_bits",
    "relu_kept_as_bits",
    "rng",
    "threshold_kept_as_bits",
]
