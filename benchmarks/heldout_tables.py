"""Published runs that no part of the cost models was looked at with: tables taken up after these were made.

Each file of ``heldout`` says where its rows are from. As in :mod:`published_tables`, a row's degrees, microbatch,
schedule, recomputation and ZeRO are pinned, models are built from published sizes, and what a table says nothing of is
chosen once for all of its rows. No constant of a device is taken from these rows.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Final

from published_gpt import GptSizes
from published_llama import LlamaSizes
from published_runs import Run, Sizes
from published_tables import Row, Table, gpt_sizes, megatron_flops, other_products, read

from autopar.cluster import Cluster

HELDOUT: Final = Path(__file__).parent / "heldout"


def tables(folder: Path = HELDOUT) -> list[Table]:
    """All of them, one for each kind of GPU."""
    return [make(file, read(folder / file), gpu) for file, gpu, make in _TABLES]


_MPT: Final = {
    "125m": (12, 768, 12),
    "350m": (24, 1024, 16),
    "760m": (24, 1536, 12),
    "1b": (24, 2048, 16),
    "3b": (32, 2560, 20),
    "7b": (32, 4096, 32),
    "13b": (40, 5120, 40),
    "30b": (48, 7168, 56),
    "70b": (80, 8192, 64),
}
"""Layers, width and heads: scripts/train/yamls/pretrain of github.com/mosaicml/llm-foundry; the vocabulary is 50368."""


_AMPERE_ON_HOPPER: Final = (335 / 989) / (230 / 312)
"""What kernels without Hopper's instructions keep of the share that they reach on an A100: FlashAttention-2 gets to 230
of 312 TFLOP/s there, and to 335 of 989 on an H100 (arXiv 2307.08691, section 4.1)."""

_FLASH_1: Final = {"a100": (0.5, 0.35), "h100": (0.5 * _AMPERE_ON_HOPPER, 0.35 * _AMPERE_ON_HOPPER)}
"""FlashAttention, the first: at most 50 % of an A100's peak forward and 35 % backward (arXiv 2307.08691, section 1)."""

_FLASH_2: Final = (0.35, 0.35)
"""FlashAttention-2 on an H100 (arXiv 2407.08608, abstract): it has no Hopper instructions either."""


def foundry(file: str, rows: Sequence[Row], gpu: str) -> Table:
    """MPT with one flat parameter for each layer (FSDP), gathered in 16 bits for both passes of each microbatch;
    gradients are scattered in float32 (``DEFAULT``) or in 16 bits (``PURE``): ``get_mixed_precision`` of
    github.com/mosaicml/composer. Norms take and give 16 bits; attention is a kernel in Triton made after the first
    FlashAttention (``norm_type`` and ``--attn_impl`` of submit_benchmarks.py, up to the tables' commits)."""
    runs, out = [], Counter[str]()
    for row in (row for row in rows if row["gpu"] == gpu):
        gpus, microbatch, batch = (int(row[key]) for key in ("gpus", "microbatch", "global_batch"))
        if batch % (gpus * microbatch):
            out["microbatches of several sizes"] += 1
            continue
        sizes = GptSizes(*_MPT[row["model"]], vocabulary=50368, sequence=int(row["seq"]))
        is_full = row["activation_checkpointing"] == "True"
        options: dict[str, Any] = {"zero": 3, "recompute": "full" if is_full else "none"}
        if row["mixed_precision"] == "PURE":
            options["reduce_dtype"] = "bfloat16"
        seconds = batch * sizes.sequence / float(row["tokens_per_second"])
        name = f"{row['model']} s{row['seq']} b{microbatch} on {gpus}{' full' if is_full else ''}"
        more: dict[str, Any] = {"options": options, "attention": _FLASH_1[gpu], "copies_gathered": False}
        runs.append(Run(name, gpu, sizes, {"dp": gpus}, microbatch, batch, seconds, **more))
    return Table(f"MPT, FSDP ({gpu.upper()})", file, runs, out)


_MEGATRON: Final[Mapping[str, Any]] = {"fused": True}
_NEMO: Final[Mapping[str, Callable[[int, int], Sizes]]] = {
    "llama3.1-8b": lambda n, s: LlamaSizes(n, 4096, 32, 8, 14336, 128256, s, **_MEGATRON),
    "llama3.1-70b": lambda n, s: LlamaSizes(n, 8192, 64, 8, 28672, 128256, s, **_MEGATRON),
    "llama3.1-405b": lambda n, s: LlamaSizes(n, 16384, 128, 8, 53248, 128256, s, **_MEGATRON),
    "nemotron4-15b": lambda n, s: LlamaSizes(n, 6144, 48, 8, 24576, 256000, s, gated=False, **_MEGATRON),
    "nemotron4-340b": lambda n, s: LlamaSizes(n, 18432, 96, 8, 73728, 256000, s, gated=False, **_MEGATRON),
    "gpt3-175b": lambda n, s: GptSizes(n, 12288, 96, 51200, s, dropout=0.1),
}
"""Models of so many layers and positions, as the notes of each readme have their sizes."""


def nemo(file: str, rows: Sequence[Row], gpu: str) -> Table:
    """Megatron-Core through NeMo: the distributed optimizer, gradients summed in 16 bits, nothing recomputed, blocks of
    keys and values from rank to rank over cp (Transformer Engine's default), neighbours' parts paired."""
    runs = []
    for row in (row for row in rows if row["gpu"] == gpu):
        layers, sequence, gpus = (int(row[key]) for key in ("layers", "seq", "gpus"))
        pp, cp, tp, chunks = (int(row[key]) for key in ("pp", "cp", "tp", "vp"))
        degrees = {"pp": pp, "dp": gpus // (pp * cp * tp), "cp": cp, "tp": tp}
        options = {"zero": 1, "reduce_dtype": "bfloat16"}
        if cp > 1:
            options |= {"attention": "ring", "cp_order": "paired"}
        more: dict[str, Any] = {"schedule": "interleaved", "chunks": chunks} if chunks > 1 else {}
        name = f"{row['model']} {layers} layers b{row['global_batch']} on {gpus}"
        microbatch, batch = int(row["microbatch"]), int(row["global_batch"])
        sizes = _NEMO[row["model"]](layers, sequence)
        runs.append(
            Run(name, gpu, sizes, degrees, microbatch, batch, float(row["step_seconds"]), options=options, **more)
        )
    note = "tp's collectives ran beside products (userbuffers), which ours don't"
    return Table(f"Megatron-Core through NeMo ({gpu.upper()})", file, runs, note=note)


@cache
def grand_teton() -> Cluster:
    """The preset ``h100`` with the memory that the file's header says."""
    cluster = Cluster.load("h100")
    device = replace(cluster.device, memory_bytes=96 * 10**9, memory_bytes_per_second=2.4e12)
    return replace(cluster, device=device)


def titan(file: str, rows: Sequence[Row], gpu: str) -> Table:
    """Uncompiled, the ops are torchtitan's own; compiled, norms, rotary positions and SwiGLU are one kernel each.
    Attention is that of ``scaled_dot_product_attention``, which was FlashAttention-2 in torch 2.6."""
    runs = []
    for row in rows:
        gpus, microbatch, compiled = int(row["gpus"]), int(row["local_batch"]), row["compiled"] == "yes"
        ops = {"fused": True} if compiled else {"plain": True, "fused_norms": False}
        sizes = LlamaSizes(32, 4096, 32, 8, 14336, 128256, int(row["seq"]), **ops)
        more: dict[str, Any] = {"recomputed": other_products, "copies_gathered": True, "options": {"zero": 3}}
        more["attention"] = _FLASH_2
        seconds, batch = microbatch * sizes.sequence / float(row["tps"]), microbatch * gpus
        name = f"{row['model']} on {gpus}{' compiled' if compiled else ''}"
        runs.append(Run(name, grand_teton(), sizes, {"dp": gpus}, microbatch, batch, seconds, **more))
    note = "limited to 500 of 700 W, which slows products by a share that isn't published"
    return Table("torchtitan, FSDP (H100 at 500 W)", file, runs, note=note)


def sequence_parallel(file: str, rows: Sequence[Row], gpu: str) -> Table:
    """Megatron-LM of 2022: attention of several kernels, which alone is recomputed; no gradients are summed beside
    passes (``--DDP-impl local``)."""
    runs = []
    for row in rows:
        sizes = gpt_sizes(row, fused=False, dropout=0.1)
        degrees = {axis: int(row[axis]) for axis in ("pp", "dp", "tp")}
        microbatch, batch, chunks = (int(row[key]) for key in ("microbatch", "global_batch", "chunks"))
        rate = float(row["mfu_pct"]) / 100 * 312e12 * math.prod(degrees.values())
        seconds = megatron_flops(sizes, batch, 3) / rate
        more: dict[str, Any] = {"options": {"recompute": "selective"}, "late_sums": True}
        if chunks > 1:
            more |= {"schedule": "interleaved", "chunks": chunks}
        runs.append(Run(f"{row['model']} dp{row['dp']}", gpu, sizes, degrees, microbatch, batch, seconds, **more))
    return Table("Megatron-LM, sequence parallelism (A100)", file, runs)


_TABLES: Final[Sequence[tuple[str, str, Callable[[str, Sequence[Row], str], Table]]]] = (
    ("dgx_cloud_nemo.csv", "h100", nemo),
    ("dgx_cloud_nemo.csv", "gb200", nemo),
    ("llm_foundry_mpt.csv", "h100", foundry),
    ("llm_foundry_mpt.csv", "a100", foundry),
    ("torchtitan_h100_2024.csv", "h100", titan),
    ("megatron_sequence_parallel.csv", "a100", sequence_parallel),
)
