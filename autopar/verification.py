"""Is the compiled model the same as the model? Both are trained, one on one device, one on simulated ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from autopar.batch import call_arguments, flatten
from autopar.capture import loss_of
from autopar.divergence import Compiled, first_divergence
from autopar.graph import Model, info, where
from autopar.options import Options
from autopar.passes.mixed_precision import LOWER
from autopar.runtime.job import Job
from autopar.runtime.loads import Load, distinct, update_bias_
from autopar.runtime.optimizers import Maker, SchedulerMaker, one_device
from autopar.runtime.program import Router

TOLERANCES: Final = {torch.float64: 1e-9, torch.float32: 2e-5}
"""Largest relative error that is rounding, by the narrowest dtype of the model; others: the root of their epsilon."""

_AMPLIFIED: Final = (
    "loss and gradients of the first step agree: the optimizer amplifies their rounding (AdamW turns a gradient that "
    "is zero but for rounding into a whole step; a larger eps, or float64, shows whether more than that differs)"
)
_MOVED: Final = (
    "all but running averages agree: pipeline stages that share a batch norm each move averages of their own, else a "
    "rank moves them by other statistics"
)
_ESTIMATED = (
    "statistics='microbatch' is compared with gradients that one device accumulates over microbatches, each of which "
    "counts the same there: that is another loss where they have different numbers of tokens, or where it is no mean"
)
_DRAWS = (
    "{} draws random numbers, others on ranks than on one device: whether anything else differs is seen where nothing "
    "is drawn (dropout with a probability of 0, noise as a part of the batch)"
)
_NOT_ON_CPU = "computed on {}; verify it on the CPU, too: where it differs there, the first op that does is named"
_ROUNDINGS: Final = 3.0
"""How many times as far off as one device ranks may be: two that are as far off, and the largest of few draws."""
_FLOOR = 1e-4  # a tensor's error counts relative to its own largest entry, or this part of the largest of all


@dataclass(frozen=True)
class Trained:
    """Losses of each step, the last step's gradients before clipping (of what has any), the parameters after it; by
    name."""

    losses: list[float]
    gradients: dict[str, torch.Tensor]
    parameters: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Verification:
    """Relative errors of the compiled model against the model, by name.

    A tensor's error is the largest difference of its entries over the largest entry (of itself, or ``1e-4`` of the
    largest of all tensors if that is more). Where one device alone is further off than ``tolerance`` in the model's
    precision, compared with float64, three times what it is off by counts as ``tolerance``; where a gradient is nothing
    but rounding (of a bias in front of a batch norm), three of the largest of all gradients do, on either side.
    ``divergence`` names the first op whose value differs, and its source line, where not ``ok``; or says that the first
    step's gradients agree, and what was made of them doesn't.
    """

    ok: bool
    tolerance: float
    loss_error: float
    gradient_errors: dict[str, float]
    parameter_errors: dict[str, float]
    losses: list[float] = field(default_factory=list)
    divergence: str = ""

    def table(self, rows: int = 12) -> Table:
        """The worst ``rows`` parameters and buffers, as a rich table."""
        verdict = "equal" if self.ok else "NOT equal"
        table = Table(title=f"compiled and one-device model are {verdict} (tolerance {self.tolerance:.0e})")
        table.add_column("relative error of")
        table.add_column("gradient", justify="right")
        table.add_column("parameter", justify="right")
        table.add_row("loss", f"{self.loss_error:.1e}", "")
        worst = sorted(self.gradient_errors | self.parameter_errors, key=self._worst, reverse=True)
        for name in worst[:rows]:
            parameter = self.parameter_errors.get(name, 0.0)
            gradient = f"{self.gradient_errors[name]:.1e}" if name in self.gradient_errors else ""
            style = "red" if self._worst(name) > self.tolerance else ""
            table.add_row(name, gradient, f"{parameter:.1e}", style=style)
        if len(worst) > rows:
            rest = max(map(self._worst, worst[rows:]))
            table.add_row(f"… {len(worst) - rows} more, none above {rest:.0e}", "", "")
        if self.divergence:
            table.caption = self.divergence
        return table

    def _worst(self, name: str) -> float:
        return max(self.gradient_errors.get(name, 0.0), self.parameter_errors.get(name, 0.0))

    def __str__(self) -> str:
        console = Console(width=110, force_terminal=False)
        with console.capture() as capture:
            console.print(self.table())
        return capture.get()


def verify_job(job: Compiled, batch: Any, steps: int, device: str = "cpu") -> Verification:
    """Train both for ``steps`` steps on ``batch``, on ``device``, and compare losses, gradients and parameters."""
    found, averages = _compared(job, batch, steps, device)
    if found.ok:
        return found
    computed, at_first = _computed(found), found
    if computed > found.tolerance and steps > 1:
        at_first, _ = _compared(job, batch, 1, device)
    if _computed(at_first) > at_first.tolerance:
        return replace(found, divergence=_reason(job, batch, found.tolerance, device))
    trained = max([computed, *(error for name, error in found.parameter_errors.items() if name not in averages)])
    return replace(found, divergence=_AMPLIFIED if trained > found.tolerance else _MOVED)


def _computed(found: Verification) -> float:
    return max([found.loss_error, *found.gradient_errors.values()])


def _reason(job: Compiled, batch: Any, tolerance: float, device: str) -> str:
    """What ranks compute otherwise, before any update."""
    if drawing := _drawing(job.lowered):
        return drawing
    if len(_microbatches(job, batch)) > 1:
        return _ESTIMATED
    return first_divergence(job, batch, tolerance) if device == "cpu" else _NOT_ON_CPU.format(device)


def _compared(job: Compiled, batch: Any, steps: int, device: str) -> tuple[Verification, Collection[str]]:
    """Without what is to blame; and the names of running averages, which have no gradients."""
    reference = job.reference().to(device)
    dtype = narrowest_dtype(job.lowered)
    ranks = job.job
    found = job.simulate(batch, steps, device=device, track_memory=False)
    biases = _Biases.of(reference, ranks)
    microbatches = [_on(device, part) for part in _microbatches(job, batch)]
    expected = train_one_device(
        reference,
        microbatches,
        steps,
        job.loss,
        ranks.optimizer,
        ranks.clip_norm,
        scheduler=ranks.scheduler,
        options=ranks.options,
        updated=lambda step: biases.move(found.expert_load[step]),
    )
    tolerance = TOLERANCES.get(dtype, torch.finfo(dtype).eps ** 0.5)
    loss_error = max(abs(a - b) / max(abs(b), 1e-30) for a, b in zip(found.losses, expected.losses, strict=True))
    moved = {n: p for n, p in expected.parameters.items() if n in expected.gradients or n in found.parameters}
    averaged = found.buffers.keys() - biases.by_name.keys()
    averages = {n: buffer.cpu() for n, buffer in reference.named_buffers() if n in averaged}

    def errors(noise: _Noise) -> tuple[dict[str, float], dict[str, float], float]:
        gradients = relative_errors(found.gradients, expected.gradients, noise.gradients)
        wanted = moved | averages | biases.on_cpu()
        parameters = relative_errors(found.parameters | found.buffers, wanted, noise.parameters)
        return gradients, parameters, max([loss_error, *gradients.values(), *parameters.values()])

    gradients, parameters, worst = errors(_Noise())
    if worst > tolerance and dtype != torch.float64:
        wide = _in_float64(job, microbatches, steps, device)
        if wide is not None:
            seen = Trained(expected.losses, expected.gradients, expected.parameters | averages)
            gradients, parameters, worst = errors(_Noise.of(seen, wide, tolerance, torch.finfo(dtype).eps))
    ok = bool(worst <= tolerance)
    return Verification(ok, tolerance, loss_error, gradients, parameters, found.losses), averages.keys()


def _drawing(model: Model) -> str:
    """What there is to say of the first op that draws random numbers; "" if none does."""
    blocks = (model.block_of(call) for call in model.calls)
    drawing = (node for block in blocks for node in block.ops if info(node).random)
    return next((_DRAWS.format(where(node)) for node in drawing), "")


@dataclass(frozen=True)
class _Noise:
    """By name, what the largest entry of a tensor counts as, at least, where rounding may exceed the tolerance."""

    gradients: dict[str, float] = field(default_factory=dict)
    parameters: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, trained: Trained, wide: Trained, tolerance: float, eps: float) -> _Noise:
        """``wide``: the same in float64. A gradient that is nothing but rounding (``eps``) may be a sum of terms, over
        rows and over ranks, that are as large as others. Optimizers may make whole steps of such ones, which averages
        see, too."""
        off = relative_errors(trained.gradients, wide.gradients)
        least = tolerance / _ROUNDINGS
        unsure = {name: wide.gradients[name] for name, error in off.items() if least < error < math.inf}
        gradients = _limits(trained.gradients, unsure, tolerance)
        largest = max(
            (float(gradient.abs().max()) for gradient in wide.gradients.values() if gradient.numel()), default=0
        )
        for name, exact in unsure.items():
            if _ROUNDINGS * float(exact.abs().max()) < gradients[name] * tolerance:
                # the difference of two, each of them off
                gradients[name] = max(gradients[name], 2 * _ROUNDINGS * eps * largest / tolerance)
        averages = (trained.parameters.keys() & wide.parameters.keys()) - wide.gradients.keys() if unsure else ()
        moved = {name: wide.parameters[name] for name in (*unsure, *averages)}
        return cls(gradients, _limits(trained.parameters, moved, tolerance))


def _limits(
    trained: Mapping[str, torch.Tensor], wide: Mapping[str, torch.Tensor], tolerance: float
) -> dict[str, float]:
    off = {name: (trained[name].double() - exact).abs() for name, exact in wide.items() if exact.numel()}
    return {name: _ROUNDINGS * float(difference.max()) / tolerance for name, difference in off.items()}


def _in_float64(job: Compiled, microbatches: Sequence[Any], steps: int, device: str) -> Trained | None:
    """What one device does without a lower precision; None where the model's code asks for other dtypes."""
    ranks = job.job
    model, wide = job.reference().to(device).double(), [_wider(part) for part in microbatches]
    options = ranks.options.model_copy(update={"precision": "model"})
    scheduler, clip_norm = ranks.scheduler, ranks.clip_norm
    try:
        found = train_one_device(
            model, wide, steps, job.loss, ranks.optimizer, clip_norm, scheduler=scheduler, options=options
        )
    except (RuntimeError, TypeError):  # as torch refuses dtypes
        return None
    averages = {name: buffer.cpu() for name, buffer in model.named_buffers() if buffer.is_floating_point()}
    return Trained(found.losses, found.gradients, found.parameters | averages)


def _wider(batch: Any) -> Any:
    tensors, structure = flatten(batch)
    return structure.batch({path: t.double() if t.is_floating_point() else t for path, t in tensors.items()})


@dataclass(frozen=True)
class _Biases:
    """The selection biases of a one-device model: the one thing about a step that autopar adds to the model's own code.
    They move by the loads that the ranks counted."""

    routers: tuple[Router, ...]
    by_name: dict[str, torch.Tensor]
    rate: float

    @classmethod
    def of(cls, model: nn.Module, job: Job) -> _Biases:
        routers = distinct([r for loaded in job.programs for r in loaded.program.routers if r.bias])
        tensors = {name: p.detach() for name, p in model.named_parameters()} | dict(model.named_buffers())
        return cls(routers, {r.bias: tensors[r.bias] for r in routers}, job.options.expert_bias_rate)

    def move(self, load: Load) -> None:
        for router in self.routers:
            bias = self.by_name[router.bias]
            update_bias_(bias, torch.tensor(load[router.layer], device=bias.device), self.rate)

    def on_cpu(self) -> dict[str, torch.Tensor]:
        return {name: bias.cpu() for name, bias in self.by_name.items()}


def narrowest_dtype(model: Model) -> torch.dtype:
    """The floating dtype with the coarsest rounding that the model computes in (many cast to float32 inside)."""
    nodes = [node for block in model.blocks for node in block.graph.nodes if node.op != "output"]
    metas = [meta for node in nodes for meta in info(node).outputs]
    return max((m.dtype for m in metas if m.needs_grad), key=lambda dtype: torch.finfo(dtype).eps)


def _microbatches(job: Compiled, batch: Any) -> list[Any]:
    """What one device computes of ``batch`` at once: all of it, or a microbatch that has statistics of its own."""
    plan = job.plan
    if plan.options.statistics == "batch" or plan.microbatches == 1:
        return [batch]
    tensors, structure = flatten(batch)
    dims = {item.path: item.batch_dim for item in plan.inputs}

    def part(path: str, number: int) -> torch.Tensor:
        dim = dims.get(path)
        return tensors[path] if dim is None else tensors[path].chunk(plan.microbatches, dim)[number]

    return [structure.batch({path: part(path, m) for path in tensors}) for m in range(plan.microbatches)]


def _on(device: str, batch: Any) -> Any:
    """The batch with its tensors on ``device``."""
    tensors, structure = flatten(batch)
    return structure.batch({path: tensor.to(device) for path, tensor in tensors.items()})


def train_one_device(
    model: nn.Module,
    microbatches: Sequence[Any],
    steps: int,
    loss: Callable[[Any, Any], torch.Tensor] | None,
    optimizer: Maker,
    clip_norm: float | None,
    *,
    scheduler: SchedulerMaker | None = None,
    options: Options | None = None,
    updated: Callable[[int], None] | None = None,
) -> Trained:
    """What a user would write by hand for one device, under ``torch.autocast`` where ``options`` have a precision.

    ``model`` is trained in place: give a copy. The gradients of a step are the mean of those of its ``microbatches``
    (one: the whole batch), each computed alone. ``updated`` is called with the number of each step that changed it.
    """
    trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
    update = one_device(optimizer, scheduler, model, options)
    losses: list[float] = []
    gradients: dict[str, torch.Tensor] = {}
    lower = LOWER.get(options.precision) if options else None
    scale = 2.0**16 if lower == torch.float16 else 1.0
    for step in range(steps):
        update.zero_grad()
        losses.append(0.0)
        for batch in microbatches:
            tensors, structure = flatten(batch)
            args, kwargs = call_arguments(model, structure, tensors, loss)
            with torch.autocast(next(iter(trainable.values())).device.type, lower, enabled=lower is not None):
                value = loss_of(model(*args, **kwargs), batch, loss) / len(microbatches)
            (value * scale).backward()  # type: ignore[no-untyped-call]
            losses[-1] += float(value.detach())
        gradients = {n: p.grad.div_(scale).clone() for n, p in trainable.items() if p.grad is not None}
        if lower == torch.float16 and not all(bool(g.isfinite().all()) for g in gradients.values()):
            scale /= 2
            continue
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(list(trainable.values()), clip_norm)
        update.step()
        if updated is not None:
            updated(step)
    parameters = {n: p.detach().clone().cpu() for n, p in trainable.items()}
    return Trained(losses, {n: gradient.cpu() for n, gradient in gradients.items()}, parameters)


def relative_errors(
    found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], least: Mapping[str, float] | None = None
) -> dict[str, float]:
    """By name; see :class:`Verification`. A tensor that is missing or of another shape is infinitely wrong. ``least``:
    what the largest entry of some counts as, at least."""
    largest = max((float(t.abs().max()) for t in expected.values() if t.numel()), default=0.0)
    errors: dict[str, float] = {}
    for name, want in expected.items():
        have = found.get(name)
        if have is None or have.shape != want.shape:
            errors[name] = float("inf")
            continue
        own = float(want.abs().max()) if want.numel() else 0.0
        scale = max(own, _FLOOR * largest, (least or {}).get(name, 0.0), 1e-300)
        difference = float((have - want).abs().max()) if want.numel() else 0.0
        errors[name] = difference / scale if difference == difference else float("inf")
    return errors
