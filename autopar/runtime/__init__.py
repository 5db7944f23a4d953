"""What emitted programs and the job around them run on."""

from __future__ import annotations

from autopar.runtime.axes import Axes, Axis
from autopar.runtime.chunked_entropy import chunked_cross_entropy
from autopar.runtime.collectives import all_gather, all_reduce, all_to_all, convert, reduce_scatter
from autopar.runtime.context_attention import attention_with_offset
from autopar.runtime.contractions import linear, matmul
from autopar.runtime.cumulative import cumsum_sharded
from autopar.runtime.experts import combine, dispatch, dispatch_end, dispatch_start
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
from autopar.runtime.grouped import grouped_bias, grouped_linear
from autopar.runtime.local_ops import averaged, masked_scatter_rows, mean_of_whole
from autopar.runtime.modules import Container, declare
from autopar.runtime.ops import cross_entropy_padded, cross_entropy_sharded, embedding_rows, embedding_sharded
from autopar.runtime.program import Input, Parameter, Program, Router, Tensor, Total, VocabularyProgram
from autopar.runtime.random import rng
from autopar.runtime.recomputation import recompute
from autopar.runtime.ring_attention import ring_attention
from autopar.runtime.routing import Routing, route
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
    "Router",
    "Routing",
    "S",
    "Tensor",
    "Total",
    "VocabularyProgram",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "attention_with_offset",
    "averaged",
    "chunked_cross_entropy",
    "combine",
    "convert",
    "cross_entropy_padded",
    "cross_entropy_sharded",
    "cumsum_sharded",
    "declare",
    "dispatch",
    "dispatch_end",
    "dispatch_start",
    "dropout_replayed",
    "embedding_rows",
    "embedding_sharded",
    "float8_linear",
    "float8_matmul",
    "grouped_bias",
    "grouped_linear",
    "hardtanh_kept_as_bits",
    "kept_in_8_bits",
    "leaky_relu_kept_as_bits",
    "linear",
    "masked_scatter_rows",
    "matmul",
    "max_pool2d_kept_as_places",
    "mean_of_whole",
    "recompute",
    "reduce_scatter",
    "relu6_kept_as_bits",
    "relu_kept_as_bits",
    "ring_attention",
    "rng",
    "route",
    "threshold_kept_as_bits",
]
