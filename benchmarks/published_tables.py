"""The measurement files as tables of runs: what each row pins, what it leaves open, and rows that are left out.

Where a table says nothing of a choice that costs time, it is made here once for all of its rows, and said.
"""

from __future__ import annotations

import csv
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from published_gpt import GptSizes
from published_llama import LlamaSizes
from published_runs import Pair, Run, layer_ops

from autopar.graph import Block, op_name

Row = Mapping[str, str]
GIB = 2**30


@dataclass(frozen=True)
class Table:
    """A file's rows: ``runs``, and how many are left out for which reason. ``note``: what of them isn't modelled."""

    title: str
    file: str
    runs: Sequence[Run]
    left_out: Mapping[str, int] = field(default_factory=dict)
    note: str = ""


def read(path: Path) -> list[dict[str, str]]:
    """Rows of a table; lines that begin with # say where it comes from."""
    with path.open(encoding="utf-8") as lines:
        return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def tables(folder: Path) -> list[Table]:
    """All of whole steps."""
    return [make(file, read(folder / file)) for file, make in _TABLES]


def gpt_sizes(row: Row, **more: Any) -> GptSizes:
    names = {"layers": "layers", "width": "hidden", "heads": "heads", "vocabulary": "vocab", "sequence": "seq"}
    return GptSizes(**{name: int(row[key]) for name, key in names.items()}, **more)


def megatron_flops(sizes: GptSizes, batch: int, passes: int) -> float:
    """As Megatron counts: attention without causality; ``passes`` 3, or 4 with recomputation (arXiv 2104.04473)."""
    h, layers, s, v = sizes.width, sizes.layers, sizes.sequence, sizes.vocabulary
    head = 3 if passes == 4 else passes
    return batch * s * layers * h**2 * (24 * passes * (1 + s / (6 * h)) + 2 * head * v / (layers * h))


def interleavings(layers: int, pp: int) -> list[int]:
    """Stages per rank of a run that doesn't say how it interleaves: those next to 4 that divide a rank's layers."""
    parts = [n for n in range(1, layers // pp + 1) if layers // pp % n == 0] if pp > 1 else [1]
    return sorted({max(n for n in parts if n <= 4), min((n for n in parts if n > 4), default=1)})


_SC21: Final = {
    "1.7": (16, 0, "torch"),
    "3.6": (16, 0, "torch"),
    "7.5": (16, 0, "torch"),
    "18.4": (8, 0, "torch"),
    "39.1": (4, 0, "local"),
    "76.1": (2, 5, "local"),
    "145.6": (2, 5, "local"),
    "310.1": (1, 3, "local"),
    "529.6": (1, 1, "local"),
    "1008.0": (1, 0, "local"),
}
"""Rows of a microbatch, layers of an interleaved stage (0: stages aren't interleaved) and ``--DDP-impl`` of each model,
as examples/sc21/run_table_1.sh of github.com/NVIDIA/Megatron-LM has them; "local" sums gradients at the end."""

_OF_2021: Final[Mapping[str, Any]] = {"whole_tokens": True}
_HALF: Final[Mapping[str, Any]] = {"recompute": "full", "reduce_dtype": "bfloat16"}
"""Megatron-LM before sequence parallelism (arXiv 2205.05198); ``--fp16``, whose gradients travel in 16 bits."""


def ptdp(file: str, rows: Sequence[Row]) -> Table:
    """As the paper's own scripts launch them."""
    runs = []
    for row in rows:
        sizes = gpt_sizes(row, fused=False, dropout=0.1)
        pp, tp, dp, gpus, batch = (int(row[key]) for key in ("pp", "tp", "dp_derived", "gpus", "global_batch"))
        microbatch, layers, sums = _SC21[row["params_B"]]
        more = {**_OF_2021, "options": _HALF, "late_sums": sums == "local"}
        if layers:
            more |= {"schedule": "interleaved", "chunks": sizes.layers // pp // layers}
        rate = float(row["tflops_per_gpu"]) * 1e12 * gpus
        seconds = megatron_flops(sizes, batch, 4) / rate
        degrees = {"pp": pp, "dp": dp, "tp": tp}
        runs.append(Run(f"{row['params_B']}B", "a100", sizes, degrees, microbatch, batch, seconds, **more))
    return Table("PTD-P, weak scaling (A100)", file, runs)


_GPT3: Final = {"174.6": (96, 12288, 96), "529.6": (105, 20480, 128)}
"""Layers, width and heads of the two models of the paper's table 2, from its table 1 and section 5.2."""


def schemes(file: str, rows: Sequence[Row], scheme: str, title: str) -> Table:
    """1F1B without interleaving, tp 8 in a node, gradients summed last, as the same authors' scripts of deep pipelines
    do; or ZeRO-3 alone, as DeepSpeed had it when the paper was written (April 2021)."""
    runs = []
    for row in (row for row in rows if row["scheme"] == scheme):
        layers, width, heads = _GPT3[row["params_B"]]
        sizes = GptSizes(layers, width, heads, 51200, 2048, fused=False, dropout=0.1)
        names = ("gpus", "global_batch", "microbatch", "model_parallel_size")
        gpus, batch, microbatch, parallel = (int(row[key]) for key in names)
        seconds = megatron_flops(sizes, batch, 4) / (float(row["tflops_per_gpu"]) * 1e12 * gpus)
        sharded = parallel == 1
        degrees = {"dp": gpus} if sharded else {"pp": parallel // 8, "dp": gpus // parallel, "tp": 8}
        options = {**_HALF, **({"zero": 3} if sharded else {})}
        name = f"{row['scheme']} {row['params_B']}B on {gpus}"
        more = {**_OF_2021, "options": options, "late_sums": not sharded, "waits_for_gathers": sharded}
        runs.append(Run(name, "a100", sizes, degrees, microbatch, batch, seconds, **more))
    return Table(title, file, runs)


def h100(file: str, rows: Sequence[Row]) -> Table:
    """Microbatches and stages per rank as is fastest and fits; the distributed optimizer (else 32B doesn't fit), whose
    gathers and sums run beside compute, as those of the runs did; nothing recomputed where that fits."""
    runs = []
    for row in rows:
        sizes = gpt_sizes(row)
        pp, tp, dp, gpus, batch = (int(row[key]) for key in ("pp", "tp", "dp", "gpus", "global_batch"))
        seconds = megatron_flops(sizes, batch, 3) / (float(row["tflops_per_gpu"]) * 1e12 * gpus)
        others = tuple((rows_each, n) for n in interleavings(sizes.layers, pp) for rows_each in (1, 2, 4))
        more: dict[str, Any] = {"options": {"zero": 1}, "others": others}
        degrees = {"pp": pp, "dp": dp, "tp": tp}
        runs.append(Run(row["model"], "h100", sizes, degrees, 1, batch, seconds, **more))
    note = "tp's collectives ran beside products (--tp-comm-overlap), which ours don't; recomputation isn't published"
    return Table("Megatron-Core, weak scaling (H100)", file, runs, note=note)


_ZERO_BUBBLE: Final = {"ZB-2p": "zb-h2", "ZB-1p": "zb-h1", "1F1B": "1f1b", "1F1B-I": "interleaved"}


def zero_bubble(file: str, rows: Sequence[Row]) -> Table:
    """GPT-2's vocabulary; the paper's schedules by its automatic scheduler stand for its handcrafted H1 and H2."""
    runs, out = [], Counter[str]()
    seen = set()
    for row in rows:
        name = f"{row['model']} p{row['pp']} b{row['microbatch']} m{row['num_microbatches']} {row['schedule']}"
        reason = _zero_bubble_reason(row, name, seen)
        if reason:
            out[reason] += 1
            continue
        seen.add(name)
        sizes = gpt_sizes({**row, "vocab": "50304"}, fused=False, dropout=0.1, tied=False)
        pp, microbatch, count = (int(row[key]) for key in ("pp", "microbatch", "num_microbatches"))
        seconds = microbatch * count / (float(row["samples_per_gpu_s"]) * pp)
        chunks = (sizes.layers + 2) // pp if row["schedule"] == "1F1B-I" else None
        peak = float(row["memory_gb"]) * GIB if row["memory_gb"] else None
        more: dict[str, Any] = {"schedule": _ZERO_BUBBLE[row["schedule"]], "chunks": chunks, "peak_bytes": peak}
        runs.append(Run(name, "a100", sizes, {"pp": pp}, microbatch, microbatch * count, seconds, **more))
    return Table("Zero bubble pipelines (A100)", file, runs, out)


def _zero_bubble_reason(row: Row, name: str, seen: set[str]) -> str:
    if not row["samples_per_gpu_s"]:
        return "no measured throughput"
    if not row["layers"]:
        return "layers not given"
    if row["schedule"] not in _ZERO_BUBBLE:
        return f"schedule {row['schedule']} on V-shaped or halved stages, not described"
    return "the same run as in another table of the paper" if name in seen else ""


_VOCABULARY: Final = {
    "baseline": "stage",
    "redis": "redistributed",
    "vocab-1": "vocab-1",
    "vocab-2": "vocab-2",
    "interlaced": "interlaced",
}


def vocabulary(file: str, rows: Sequence[Row], kind: str) -> Table:
    """Without dropout, as pretrain_gpt.sh of github.com/sail-sg/VocabularyParallelism has it, and (V-Half)
    examples/pretrain_zero_bubble.sh of github.com/sail-sg/zero-bubble-pipeline-parallelism, branch v-half-vocab.
    ``redis`` is cut by our partition, which balances memory too: its peak isn't compared."""
    runs, out = [], Counter[str]()
    for row in (row for row in rows if row["schedule"] == kind):
        if row["status"] != "ok":
            out["out of memory"] += 1
            continue
        sizes = gpt_sizes(row, tied=False)
        key = f"iter_time_ms_implied_peak{320 if kind == '1F1B' else 312}"
        more: dict[str, Any] = {"schedule": "1f1b" if kind == "1F1B" else "v-half"}
        if row["method"] != "redis":
            more["peak_bytes"] = float(row["peak_mem_gb"]) * GIB
        name = f"p{row['pp']} s{row['seq']} V{int(row['vocab']) // 1000}k {row['method']}"
        batch, seconds = int(row["global_batch"]), float(row[key]) * 1e-3
        mode = _VOCABULARY[row["method"]]
        runs.append(Run(name, "a100", sizes, {"pp": int(row["pp"])}, 1, batch, seconds, vocabulary=mode, **more))
    return Table(f"Vocabulary parallelism, {kind} (A100)", file, runs, out)


_LLAMAS: Final = {
    "Llama2-13B": LlamaSizes(40, 5120, 40, 40, 13824, 32000, 4096, plain=True),
    "Llama2-70B": LlamaSizes(80, 8192, 64, 8, 28672, 32000, 4096, plain=True, fused_norms=False),
    "Llama3-8B": LlamaSizes(32, 4096, 32, 8, 14336, 128256, 8192, plain=True),
    "Llama3-70B": LlamaSizes(80, 8192, 64, 8, 28672, 128256, 8192, plain=True, fused_norms=False),
}
"""Norms as in torchtitan's train_configs when the figures were published: commits 395a52627 (Llama 2) and 1ea476e9f
(Llama 3), both of April 2024, both with ``compile = false``."""


def _other_layers(block: Block, call: int) -> list[Pair]:
    """All of every other layer."""
    order = layer_ops(block)
    return [(order[0].name, order[-1].name)] if block.kind == "layer" and call % 2 else []


def other_products(block: Block, _: int) -> list[Pair]:
    """Of a layer, all but attention and every other product, the first of them kept."""
    order = layer_ops(block) if block.kind == "layer" else []
    products = [place for place, node in enumerate(order) if op_name(node) == "aten.linear.default"]
    kept = {*products[::2], *(place for place, node in enumerate(order) if "attention" in op_name(node))}
    between = itertools.groupby(range(len(order)), key=lambda place: place in kept)
    runs = [list(places) for is_kept, places in between if not is_kept]
    return [(order[run[0]].name, order[run[-1]].name) for run in runs[:-1]]  # nothing of a layer needs its last sum


_CHECKPOINTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "none": {},
    "full": {},
    "selective layer": {"recomputed": _other_layers},
    "selective op": {"recomputed": other_products},
}
"""github.com/pytorch/torchtitan, torchtitan/parallelisms/parallelize_llama.py."""


def titan(file: str, rows: Sequence[Row]) -> Table:
    runs, out = [], Counter[str]()
    for row in rows:
        if row["model"] not in _LLAMAS:
            out["sequence not given"] += 1
        elif not row["wps"]:
            out["out of memory"] += 1
        else:
            sizes, rows_each, gpus = _LLAMAS[row["model"]], int(row["local_batch"]), int(row["gpus"])
            seconds = rows_each * sizes.sequence / float(row["wps"])
            mode = row["activation_ckpt"]
            more = {**_CHECKPOINTS[mode], "options": {"zero": 3, "recompute": "full" if mode == "full" else "none"}}
            more["copies_gathered"] = True
            name, batch = f"{row['model']} {mode} b{rows_each}", rows_each * gpus
            runs.append(Run(name, "a100", sizes, {"dp": gpus}, rows_each, batch, seconds, **more))
    note = (
        "collectives slow what is computed beside them by 18.9 % on average on GPUs (arXiv 2507.03114); of that, only "
        "the multiprocessors that they hold are modelled"
    )
    return Table("torchtitan, FSDP (A100)", file, runs, out, note)


def controllable(file: str, rows: Sequence[Row]) -> Table:
    """MFU as Megatron counts FLOPs, of 312 TFLOP/s."""
    runs, out = [], Counter[str]()
    for row in rows:
        if not (row["dp"] and row["seq"] and row["batch"]):
            out["degrees, sequence or batch not given"] += 1
            continue
        sizes = gpt_sizes({**row, "vocab": "50304"}, dropout=0.1, tied=False)
        degrees = {axis: int(row[axis]) for axis in ("pp", "dp", "tp")}
        batch, microbatch = int(row["batch"]), int(row["microbatch"])
        rate = float(row["mfu_pct"]) / 100 * 312e12 * int(row["gpus"])
        seconds = megatron_flops(sizes, batch, 3) / rate
        name = f"{row['model']} {row['method']}"
        runs.append(Run(name, "a100", sizes, degrees, microbatch, batch, seconds))
    return Table("Controllable memory (A100)", file, runs, out)


def ptdp_strong(file: str, rows: Sequence[Row]) -> Table:
    return schemes(file, rows, "PTD-P", "PTD-P, strong scaling (A100)")


def zero3(file: str, rows: Sequence[Row]) -> Table:
    note = (
        "nothing is gathered beside passes, as by DeepSpeed until summer 2021 (pull/1188); by the published steps it "
        "moved less into a node than one of its eight network cards carries, where plans reckon with all of them"
    )
    return replace(schemes(file, rows, "ZeRO-3", "ZeRO-3, strong scaling (A100)"), note=note)


def vocabulary_1f1b(file: str, rows: Sequence[Row]) -> Table:
    return vocabulary(file, rows, "1F1B")


def vocabulary_v_half(file: str, rows: Sequence[Row]) -> Table:
    return vocabulary(file, rows, "V-Half")


_TABLES: Final[Sequence[tuple[str, Callable[[str, Sequence[Row]], Table]]]] = (
    ("ptdp_sc21_table1.csv", ptdp),
    ("ptdp_sc21_table2_zero3.csv", ptdp_strong),
    ("ptdp_sc21_table2_zero3.csv", zero3),
    ("megatron_core_h100_weak_scaling.csv", h100),
    ("zero_bubble_iclr24.csv", zero_bubble),
    ("vocab_parallel_paper_tables5_6.csv", vocabulary_1f1b),
    ("vocab_parallel_paper_tables5_6.csv", vocabulary_v_half),
    ("torchtitan_performance_md_2024.csv", titan),
    ("controllable_memory_v_schedules.csv", controllable),
)
