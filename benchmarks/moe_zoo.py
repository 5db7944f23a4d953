"""Published runs of mixtures of experts (Megatron's MoE model zoo), each planned as it ran: what plans predict of them.

``megatron_moe_modelzoo.csv`` is the tables of the zoo's readme; the readme's text beside a table is in :data:`TABLES`.
``megatron_moe_modelzoo_scripts.csv`` is what its launch scripts say. A row's degrees, schedule, batch and recomputation
are pinned; the model is built from published sizes in plain PyTorch (:mod:`published_moe`), and goes the whole way from
capture to timeline. Nothing is fitted. Rows that moved tokens as no program of ours does are planned as the nearest
that one does; :attr:`Run.differs` says how they differ.

Megatron counts 2 FLOP per multiply-add, three times for forward and backward, attention halved by causality, nothing
for recomputation (``num_floating_point_operations`` of its ``training.py``): :func:`token_flops` counts alike, so that
TFLOP/s and seconds are two ways to say the same.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from audited import largest_difference
from processes import in_fork
from published_gpt import gpt_tokens
from published_moe import MIXTRAL_8X22B, QWEN3_235B, MoeSizes, published_moe
from published_runs import deepened, layer_ops, recomputing

from autopar.api import prepare
from autopar.cluster import Cluster
from autopar.graph import Block, Model, op_name
from autopar.mesh import Mesh
from autopar.options import Dispatch, Options, Recompute
from autopar.passes.expert_roads import nodes_of
from autopar.plan import Plan
from autopar.planner.build import Request, build
from autopar.planner.wanted import Wanted
from autopar.rules.experts import COMBINE

Row = Mapping[str, str]


MODELS: Final[Mapping[str, MoeSizes]] = {"235B": QWEN3_235B, "Mixtral-8x22B": MIXTRAL_8X22B}
QWEN: Final = "235B"

FILES: Final = ("megatron_moe_modelzoo.csv", "megatron_moe_modelzoo_scripts.csv")
"""Of the measurements; :func:`runs` takes the rows of either, or of both together."""

TABLES: Final[Mapping[str, Row]] = {
    "H100": {"GPU": "H100"},
    "Long Context": {
        "Model": QWEN,
        "Precision": "BF16",
        "PP": "8",
        "VPP": "4",
        "EP": "8",
        "MBS": "1",
        "recompute": "layernorm, moe",
        "Dispatcher": "DeepEP",
    },
    "GB200": {"Model": QWEN},
    "GB300": {"Model": QWEN},
    "Scripts": {"GPU": "H100"},
}
"""What the text and the command beside a table say of all of its rows, by the last words of its heading."""

NODES: Final = {"H100": 8, "GB200": 4, "GB300": 4}
"""GPUs of a node as the zoo counts nodes."""

RECOMPUTE: Final[Mapping[str, Recompute]] = {
    "": "none",
    "full": "full",
    "norm, act": "selective",
    "layernorm, moe": "none",
}
"""Norms and activation functions are among what "selective" takes."""

BY_NODES: Final = ("DeepEP", "HybridEP")
"""Dispatchers of Megatron that send tokens so; its all-to-all sends a row for each expert."""

LAYERS_OF_EXPERTS: Final = "layernorm, moe"
"""Norms and the whole layer of experts, its exchanges included, which is no mode of ours: such a row is planned without
recomputation, and then again with these regions pinned."""

CAPTURED_LAYERS: Final = 3
"""The fewest of which one lies between equal ones. Captures of loops over 128 experts take seconds per layer."""

UNBOUNDED_BYTES: Final = 10**12
"""A budget under which nothing is refused or recomputed beyond what the row did: that is to be timed."""


@dataclass(frozen=True)
class Run:
    """One row whose configuration is known: sizes, degrees, and the TFLOP/s per GPU that were measured."""

    model: str
    line: int
    cluster: str
    gpus: int
    sequence: int
    degrees: Mapping[str, int] = field(hash=False)
    chunks: int
    microbatch: int
    batch: int
    recompute: str
    fully_sharded: bool
    notes: str
    tflops: float
    dispatcher: str = "A2A"

    def __str__(self) -> str:
        degrees = " ".join(f"{axis}{size}" for axis, size in self.degrees.items() if size > 1)
        chunks = f" vpp{self.chunks}" if self.chunks > 1 else ""
        sharded = " fsdp" if self.fully_sharded else ""
        return f"{self.model} {self.cluster} s{self.sequence} {degrees}{chunks}{sharded}"

    @property
    def seconds(self) -> float:
        """Of a step, as measured."""
        return self.flops / (self.tflops * 1e12 * self.gpus)

    @property
    def flops(self) -> float:
        """Of a step, as Megatron counts them."""
        return token_flops(MODELS[self.model], self.sequence) * self.tokens

    @property
    def tokens(self) -> int:
        return self.batch * self.sequence

    @property
    def mesh(self) -> Mesh:
        """Experts over the innermost axes that they divide over, as Megatron lays them out: tp and cp first, then a
        part of dp."""
        pp, dp, cp, tp, ep = (self.degrees[axis] for axis in ("pp", "dp", "cp", "tp", "ep"))
        for borrowed in (("cp", "tp"), ("tp",), ("cp",), ()):
            inner = cp ** ("cp" in borrowed) * tp ** ("tp" in borrowed)
            part = max(1, ep // inner)
            if part * inner == ep and dp % part == 0:
                kept = tuple(axis for axis in borrowed if self.degrees[axis] > 1)
                return Mesh(pp=pp, dp=dp // part, ep=part, cp=cp, tp=tp, borrowed=kept)
        raise ValueError(f"line {self.line}: ep {ep} can't be borrowed from dp {dp}, cp {cp} and tp {tp}")

    @property
    def differs(self) -> str:
        """How the run moved tokens otherwise than programs of ours can, where that is between nodes; "" if it didn't.

        Megatron puts experts on neighbouring ranks, whatever axes these are part of.
        """
        ep = self.degrees["ep"]
        if self.mesh.group(0, *self.mesh.expert_axes) != tuple(range(ep)):
            return f"experts lay on {ep} neighbours, over tp and a part of cp; ours lie further apart, on several nodes"
        return ""

    @property
    def dispatch(self) -> Dispatch:
        """DeepEP and HybridEP send a token once to each node, where experts are on several."""
        nodes = nodes_of(self.mesh.expert_axes, Cluster.load(self.cluster), self.mesh)
        return "node" if self.dispatcher in BY_NODES and nodes > 1 else "flat"

    @property
    def microbatches(self) -> int:
        return self.batch // (self.degrees["dp"] * self.microbatch)

    @property
    def request(self) -> Request:
        """What is planned: the row's own configuration, ZeRO 1 (Megatron's distributed optimizer) or 3."""
        options = Options(
            precision="bf16",
            zero=3 if self.fully_sharded else 1,
            recompute=RECOMPUTE[self.recompute],
            budget_bytes=UNBOUNDED_BYTES,
            attention="ring",  # over cp, Megatron's default
            dispatch=self.dispatch,
        )
        wanted = Wanted("interleaved" if self.chunks > 1 else "1f1b", "redistributed", self.chunks)
        return Request(self.mesh, self.microbatches, Cluster.load(self.cluster), wanted, options)


def token_flops(sizes: MoeSizes, sequence: int) -> float:
    """Of one token, forward and backward, by Megatron's formula."""
    queries, keys = sizes.heads * sizes.head, sizes.groups * sizes.head
    attention = sizes.width * 2 * (queries + keys) + queries * sequence
    experts = 3 * sizes.chosen * sizes.width * sizes.inner
    return 6.0 * (sizes.layers * (attention + experts) + sizes.width * sizes.vocabulary)


def runs(rows: Iterable[Row]) -> Iterator[Run]:
    """The rows that :func:`left_out` has no reason for."""
    for row in map(_complete, rows):
        if row["SEQ LEN"] and not _reason(row):
            yield _run(row)


def left_out(rows: Iterable[Row]) -> dict[int, str]:
    """Why a row can't be planned as it ran, by its line; rows without figures are headings."""
    known = [row for row in map(_complete, rows) if row["SEQ LEN"]]
    return {int(row["line"]): _reason(row) for row in known if _reason(row)}


def _complete(row: Row) -> dict[str, str]:
    """With what the table says of all its rows, under one name for each thing."""
    table = TABLES[row["heading"].split(" > ")[-1]]
    full = {**row, **{key: row[key] or value for key, value in table.items()}}
    full["SEQ LEN"] = row["SEQ LEN"] or row["SEQ_LEN"]
    return full


def _reason(row: Row) -> str:
    if row["Model"] not in MODELS:
        return f"{row['Model']}: its module for multi-token prediction is in no model here"
    if row["Precision"] != "BF16":
        return f"{row['Precision']}: products of experts in 8 bits are no precision of ours"
    return ""


def _run(row: Row) -> Run:
    gpus = int(row["#GPUs"] or int(row["NNODES"]) * NODES[row["GPU"]])
    degrees = {axis: int(row[axis.upper()]) for axis in ("pp", "cp", "tp", "ep")}
    degrees["dp"] = gpus // (degrees["pp"] * degrees["cp"] * degrees["tp"])
    return Run(
        model=row["Model"],
        line=int(row["line"]),
        cluster=row["GPU"].lower(),
        gpus=gpus,
        sequence=int(row["SEQ LEN"]),
        degrees={axis: degrees[axis] for axis in ("pp", "dp", "cp", "tp", "ep")},
        chunks=int(row["VPP"]),
        microbatch=int(row["MBS"]),
        batch=int(row["GBS"]),
        recompute=row["recompute"],
        fully_sharded=row["FSDP"] == "On",
        notes=row["Notes"],
        tflops=float(row["Per GPU TF"] or row["TFLOPS"].split()[0]),
        dispatcher=row["Dispatcher"],
    )


@dataclass(frozen=True)
class Predicted:
    """A run, the plan made of its configuration, and the seconds of a step with what the run recomputes."""

    run: Run
    plan: Plan
    seconds: float
    difference: float | None = None
    """Of the plan's costs from those of its programs, the largest, where that was asked for."""

    @property
    def tflops(self) -> float:
        return self.run.flops / (self.seconds * 1e12 * self.run.gpus)

    @property
    def error(self) -> float:
        """Of the step's seconds: above 0, the run was faster than predicted."""
        return self.seconds / self.run.seconds - 1


def predictions(found: Iterable[Run], layers: int | None = None, *, audit: bool = False) -> Iterator[Predicted]:
    """The plan of each run's configuration, captured once for runs in a row of one model and batch: a few layers, as
    all are alike, one of which is called again. ``layers`` other than the model's are for tests. ``audit``: costs are
    read off the programs, too."""
    for (model, batch, sequence, splits), same in itertools.groupby(found, _captured_alike):
        sizes = MODELS[model]
        count = layers or sizes.layers
        options = {"device": "cuda", "precision": "bf16", "splits_sequences": splits}
        made = published_moe(sizes, sequence, layers=min(count, CAPTURED_LAYERS))
        few = prepare(made, gpt_tokens(batch, sequence), **options)[0]
        captured = deepened(few, count - CAPTURED_LAYERS) if count > CAPTURED_LAYERS else few
        yield from (Predicted(run, *in_fork(partial(_plan, captured, run, audit))) for run in same)


def _captured_alike(run: Run) -> tuple[str, int, int, bool]:
    return run.model, run.batch, run.sequence, run.degrees["cp"] > 1


def _plan(captured: Model, run: Run, audit: bool) -> tuple[Plan, float, float | None]:
    built = build(captured, run.request)
    pipeline = built.pipeline
    if run.recompute == LAYERS_OF_EXPERTS:
        pipeline = recomputing(built, run.request, _expert_regions)
    difference = largest_difference(built, pipeline) if audit else None
    return built.plan, pipeline.timeline.step_seconds, difference


def _expert_regions(block: Block, _: int) -> list[tuple[str, str]]:
    """First and last op of the norm before attention, and of all from the norm before the experts to their results."""
    order = layer_ops(block)
    ops = [op_name(node) for node in order]
    if COMBINE not in ops:
        return []
    attention = next(i for i, name in enumerate(ops) if "attention" in name)
    residual = next(i for i in range(attention, len(ops)) if ops[i] == "aten.add.Tensor")
    product = ops.index("aten.linear.default")
    return [(order[0].name, order[product - 1].name), (order[residual + 1].name, order[ops.index(COMBINE)].name)]


def mean_error(found: Sequence[Predicted]) -> float:
    """The mean of the absolute relative errors."""
    return statistics.mean(abs(one.error) for one in found)


def rank_correlation(found: Sequence[Predicted]) -> float:
    """Of predicted and measured TFLOP/s."""
    return correlation([one.run.tflops for one in found], [one.tflops for one in found])


def correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's: of ranks, equal values sharing the mean of theirs."""
    return statistics.correlation(_ranks(first), _ranks(second))


def _ranks(values: Sequence[float]) -> list[float]:
    return [statistics.mean(i for i, other in enumerate(sorted(values)) if other == value) for value in values]
