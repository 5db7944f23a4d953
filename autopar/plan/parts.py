"""What plans are made of: frozen values that check their own figures."""

from __future__ import annotations

import math
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field

from autopar.mesh import Mesh
from autopar.options import Options

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Bytes = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=0)]
EIGHTHS: Final = 8
Eighths = Annotated[int, Field(ge=0, le=EIGHTHS)]
Positive = Annotated[int, Field(ge=1)]
Factor = Annotated[float, Field(ge=1, allow_inf_nan=False)]

BUBBLE: Final = "bubble"
PARTS: Final = {
    "forward": "forward passes of layers, without what they send",
    "backward": "backward passes of layers, without what they send and recompute",
    "recomputation": "what backwards compute again",
    "accumulation": "gradients added up over microbatches, where no product does that itself",
    "casts": "masters cast to the dtype that is computed with, and copies of weights that travel together",
    "contention": "what passes take longer because collectives beside them hold multiprocessors",
    "vocabulary": "passes of layers that are split over the pipeline, with what they send on other axes",
    "collectives": "what layers send inside of their passes",
    "exchanges": "what pipeline ranks exchange for layers that are split over them",
    "messages": "activations and their gradients from stage to stage",
    "gathers": "weights gathered for passes, or after an update",
    "scatters": "gradients scattered after backwards",
    "reduction": "gradients summed at the end of a step",
    "host copies": "activations on their way to the host and back",
    "optimizer": "update of parameters",
    "host": "what issuing all of that takes the host beyond what the device is busy",
    "scalars": "totals of the batch, loads of experts and the loss, summed over ranks before and after all passes",
    BUBBLE: "waiting for other ranks' work, without what is on its way",
}
"""What a step's time is made of: names of :class:`CostPart`, and what each is."""


SYNTHESIZED: Final = "synthesized"
"""The name of a schedule that is made for the costs at hand instead of taken from the literature."""
SCHEDULE_NAMES: Final = (
    *("naive", "gpipe", "1f1b", "interlaced", "pipedream", "interleaved"),
    *("zb-h1", "zb-h2", "zb-1p", "zb-2p", "zb", "zb-v", "v-half", "v-min", "dualpipe-v", SYNTHESIZED),
)
"""What a plan's schedule may be called: the rows of :mod:`autopar.schedules.registry`, and the one that is made."""
VOCABULARY_NAMES: Final = ("stage", "redistributed", "naive", "vocab-1", "vocab-2", "interlaced")
"""How a plan's vocabulary may be computed: the modes of :mod:`autopar.planner.modes`."""


class Value(BaseModel):
    """A frozen part of a plan; unknown fields and other types are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class InputPlan(Value):
    """A tensor of the batch: ``batch_dim`` is what microbatches and dp split; None: every rank takes it whole."""

    name: str
    path: str
    shape: list[Count]
    dtype: str
    batch_dim: int | None


class MessagePlan(Value):
    """A collective inside a block: ``bytes`` of a rank's larger tensor, ``times`` a microbatch, over ``axis`` (several:
    ``"ep+tp"``)."""

    axis: str
    kind: str
    bytes: Bytes
    backward: bool
    times: Positive = 1


class NodePlan(Value):
    """One op, parameter or input of a block: ``shape`` of what a rank holds of it, types per axis (``choices``:
    ``"S(2), S(0) -> P"``; a parameter's is its storage), and what it sends. ``source`` is the user's line of an op, the
    name in the block's modules of a parameter or buffer."""

    name: str
    op: str
    source: str
    shape: list[Count]
    dtype: str
    choices: dict[str, str]
    messages: list[MessagePlan] = []


class RecomputePlan(Value):
    """One choice of what a block recomputes in its backward: ``regions`` by the names of their first and last op; what
    it keeps then (``saved``: the nodes whose memory that is; ``saved_bytes`` per microbatch), the seconds it adds to
    the backward, and the bytes that a region's tensors take again meanwhile."""

    regions: list[list[str]]
    saved: list[str]
    saved_bytes: Bytes
    seconds: Seconds
    transient_bytes: Bytes


class BlockPlan(Value):
    """One distinct piece of the model; ``paths`` are the modules that are calls of it.

    ``saved_bytes`` is what a call keeps of a microbatch if it recomputes nothing; ``recompute`` what calls recompute.
    """

    name: str
    kind: str
    paths: list[str]
    nodes: list[NodePlan]
    saved_bytes: Bytes = 0
    recompute: list[RecomputePlan] = []


class ExpertsPlan(Value):
    """The experts of one layer (the module path of its router's choice), of which each token takes ``choices``.

    Each of the ``ranks`` of ``axes`` holds its own ``experts / ranks`` (1: every rank holds all). ``imbalance``: how
    many times its share of the slots the fullest of them is reckoned to get, which no order of experts makes less than
    ``bound``; ``order[p]`` is the expert stored at place ``p`` (empty: p itself). On the axes ``whole`` all ranks have
    the same tokens, and each takes those of its own experts; on the others tokens travel: a rank sends ``sent_bytes``
    to others, of a microbatch and on the average, and gets as much back. By way of several ``nodes`` a token goes once
    to each that has any of its experts, which are ``across_bytes`` of these, and from there within it.
    """

    layer: str
    experts: Positive
    choices: Positive
    axes: list[str]
    ranks: Positive
    imbalance: Factor
    bound: Factor
    order: list[Count]
    whole: list[str]
    nodes: Positive
    sent_bytes: Bytes
    across_bytes: Bytes


class StagePlan(Value):
    """One pipeline stage: calls ``first .. last`` of the model, what they are, what they cost a microbatch.

    ``rank`` is the pipeline rank that holds it, which keeps ``inflight`` microbatches of it when it keeps the most.
    ``recompute`` has a number for each unit: 0 where nothing is recomputed, else its place in the block's list, from 1.
    ``offloads``: of so many of eight microbatches, what is kept goes to the host between forward and backward.
    """

    rank: Count
    first: Count
    last: Count
    units: list[str]
    forward_seconds: Seconds
    backward_seconds: Seconds
    parameter_bytes: Bytes
    saved_bytes: Bytes
    inflight: Count
    recompute: list[Count] = []
    offloads: Eighths = 0


class RankPlan(Value):
    """What one pipeline rank holds: its stages, its rows of split vocabulary layers, its device memory at the peak.

    ``kinds`` (:data:`autopar.storages.KINDS`) make up ``peak_bytes``, reached in ``action``; where that is "", they are
    what the solvers added up: state, saved activations, the largest temporaries of a pass, no buffers. ``host_bytes``:
    beside it. ``saved_bytes``: the most that its list has it keep for backwards.
    """

    stages: list[Count]
    vocabulary_bytes: Bytes
    kinds: dict[str, Bytes]
    action: str
    peak_bytes: Bytes
    host_bytes: Bytes
    saved_bytes: Bytes = 0


class CostPart(Value):
    """A part of a step's time on one pipeline rank. ``name`` is one of :data:`PARTS`; communication has an ``axis`` and
    a ``kind`` of collective. The rank waits for ``exposed_seconds`` of it; ``hidden_seconds`` run beside other work."""

    name: str
    axis: str = ""
    kind: str = ""
    exposed_seconds: Seconds
    hidden_seconds: Seconds = 0.0


class CostPlan(Value):
    """Predicted seconds of one step and where they go, and what is proven of them.

    No placement and no cut has a step below ``bound_seconds``; no order of this cut's passes one below
    ``order_seconds`` (0: not looked for). ``parts`` are those of the busiest pipeline rank, ``rank``: what of them is
    exposed adds up to ``step_seconds``. ``model_flops`` are the operations of the model's matrix products in a step,
    forward and backward, each counted once, whatever is recomputed or computed on several ranks; a device does
    ``peak_flops_per_second`` of those in ``dtype``, in which most of them are.
    """

    step_seconds: Seconds
    bound_seconds: Seconds
    order_seconds: Seconds
    rank: Count
    parts: list[CostPart]
    model_flops: Count
    dtype: str
    peak_flops_per_second: Seconds

    def exposed_seconds(self, *names: str) -> float:
        """Of the parts of these names together."""
        return math.fsum(part.exposed_seconds for part in self.parts if part.name in names)

    @property
    def compute_seconds(self) -> float:
        """What the rank computes before the optimizer, without what it sends."""
        names = "forward", "backward", "recomputation", "accumulation", "casts", "contention", "vocabulary"
        return self.exposed_seconds(*names)

    @property
    def bubble_seconds(self) -> float:
        return self.exposed_seconds(BUBBLE)

    @property
    def optimizer_seconds(self) -> float:
        return self.exposed_seconds("optimizer")


class PointPlan(Value):
    """One point of a search: what was decided of it, and what was predicted. ``why`` says what makes it worse than the
    plan that has it, or better, in one line."""

    gpus: Positive
    mesh_sizes: dict[str, int]
    microbatches: Positive
    schedule: str
    chunks: Positive
    vocabulary: str
    options: Options
    step_seconds: Seconds
    peak_bytes: Bytes
    why: str = ""

    @property
    def mesh(self) -> Mesh:
        return Mesh.from_json(self.mesh_sizes)


class SearchPlan(Value):
    """What a search looked at, and what it proves.

    ``free`` names what wasn't pinned. Of ``points`` in the searched space, ``laid_out`` were timed action by action,
    and the others were discarded by bounds: none of all has a step below ``bound_seconds``. ``runners_up`` are the next
    best, each of another kind; ``memory_front`` are points that nothing beats in both time and peak memory, by rising
    time; ``gpus_front`` the fastest for other numbers of GPUs.
    """

    free: list[str]
    points: Count
    placed: Count
    laid_out: Count
    bound_seconds: Seconds
    runners_up: list[PointPlan] = []
    memory_front: list[PointPlan] = []
    gpus_front: list[PointPlan] = []
