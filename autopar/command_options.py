"""The options that several commands share, written once: what job is meant."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Final, cast, get_args, get_type_hints

import typer

from autopar.api import ParallelModel, compile
from autopar.cluster import presets
from autopar.errors import ArgumentError
from autopar.model_names import Named, resolve
from autopar.options import Given
from autopar.plan import Plan
from autopar.report import Progress


@dataclass(frozen=True)
class JobOptions:
    """What :func:`autopar.compile` is called with, as the command line gives it."""

    model: Annotated[str, typer.Argument(help="hf:path/to/config.json or package.module:factory")]
    mesh: Annotated[
        str | None, typer.Option(help="degrees, all (pp=2,dp=2,tp=2) or some (tp=8) (default: searched)")
    ] = None
    microbatches: Annotated[int | None, typer.Option(help="microbatches per step (default: searched)")] = None
    microbatch: Annotated[int | None, typer.Option(help="rows of a microbatch on one rank, instead")] = None
    cluster: Annotated[
        str | None, typer.Option(help=f"{', '.join(presets())}, or a TOML file (default: h100 where CUDA is, else cpu)")
    ] = None
    schedule: Annotated[
        str | None, typer.Option(help="1f1b, v-half, …, synthesized (autopar timeline --list) (default: searched)")
    ] = None
    chunks: Annotated[int | None, typer.Option(help="stages per pipeline rank (default: searched)")] = None
    vocabulary: Annotated[
        str | None, typer.Option(help="stage, redistributed, naive, vocab-1, vocab-2 or interlaced (default: searched)")
    ] = None
    batch: Annotated[int, typer.Option(help="global batch of an hf: model")] = 8
    sequence: Annotated[int, typer.Option(help="sequence length of an hf: model")] = 32
    dtype: Annotated[str, typer.Option(help="dtype of an hf: model")] = "float32"
    clip_norm: Annotated[float | None, typer.Option(help="clip the global gradient norm")] = None
    precision: Annotated[str | None, typer.Option(help="bf16 or fp16, from float32 masters (default: model)")] = None
    float8: Annotated[bool, typer.Option("--float8", help="products with weights in float8 (lossy)")] = False
    reduce_dtype: Annotated[str | None, typer.Option(help="dtype of gradients between ranks")] = None
    state_dtype: Annotated[str | None, typer.Option(help="dtype of the optimizer's moments")] = None
    zero: Annotated[int | None, typer.Option(help="ZeRO stage on dp: 0 to 3 (default: searched)")] = None
    zero_ranks: Annotated[int | None, typer.Option(help="dp ranks that share one copy, 0: all (default: searched)")] = (
        None
    )
    recompute: Annotated[str | None, typer.Option(help="auto, none, selective or full (default: auto)")] = None
    budget: Annotated[float | None, typer.Option(help="GiB of a rank (default: the device's memory)")] = None
    offload: Annotated[
        str | None, typer.Option(help="optimizer, parameters, activations (by commas), or none (default: searched)")
    ] = None
    powersgd: Annotated[int | None, typer.Option(help="rank of compressed gradient sums (lossy)")] = None
    activations: Annotated[str | None, typer.Option(help="keep them exact, lossless (bits) or 8bit (lossy)")] = None
    head_chunks: Annotated[
        int | None, typer.Option(help="chunks of tokens in which logits are computed (default: searched)")
    ] = None
    expert_imbalance: Annotated[float | None, typer.Option(help="times its share that the fullest rank gets")] = None
    expert_bias_rate: Annotated[float | None, typer.Option(help="step of selection biases (DeepSeek-V3)")] = None
    expert_load: Annotated[Path | None, typer.Option(help="loads that --loads wrote: hot experts apart")] = None
    attention: Annotated[str | None, typer.Option(help="over cp: all_gather, ring or heads (default: fastest)")] = None
    dispatch: Annotated[
        str | None, typer.Option(help="to experts of other nodes: flat, or once per node (default: fastest)")
    ] = None
    cp_order: Annotated[str | None, typer.Option(help="contiguous or paired parts (default: cheaper)")] = None
    statistics: Annotated[str | None, typer.Option(help="of auxiliary losses: of the batch or microbatch")] = None
    placement: Annotated[
        list[str] | None, typer.Option(help="of parameters, e.g. '*.down_proj.weight=tp:S(1)'; may be repeated")
    ] = None
    plan: Annotated[Path | None, typer.Option(help="take the decisions of this plan.json")] = None

    def resolved(self, *, meta: bool = False) -> Named:
        """The model and its sample batch. Raises ArgumentError."""
        return resolve(self.model, batch=self.batch, sequence=self.sequence, dtype=self.dtype, meta=meta)

    def job(
        self,
        named: Named,
        gpus: int,
        progress: Progress | None = None,
        *,
        fronts: bool = False,
        effort: float = 1.0,
    ) -> ParallelModel:
        """Compile it for ``gpus`` ranks; raises what :func:`autopar.compile` does."""
        return compile(
            named.model,
            gpus,
            sample=named.sample,
            loss=named.loss,
            mesh=None if self.mesh is None else _sizes(self.mesh),
            microbatches=self.microbatches,
            microbatch=self.microbatch,
            cluster=self.cluster,
            schedule=self.schedule,
            chunks=self.chunks,
            vocabulary=self.vocabulary,
            clip_norm=self.clip_norm,
            plan=Plan.load(self.plan) if self.plan is not None else None,
            expert_load=self.expert_load,
            progress=progress,
            fronts=fronts,
            effort=effort,
            **self._given(),
        )

    def _given(self) -> Given:
        """Of :class:`autopar.Options`, what was asked for; ``compile`` checks it."""
        asked = {name: getattr(self, name, None) for name in Given.__annotations__}
        given = {name: value for name, value in asked.items() if value is not None and value is not False}
        if self.offload is not None:
            parts = [part.strip() for part in self.offload.split(",")]
            given["offload"] = () if parts == ["none"] else tuple(parts)
        if self.budget is not None:
            if not math.isfinite(budget := self.budget * 2**30):
                raise ArgumentError(f"--budget {self.budget} is no number of GiB; leave it out for the device's memory")
            given["budget_bytes"] = round(budget)
        if self.placement:
            given["placements"] = _placements(self.placement)
        return cast(Given, given)


def _sizes(text: str) -> dict[str, int]:
    try:
        pairs = [(name.strip(), int(size)) for name, size in (part.split("=") for part in text.split(","))]
    except ValueError as error:
        raise ArgumentError(f"--mesh {text!r} doesn't read as pp=2,dp=2,tp=2") from error
    names = [name for name, _ in pairs]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ArgumentError(f"--mesh {text!r} gives {' and '.join(twice)} more than one size; give each axis one")
    return dict(pairs)


def _placements(texts: Sequence[str]) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for text in texts:
        name, _, wanted = text.rpartition("=")
        axis, _, kind = wanted.partition(":")
        if not (name and axis and kind):
            raise ArgumentError(f"--placement {text!r} doesn't read as '*.down_proj.weight=tp:S(1)'")
        kinds, axis = found.setdefault(name.strip(), {}), axis.strip()
        if axis in kinds:
            raise ArgumentError(f"--placement gives {name.strip()!r} more than one type on {axis}; give each axis one")
        kinds[axis] = kind.strip()
    return found


def takes_job(**defaults: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command all fields of :class:`JobOptions` in place of its parameter ``options``; with other ``defaults``.

    typer reads a command's parameters off its signature, so that is what changes.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        names = [field.name for field in fields(JobOptions)]

        @functools.wraps(command)
        def run(**given: Any) -> None:
            taken = {name: given.pop(name) for name in names}
            command(options=JobOptions(**taken), **given)

        hints = get_type_hints(command, include_extras=True)
        own = [p for p in inspect.signature(command).parameters.values() if p.name != "options"]
        kinds = [p.replace(annotation=hints[p.name], kind=inspect.Parameter.KEYWORD_ONLY) for p in own]
        signature = inspect.Signature([*_parameters(defaults), *kinds])
        run.__signature__ = signature  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
        return run

    return decorate


def _parameters(defaults: dict[str, Any]) -> list[inspect.Parameter]:
    hints = get_type_hints(JobOptions, include_extras=True)
    panels = {name: panel for panel, names in _PANELS.items() for name in names}
    return [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=defaults.get(name, given.default),
            annotation=_in_panel(hints[name], panels.get(name)),
        )
        for name, given in inspect.signature(JobOptions).parameters.items()
    ]


_PANELS: Final = {
    "Model": ("batch", "sequence", "dtype", "clip_norm"),
    "Degrees and schedule": (
        *("mesh", "microbatches", "microbatch", "cluster"),
        *("schedule", "chunks", "vocabulary", "placement", "plan"),
    ),
    "Memory and precision": (
        *("precision", "float8", "reduce_dtype", "state_dtype", "zero", "zero_ranks", "recompute", "budget"),
        *("offload", "powersgd", "activations", "head_chunks"),
    ),
    "Experts and long sequences": (
        *("expert_imbalance", "expert_bias_rate", "expert_load", "statistics"),
        *("dispatch", "attention", "cp_order"),
    ),
}
"""How --help groups them; what is left is a command's own."""


def _in_panel(hint: Any, panel: str | None) -> Any:
    """The annotation of an option, under the heading ``panel``."""
    kind, option = get_args(hint)
    if panel is None:
        return hint
    option = copy(option)
    option.rich_help_panel = panel
    return Annotated[kind, option]
