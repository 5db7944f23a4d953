"""What a GPT of Megatron's shape costs on pipeline ranks: pass times, kept bytes and state, from formulas alone.

One transformer layer on b sequences of s tokens, width h (fp16, flash attention, nothing recomputed):

===================  ==================================================================================================
products, forward    24 b s h^2 FLOP in matrices, 4 b s^2 h in attention (2.5 times that in its backward)
memory, forward      26 tensors [b, s, h] read or written outside of products (2 norms, 2 residuals with dropout,
                     GELU on 4 h, copies of Q, K, V); 40 in the backward
kept for backward    34 b s h bytes (V. Korthikanti et al., arXiv 2205.05198, table 2, without the attention matrix);
                     after ``I``, the 14 of the products' inputs and the 18 of their outputs' gradients
parameters           12 h^2, 16 bytes each: fp16 and its gradient, fp32 and both moments (arXiv 1910.02054, 3.1)
===================  ==================================================================================================

Output layer of V classes: 2 b s h V FLOP forward, 4 backward. Bytes per logit, as Megatron's cross entropy moves them:
38 forward and 14 backward, whole; 46 in ``S`` and 14 in ``T``, split. Input layer: 6 tensors [b, s, h] forward;
backward, 12 bytes for each element of its table (a dense gradient is cleared, made, added).

Products run at ``sustained`` times the peak rate, in place of the roofline's ``achievable_fraction``: what long runs
hold, power limit included. :func:`sustained_fraction` takes it from the profiled pass times of another paper (Qi et
al., arXiv 2401.10241, table 9: 1.5B to 28.3B, no flash attention, no split vocabulary), not from predicted rows.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from autopar.cluster import Cluster, Device
from autopar.cost_models import collective, compute, step
from autopar.schedules import Costs

DTYPE, ITEM = "float16", 2
STATE_BYTES = 16
MIXED_BYTES = 18
"""Per parameter and step: fp16 gradients read as fp32, checked for overflow and cleared, fp16 parameters written."""

LOGIT_BYTES = 10
"""At the peak of a whole head's backward: fp32 softmax, fp32 gradient, its fp16 copy."""

KEPT, LATER = 34, 32
HEAD_BYTES: Mapping[str, tuple[int, int]] = {"F": (38, 0), "B": (14, 0), "S": (46, 0), "T": (14, 0)}


@dataclass(frozen=True)
class Gpt:
    """Sizes of a model and of one microbatch."""

    layers: int
    hidden: int
    heads: int
    seq: int
    vocab: int = 0
    microbatch: int = 1
    flash: bool = True

    @property
    def tokens(self) -> int:
        return self.microbatch * self.seq

    @property
    def wire_bytes(self) -> int:
        """Of one [b, s, h]."""
        return ITEM * self.tokens * self.hidden

    @property
    def attention_bytes(self) -> int:
        """Of the passes over the attention matrix [b, heads, s, s] in a forward without flash attention."""
        return 0 if self.flash else 7 * ITEM * self.microbatch * self.heads * self.seq**2


@dataclass(frozen=True)
class Machine:
    """Where it runs: a cluster, and the share of the peak rate that products hold."""

    cluster: Cluster
    sustained: float

    @cached_property
    def device(self) -> Device:
        return replace(self.cluster.device, achievable_fraction=self.sustained, sustained_fraction=1.0)

    def seconds(self, flops: float, bytes_: float) -> float:
        """Products and the memory traffic between them, one after the other."""
        products = compute.seconds(flops, 0, DTYPE, self.device) if flops else 0.0
        return products + bytes_ / self.device.memory_bytes_per_second


def layer_seconds(gpt: Gpt, machine: Machine) -> tuple[float, float, float]:
    """Forward, input-gradient and weight-gradient pass of one transformer layer."""
    products = 24 * gpt.tokens * gpt.hidden**2
    attention = 4 * gpt.tokens * gpt.seq * gpt.hidden
    forward = machine.seconds(products + attention, 26 * gpt.wire_bytes + gpt.attention_bytes)
    back = machine.seconds(products + 2.5 * attention, 40 * gpt.wire_bytes + 2 * gpt.attention_bytes)
    return forward, back, machine.seconds(products, 0)


def sustained_fraction(rows: Iterable[Mapping[str, str]], cluster: Cluster) -> float:
    """The share at which the formulas give the profiled forward and both backward passes; the median of all rows."""
    return statistics.median(_sustained(row, cluster) for row in rows)


def _sustained(row: Mapping[str, str], cluster: Cluster) -> float:
    gpt = Gpt(
        *(int(row[key]) for key in ("layers", "hidden", "heads", "seq")), microbatch=int(row["microbatch"]), flash=False
    )
    layers = (gpt.layers + 2) / int(row["pp"])  # the first and the last stage have one layer less
    measured = sum(float(row[key]) for key in ("T_F_ms", "T_B_ms", "T_W_ms")) * 1e-3 / layers
    memory = sum(layer_seconds(gpt, Machine(cluster, 1.0))) - sum(_products(gpt, Machine(cluster, 1.0)))
    return sum(_products(gpt, Machine(cluster, 1.0))) / (measured - memory)


def _products(gpt: Gpt, machine: Machine) -> tuple[float, ...]:
    """The part of :func:`layer_seconds` that the rate of products decides."""
    bare = replace(gpt, flash=True)
    traffic = (26, 40, 0)
    seconds = layer_seconds(bare, machine)
    return tuple(s - machine.seconds(0, t * gpt.wire_bytes) for s, t in zip(seconds, traffic, strict=True))


@dataclass(frozen=True)
class Placed:
    """A model on pipeline ranks: ``layers[stage]``, ``placement[stage]``; ``head`` as in a schedule, where empty the
    embedding is in the first stage, and the head in the last."""

    gpt: Gpt
    machine: Machine
    placement: tuple[int, ...]
    layers: tuple[int, ...]
    head: str = ""
    synchronous: bool = False

    @property
    def ranks(self) -> int:
        return max(self.placement) + 1

    @property
    def rows(self) -> int:
        return -(-self.gpt.vocab // self.ranks)

    def held(self, rank: int) -> list[int]:
        return [stage for stage, home in enumerate(self.placement) if home == rank]

    def costs(self) -> Costs:
        """Times and kept bytes of one microbatch, and the optimizer's step."""
        gpt, stages = self.gpt, range(len(self.layers))
        forward, back, weights = ([n * t for n in self.layers] for t in layer_seconds(gpt, self.machine))
        if not self.head:
            forward[0] += self.machine.seconds(0, 6 * gpt.wire_bytes)
            back[0] += self.machine.seconds(0, 12 * gpt.vocab * gpt.hidden)
            product, traffic = 2 * gpt.tokens * gpt.hidden * gpt.vocab, gpt.tokens * gpt.vocab
            forward[-1] += self.machine.seconds(product, HEAD_BYTES["F"][0] * traffic)
            back[-1] += self.machine.seconds(product, HEAD_BYTES["B"][0] * traffic)
            weights[-1] += self.machine.seconds(product, 0)
        sends = [self._send(stage, stage + 1) for stage in stages]
        backs = [self._send(stage, stage - 1) for stage in stages]
        kept = [gpt.tokens * gpt.hidden * n for n in self.layers]
        return Costs(
            forward_seconds=tuple(forward),
            backward_seconds=tuple(b + w for b, w in zip(back, weights, strict=True)),
            weight_seconds=tuple(weights),
            send_forward_seconds=tuple(sends),
            send_backward_seconds=tuple(backs),
            reduce_seconds=(0.0,) * len(self.layers),
            activation_bytes=tuple(KEPT * size for size in kept),
            later_bytes=tuple(LATER * size for size in kept),
            step_seconds=tuple(self._step_seconds(rank) for rank in range(self.ranks)),
            vocabulary_seconds={kind: (s,) * self.ranks for kind, s in self._vocabulary().items()} if self.head else {},
            logits_bytes=self._logits_bytes(),
        )

    def _send(self, source: int, target: int) -> float:
        if not 0 <= target < len(self.layers) or self.placement[source] == self.placement[target]:
            return 0.0
        nodes = {self.placement[stage] // self.machine.cluster.devices_per_node for stage in (source, target)}
        link = self.machine.cluster.inter_node if len(nodes) > 1 else self.machine.cluster.intra_node
        return collective.seconds("send", self.gpt.wire_bytes, 2, link)

    def _vocabulary(self) -> dict[str, float]:
        gpt, machine = self.gpt, self.machine
        product, logits = 2 * gpt.tokens * gpt.hidden * self.rows, gpt.tokens * self.rows
        early = 2 if self.head == "vocab-2" else 1
        return {
            "S": machine.seconds(early * product, HEAD_BYTES["S"][0] * logits),
            "T": machine.seconds((3 - early) * product, HEAD_BYTES["T"][0] * logits),
            "E": machine.seconds(0, 6 * gpt.wire_bytes),
            "G": machine.seconds(0, 12 * self.rows * gpt.hidden),
            **exchange_seconds(gpt.tokens, gpt.hidden, self.ranks, machine.cluster),
        }

    def _logits_bytes(self) -> int:
        """fp32 softmax; X; for Vocab-2 also its two terms of the gradient of X."""
        if not self.head:
            return 0
        return 4 * self.gpt.tokens * self.rows + self.gpt.wire_bytes * (3 if self.head == "vocab-2" else 1)

    def parameters(self, rank: int) -> int:
        gpt, table = self.gpt, self.gpt.vocab * self.gpt.hidden
        own = sum(12 * gpt.hidden**2 * self.layers[stage] for stage in self.held(rank))
        if self.head:
            return own + 2 * self.rows * gpt.hidden
        return own + table * ((rank == self.placement[0]) + (rank == self.placement[-1]))

    def state_bytes(self, rank: int) -> int:
        """What ``rank`` holds whatever the schedule: parameters with their state, and working memory of the head."""
        working = 0
        if self.head:
            working = 4 * self.gpt.tokens * (self.gpt.hidden + 1) + 2 * self.gpt.wire_bytes  # broadcast, embeddings
        elif rank == self.placement[-1]:
            working = LOGIT_BYTES * self.gpt.tokens * self.gpt.vocab
        return STATE_BYTES * self.parameters(rank) + working

    def _step_seconds(self, rank: int) -> float:
        """AdamW in fp32 with clipping, and what mixed precision adds to it."""
        parameters, device = self.parameters(rank), self.machine.device
        return step.optimizer_seconds(parameters, device, clip=True) + self.machine.seconds(0, MIXED_BYTES * parameters)

    def peak_bytes(self, activation: Sequence[int]) -> int:
        """The largest rank's peak, given each rank's peak of kept bytes.

        Where the whole head's working memory is needed, only one microbatch is kept by its stage.
        """
        return max(self.state_bytes(rank) + kept for rank, kept in enumerate(activation))


def exchange_seconds(tokens: int, hidden: int, ranks: int, cluster: Cluster) -> dict[str, float]:
    """Of the collectives per microbatch (VocabularyParallelism's payloads; arXiv 2411.05288, sections 4 and 6.1)."""
    link = cluster.link(ranks, 1)

    def seconds(kind: str, bytes_: int) -> float:
        return collective.seconds(kind, bytes_, ranks, link)

    wire = ITEM * tokens * hidden
    return {
        "CAST_X": seconds("broadcast", 4 * tokens * (hidden + 1)),
        "STATS": 3 * seconds("all_reduce", 4 * tokens),
        "SUM_X": seconds("all_reduce", wire),
        "SUM_E": seconds("all_reduce", wire),
        "CAST_E": seconds("broadcast", wire),
    }
