"""What a user pins about memory and precision: one frozen value, kept in the plan and read by every rank."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from difflib import get_close_matches
from typing import Any, Final, Literal, TypedDict

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from autopar.errors import ArgumentError

OFFLOADABLE: Final = ("optimizer", "parameters", "activations")
Precision = Literal["model", "bf16", "fp16"]
Recompute = Literal["auto", "none", "selective", "full"]
Activations = Literal["exact", "lossless", "8bit"]
Order = Literal["auto", "contiguous", "paired"]
Attention = Literal["auto", "all_gather", "ring", "heads"]
Dispatch = Literal["auto", "flat", "node"]
Statistics = Literal["batch", "microbatch"]
_FLOATS: Final = ("", "bfloat16", "float16", "float32", "float64")


def masters_on_host(offload: Collection[str]) -> bool:
    """Whether parameters and the state of their optimizer lie on the host, and are updated there.

    ``offload`` as in :class:`Options`: that of the optimizer takes the masters along, which it updates.
    """
    return "optimizer" in offload or parameters_on_host(offload)


def parameters_on_host(offload: Collection[str]) -> bool:
    """Whether what passes compute with lies on the host, too, and is copied to the device for each."""
    return "parameters" in offload


def activations_on_host(offload: Collection[str]) -> bool:
    """Whether what layers save for their backwards may go to the host until then."""
    return "activations" in offload


def weights_streamed(zero: int, offload: Collection[str], shards: int) -> bool:
    """Whether what passes compute with is on the device only while it is used: gathered from the ranks that share it
    (ZeRO 3; ``shards`` of them, at most), or copied from the host."""
    return (zero == 3 and shards > 1) or parameters_on_host(offload)


class Given(TypedDict, total=False):
    """The fields of :class:`Options` as keyword arguments."""

    precision: Precision
    float8: bool
    reduce_dtype: str
    state_dtype: str
    zero: int
    zero_ranks: int
    recompute: Recompute
    budget_bytes: int | None
    offload: Sequence[str]
    powersgd: int
    activations: Activations
    head_chunks: int
    cp_order: Order
    attention: Attention
    dispatch: Dispatch
    statistics: Statistics
    expert_imbalance: float
    expert_bias_rate: float
    placements: dict[str, dict[str, str]]


class Options(BaseModel):
    """How a job saves memory, and in which precision it computes. The defaults change nothing.

    * ``precision``: ``"bf16"`` or ``"fp16"`` computes what ``torch.autocast`` would, from float32 masters, fp16 under
      dynamic loss scaling; ``"model"``: as the model is written. ``float8`` computes products with weights in 8 bits,
      where the device can: lossy.
    * ``reduce_dtype``: of gradients on their way between ranks; ``state_dtype``: of the optimizer's moments
      (``""``: as the masters).
    * ``zero``: 1 splits optimizer state over ``dp``, 2 gradients too, 3 parameters too (Rajbhandari et al., "ZeRO",
      SC 2020); ``zero_ranks`` neighbouring ranks share one copy, the groups replicate it (0: all of ``dp``;
      without ``zero``, 1 to 3 are searched).
    * ``recompute``: ``"auto"`` recomputes what costs the least extra time so that a rank fits ``budget_bytes`` (None:
      the device's memory), nothing where there is room; ``"selective"`` what is cheap to recompute and large to keep;
      ``"full"`` every layer; ``"none"``.
    * ``offload``: of :data:`OFFLOADABLE`, what lives on the host while it isn't used.
    * ``powersgd``: rank of the approximation that gradients are summed over ``dp`` in (0: exact sums). Lossy.
    * ``activations``: what autograd keeps, ``"exact"``, as bits and seeds where those say the same (``"lossless"``),
      or in ``"8bit"`` (lossy).
    * ``head_chunks``: in how many chunks of tokens logits and their loss are computed.
    * ``cp_order``: ranks of ``cp`` hold ``"contiguous"`` parts of a sequence, or ``"paired"`` ones, from either end, so
      that causal attention is equal work; ``"auto"``: as is cheaper.
    * ``statistics``: what a model computes of sums over its batch (losses of routers) is of the whole ``"batch"``,
      which no microbatch has: it is refused where there are several. With ``"microbatch"`` each takes what it sees for
      its share, as accumulating gradients on one device does; tokens are still counted over the batch.
    * ``attention``: how a sequence split over ``cp`` attends: to gathered keys and values (``"all_gather"``), to blocks
      of them that go round (``"ring"``), or to all of it for some heads (``"heads"``); ``"auto"``: each layer as is
      fastest.
    * ``dispatch``: how tokens travel to experts on other nodes: a row for each of their experts, to all ranks at once
      (``"flat"``), or once to each node that has any, and from there within it (``"node"``); ``"auto"``: each layer as
      is fastest.
    * ``expert_imbalance``: how many times its share of the slots of a layer's experts the fullest rank is reckoned to
      get, where no load was measured. Costs and memory are those of that rank.
    * ``expert_bias_rate``: by how much selection biases move after each step, up for experts that got less than their
      share of the step's slots, down for others (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).
    * ``placements``: how parameters are split, by patterns over their names and by axis: ``{"*.down_proj.weight":
      {"tp": "S(1)"}}`` splits dim 1 over ``tp``, ``"I"`` doesn't split; what isn't named is as is fastest.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    precision: Precision = "model"
    float8: bool = False
    reduce_dtype: str = ""
    state_dtype: str = ""
    zero: int = Field(default=0, ge=0, le=3)
    zero_ranks: int = Field(default=0, ge=0)
    recompute: Recompute = "auto"
    budget_bytes: int | None = Field(default=None, gt=0)
    offload: tuple[str, ...] = Field(default=(), strict=False)  # a list in JSON
    powersgd: int = Field(default=0, ge=0)
    activations: Activations = "exact"
    head_chunks: int = Field(default=1, ge=1)
    cp_order: Order = "auto"
    attention: Attention = "auto"
    dispatch: Dispatch = "auto"
    statistics: Statistics = "batch"
    expert_imbalance: float = Field(default=1.0, ge=1.0, allow_inf_nan=False)
    expert_bias_rate: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)
    placements: dict[str, dict[str, str]] = {}

    @model_validator(mode="after")
    def _check(self) -> Options:
        for name in ("reduce_dtype", "state_dtype"):
            if getattr(self, name) not in _FLOATS:
                raise ValueError(f"{name}={getattr(self, name)!r}; it may be one of {', '.join(_FLOATS[1:])}")
        if unknown := [item for item in self.offload if item not in OFFLOADABLE]:
            raise ValueError(f"offload names {unknown}; it may name {', '.join(OFFLOADABLE)}")
        if self.zero_ranks and not self.zero and "zero" in self.model_fields_set:  # else it is searched
            raise ValueError(f"zero_ranks={self.zero_ranks} without ZeRO; say zero=1, 2 or 3 with it")
        if self.powersgd and self.zero >= 2:
            raise ValueError(
                f"powersgd={self.powersgd} sums whole gradients, which zero={self.zero} never has; use zero=0 or 1"
            )
        return self

    @classmethod
    def of(cls, **given: Any) -> Options:
        """The options with ``given`` names. Raises ArgumentError for a name or value that isn't one."""
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(map(str, first["loc"]))
            if first["type"] == "extra_forbidden":
                close = get_close_matches(name, cls.model_fields, n=1)
                meant = f" (did you mean {close[0]!r}?)" if close else ""
                raise ArgumentError(
                    f"there is no option {name!r}{meant}; options are {', '.join(cls.model_fields)}"
                ) from error
            problem = first["msg"].removeprefix("Value error, ")
            if first["type"] == "tuple_type":
                problem = f"give a tuple of names, such as ({OFFLOADABLE[0]!r},)"
            raise ArgumentError(f"{name}={first['input']!r}: {problem}" if name else problem) from error

    def __str__(self) -> str:
        """``zero 3, recompute full``; empty where nothing is asked for."""
        return self.beside(Options())

    def beside(self, other: Options) -> str:
        """``zero 1, within 26 GiB, no offload``: what is other than in ``other``."""
        return ", ".join(_text(name, value) for name, value in self if value != getattr(other, name))


def _text(name: str, value: Any) -> str:
    if name == "budget_bytes":
        return f"within {value / 2**30:.3g} GiB" if value else "the device's memory"
    words = name.replace("_", " ")
    if value is False or value in (None, "", (), {}):
        return f"no {words}"
    if isinstance(value, dict):
        value = " ".join(f"{what}={axis}:{kind}" for what, kinds in value.items() for axis, kind in kinds.items())
    elif isinstance(value, tuple):
        value = "+".join(value)
    return words if value is True else f"{words} {value}"
