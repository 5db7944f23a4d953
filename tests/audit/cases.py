"""Plans whose every part is pinned, so that each is about one thing, and how to compile them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch

import autopar
from tests import pinned, vocabulary_models
from tests.fast_cluster import BUSY, FAST, NODES
from tests.models import Case, gpt2, make, prepared
from tests.moe_models import family
from tests.shared_captures import compile_shared

PINNED: Final[Mapping[str, Any]] = {**pinned.PINNED, "recompute": "none"}


@dataclass(frozen=True)
class Plan:
    """A model by its name in tests.models, or ``moe_`` and that of a family of experts, or ``head_`` and that of one in
    tests.vocabulary_models; degrees; other pins."""

    model: str
    mesh: Mapping[str, int]
    options: Mapping[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float64
    batch: int = 8
    cluster: autopar.Cluster = FAST

    def __str__(self) -> str:
        parts = [f"{axis}{size}" for axis, size in self.mesh.items()]
        parts += [f"{name}={value}" for name, value in self.options.items()]
        parts += [] if self.dtype == torch.float64 else [str(self.dtype)]
        where = {FAST: [], BUSY: ["busy"]}.get(self.cluster, ["nodes"])
        return "-".join([self.model, *parts, *where])

    @property
    def case(self) -> Case:
        kind, _, name = self.model.partition("_")
        if kind == "moe":
            return prepared(lambda: family(name, self.batch), self.dtype)
        if self.model == "gpt2_dropout":
            return prepared(lambda: gpt2(self.batch, dropout=0.1), self.dtype)
        if kind == "head":
            return prepared(lambda: vocabulary_models.case(name, self.batch), self.dtype)
        return make(self.model, self.batch, self.dtype)

    def compile(self, **changes: Any) -> autopar.ParallelModel:
        case = self.case
        gpus = 1
        for axis, size in self.mesh.items():
            gpus *= 1 if axis == "ep" else size
        count = 2 * self.mesh["pp"] if self.mesh.get("pp", 1) > 1 else 1
        given = {**PINNED, "microbatches": count, "cluster": self.cluster, **self.options, **changes}
        return compile_shared(case.model, gpus, sample=case.batch, loss=case.loss, mesh=self.mesh, **given)


BF16: Final[Mapping[str, Any]] = {"precision": "bf16"}

TIGHT: Final[Mapping[str, Any]] = {"zero": 1, "recompute": "auto"}
"""With a budget, parts of layers are recomputed."""

BY_NODES: Final[Mapping[str, Any]] = {"dispatch": "node"}
"""Tokens travel once to each node."""

FAST_PLANS: Final = (
    Plan("llama", {"pp": 2, "dp": 2, "tp": 2}, {"microbatches": 2}),  # messages, changes between calls, tables
    Plan("mlp", {"pp": 4}, {"schedule": "zb-h1"}),
    Plan("mlp", {"pp": 2}, {"schedule": "zb-h1", "precision": "bf16"}, torch.float32),  # sums in another dtype
    Plan("mlp", {"pp": 2, "dp": 2}, {"schedule": "interleaved", "chunks": 2, "zero": 3}),
    Plan("mlp", {"dp": 4}, {"zero": 2, "zero_ranks": 2}),
    Plan(
        "mlp", {"dp": 2}, {"schedule": "interleaved", "chunks": 5, "zero": 3, "microbatches": 2}
    ),  # without a pipeline
    Plan("llama", {"cp": 2}, {"attention": "ring"}),
    Plan("llama", {"dp": 2}, {"recompute": "selective"}),
    Plan("gpt2", {"pp": 2, "tp": 2}, {"vocabulary": "vocab-1", "microbatches": 2}),  # statistics of all ranks
    Plan("head_smoothed", {"pp": 2}, {"vocabulary": "vocab-2"}),  # a table stored the other way, classes padded
    Plan("moe_mixtral", {"dp": 2, "ep": 2}),
    Plan("mlp", {"pp": 2}, {"zero": 3, **BF16}, torch.float32),  # with nobody to share rows: copies are cast once
    Plan("mlp", {"dp": 3}, {"zero": 3, **BF16}, torch.float32, batch=12),  # rows are padded
    Plan("moe_qwen2_moe", {"dp": 8, "ep": 8}, {"expert_imbalance": 1.25, **BY_NODES}, batch=16, cluster=NODES),
    Plan("mlp", {"dp": 4}, {"zero": 3, "zero_ranks": 2}, cluster=BUSY),  # what collectives slow: both passes
    Plan("mlp", {"pp": 2, "dp": 2}, {"schedule": "zb-h1", "zero": 2}, cluster=BUSY),  # the second half of the backward
    Plan("mlp", {"pp": 2, "dp": 2}, {"schedule": "dualpipe-v", "microbatches": 6}, batch=12),  # two kinds
    Plan("mlp", {"dp": 2}, {"offload": ("optimizer",), **BF16}, torch.float32, cluster=BUSY),  # updated on the host
)

SLOW_PLANS: Final = (
    Plan("nano_gpt", {"pp": 2, "dp": 2, "tp": 2}, {"microbatches": 2}),  # tied tables, sums over dp and tp
    Plan("llama", {"dp": 2}, {"precision": "bf16", "microbatches": 1}, torch.float32),
    Plan("encoder", {"dp": 2, "tp": 2}, {"zero": 1}),
    Plan("gpt2", {"pp": 2, "dp": 2}, {"schedule": "zb-h1"}),
    Plan("gpt2", {"pp": 4}, {"vocabulary": "vocab-1"}),
    Plan("gpt2", {"pp": 2}, {"vocabulary": "naive", "schedule": "zb-h1"}),
    Plan("gpt2_dropout", {"dp": 2}, {"recompute": "selective"}),
    Plan("llama", {"pp": 2, "tp": 2}, {"vocabulary": "vocab-2", "precision": "bf16"}, torch.float32),
    Plan("llama", {"pp": 2, "dp": 2, "tp": 2}, {"vocabulary": "naive"}),
    Plan("llama_tied", {"pp": 2}, {"vocabulary": "vocab-1", "head_chunks": 2, "precision": "bf16"}, torch.float32),
    Plan("head_smoothed", {"pp": 2}, {"vocabulary": "naive", "head_chunks": 2}),
    Plan("head_soft_capped", {"pp": 2}, {"vocabulary": "vocab-2", "head_chunks": 2}, batch=32),
    Plan("head_masked", {"pp": 2}, {"vocabulary": "vocab-1"}),
    Plan("head_smoothed", {"pp": 2}, {"vocabulary": "vocab-2", "precision": "bf16"}, torch.float32),  # odd rows
    Plan("head_summed", {"pp": 2}, {"vocabulary": "vocab-2"}),
    Plan("gpt2", {"dp": 2, "tp": 2}, {"head_chunks": 2}),
    Plan("llama", {"cp": 2, "tp": 2}, {"attention": "heads"}),
    Plan("llama", {"pp": 2, "cp": 2}, {"attention": "all_gather", "cp_order": "contiguous"}),
    Plan("llama", {"dp": 2, "tp": 2}, {"recompute": "full", "precision": "bf16"}, torch.float32),
    Plan("llama_tied", {"pp": 2, "dp": 2}, {"zero": 1}),
    Plan("llama_tied", {"dp": 2, "tp": 2}, {"schedule": "interleaved", "chunks": 3, "zero": 2, "microbatches": 2}),
    Plan("llama", {"pp": 2, "dp": 2}, {"schedule": "v-half", "zero": 2}),
    Plan("moe_deepseek_v3", {"dp": 2, "ep": 2, "tp": 2}),
    Plan("moe_qwen2_moe", {"dp": 4, "ep": 4}, {"zero": 1}),
    Plan("gpt2", {"dp": 4}, {"zero": 3, **BF16}, torch.float32),  # a table of both ends, small weights of two dtypes
    Plan("gpt2", {"pp": 2, "dp": 3}, {"zero": 2, **BF16}, torch.float32, batch=12),
    Plan("gpt2", {"pp": 2, "dp": 2}, {"vocabulary": "vocab-2", "zero": 3, **BF16}, torch.float32, cluster=NODES),
    Plan("head_smoothed", {"pp": 2, "dp": 2}, {"vocabulary": "vocab-2", "zero": 1}, cluster=NODES),
    Plan("llama_tied", {"pp": 2, "dp": 2}, {"zero": 3}, cluster=NODES),
    Plan("llama_tied", {"pp": 2, "dp": 2}, {"zero": 1, **BF16, "reduce_dtype": "bfloat16"}, torch.float32),
    Plan("nano_gpt", {"pp": 2}, {"schedule": "zb-v"}),  # both ends, with one table, are on one rank
    Plan("nano_gpt", {"pp": 2, "dp": 2}, {"schedule": "v-half", "zero": 2}),
    Plan("moe_deepseek_v3", {"dp": 4, "ep": 2, "tp": 2}, cluster=NODES),  # sums of several weights on the same ranks
    Plan("moe_deepseek_v3", {"dp": 2, "ep": 4, "tp": 2}, {"zero": 1}, batch=16, cluster=NODES),  # rows over two axes
    Plan("moe_mixtral", {"dp": 4, "ep": 4}, {"recompute": "full"}, cluster=NODES),
    Plan("moe_deepseek_v3", {"dp": 4, "ep": 4}, {**TIGHT, "budget_bytes": 1_000_000}, torch.float32, 64, NODES),
    Plan("gpt2", {"pp": 2, "dp": 2}, {"schedule": "zb-h1", **TIGHT, "budget_bytes": 1_690_000}, batch=16),
    Plan("mlp", {"dp": 2}, {"microbatches": 3}, batch=12, cluster=BUSY),
    Plan("mlp", {"pp": 2, "dp": 2}, {"schedule": "v-half", "zero": 1}, cluster=BUSY),
    Plan("mlp", {"pp": 2, "dp": 2}, {"schedule": "zb-v", "zero": 3, **BF16}, torch.float32, cluster=BUSY),
    Plan("llama_tied", {"pp": 2, "dp": 2}, {"zero": 3}, cluster=BUSY),
    Plan("mlp", {"pp": 2, "dp": 2}, {"zero": 1, "offload": ("optimizer",)}, cluster=BUSY),
    Plan("moe_deepseek_v3", {"dp": 4, "ep": 4}, {"zero": 1}, batch=16, cluster=BUSY),  # rows beside shared experts
    Plan("moe_deepseek_v3", {"dp": 4, "ep": 4}, {"zero": 1, **BY_NODES}, batch=16, cluster=BUSY),
    Plan("moe_deepseek_v3", {"dp": 2, "ep": 4, "tp": 2}, BY_NODES, batch=16, cluster=NODES),  # rows over two axes
    Plan("moe_qwen2_moe", {"dp": 4, "ep": 4, "tp": 2}, {"expert_imbalance": 1.5, **BY_NODES}, batch=16, cluster=NODES),
    Plan("moe_mixtral", {"dp": 4, "ep": 4}, {"recompute": "full", **BY_NODES}, cluster=NODES),
    Plan("moe_mixtral", {"dp": 4, "ep": 4}, {**BF16, **BY_NODES}, torch.float32, cluster=NODES),
    Plan("moe_deepseek_v3", {"pp": 2, "dp": 4, "ep": 4}, {"schedule": "zb-h1", **BY_NODES}, batch=16, cluster=NODES),
    Plan("mlp", {"pp": 2, "dp": 2}, {"zero": 3, "offload": ("parameters",), **BF16}, torch.float32, cluster=BUSY),
    Plan("gpt2", {"pp": 2}, {"vocabulary": "vocab-1", "offload": ("optimizer",), **BF16}, torch.float32, cluster=BUSY),
)
