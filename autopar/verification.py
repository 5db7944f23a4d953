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
    "loss and gradients of the first step agree, but not what updates make of them: the optimizer may amplify their "
    "rounding by more than was allowed for, which is nothing where the model can't run in float64 (a larger eps of "
    "AdamW, or float64, shows whether more than that differs)"
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
_REPLAYS: Final = 6
"""How many times the optimizer is asked for what it makes of rounding, beside always up and always down."""
_NOTHING: Final = 1e-12
"""Entries of a gradient in float64 that are no larger than this part of its largest are rounding in float64, too."""
_FLOOR = 1e-4  # a tensor's error counts relative to its own largest entry, or this part of the largest of all


@dataclass(frozen=True)
class Trained:
    """Losses of each step, the last step's gradients before clipping (of what has any), the parameters after it; by
    name. ``updates``: the gradients of each step that changed parameters."""

    losses: list[float]
    gradients: dict[str, torch.Tensor]
    parameters: dict[str, torch.Tensor]
    updates: list[dict[str, torch.Tensor]] = field(default_factory=list)


@dataclass(frozen=True)
class Verification:
    """Relative errors of the compiled model against the model, by name.

    A tensor's error is the largest difference of its entries over the largest entry (of itself, or ``1e-4`` of the
    largest of all tensors if that is more). Where one device alone is further off than ``tolerance`` in the model's
    precision, compared with float64, three times what it is off by counts as ``tolerance``; where a gradient is nothing
    but rounding (of a bias in front of a batch norm), three of the largest of all gradients do, on either side.
    Of a parameter, how far apart the optimizer takes an entry counts as ``tolerance`` of that entry, if its gradients
    are as far apart as three times what those of the tensor are off by on one device, or those of it that are nothing
    in float64 (of keys in a bias): AdamW takes whole steps of such ones, and hardly other ones where there is more.
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
        if wide is None:
            wide = _in_other_order(job, microbatches, expected, tolerance, device)
        if wide is not None:
            seen = replace(expected, parameters=expected.parameters | averages)
            eps = torch.finfo(dtype).eps
            spread = _spread(job, expected.updates, _apart(expected.updates, wide.updates, eps), device)
            gradients, parameters, worst = errors(_Noise.of(seen, wide, spread, tolerance, eps))
    ok = bool(worst <= tolerance)
    return Verification(ok, tolerance, loss_error, gradients, parameters, found.losses), averages.keys()


def _drawing(model: Model) -> str:
    """What there is to say of the first op that draws random numbers; "" if none does."""
    blocks = (model.block_of(call) for call in model.calls)
    drawing = (node for block in blocks for node in block.ops if info(node).random)
    return next((_DRAWS.format(where(node)) for node in drawing), "")


@dataclass(frozen=True)
class _Noise:
    """By name, what the largest entry of a tensor counts as, at least, where rounding may exceed the tolerance; or, of
    parameters, what each entry does."""

    gradients: dict[str, float] = field(default_factory=dict)
    parameters: dict[str, float | torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(
        cls, trained: Trained, wide: Trained, spread: Mapping[str, torch.Tensor], tolerance: float, eps: float
    ) -> _Noise:
        """``wide``: the same in float64. A gradient that is nothing but rounding (``eps``) may be a sum of terms, over
        rows and over ranks, that are as large as others. Optimizers may make whole steps of rounding (``spread``),
        which averages see, too."""
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
        moved = {name: wide.parameters[name] for name in averages}
        updates = {name: apart.double() / tolerance for name, apart in spread.items()}
        return cls(gradients, updates | _limits(trained.parameters, moved, tolerance))


def _limits(
    trained: Mapping[str, torch.Tensor], wide: Mapping[str, torch.Tensor], tolerance: float
) -> dict[str, float]:
    off = {name: (trained[name].double() - exact).abs() for name, exact in wide.items() if exact.numel()}
    return {name: _ROUNDINGS * float(difference.max()) / tolerance for name, difference in off.items()}


def _apart(
    updates: Sequence[Mapping[str, torch.Tensor]], wide: Sequence[Mapping[str, torch.Tensor]], eps: float
) -> dict[str, torch.Tensor]:
    """By name, how far apart entries of a gradient may be, in any step, that two compute who round alike."""
    found: dict[str, torch.Tensor] = {}
    for step, exact in zip(updates, wide, strict=False):
        for name in step.keys() & exact.keys():
            apart = _ROUNDINGS * _rounding(step[name], exact[name], eps)
            found[name] = torch.maximum(found[name], apart) if name in found else apart
    return found


def _rounding(gradient: torch.Tensor, exact: torch.Tensor, eps: float) -> torch.Tensor:
    """What entries are off by: as much as any of the tensor, or where float64 finds nothing, as any of those."""
    if not exact.numel():
        return exact.abs()
    off, sizes = (gradient.double() - exact).abs(), exact.abs()
    nothing = sizes <= _NOTHING * sizes.max()
    return torch.where(nothing, (off * nothing).max(), off.max().clamp(min=eps * float(sizes.max())))


def _spread(
    job: Compiled, updates: Sequence[Mapping[str, torch.Tensor]], apart: Mapping[str, torch.Tensor], device: str
) -> dict[str, torch.Tensor]:
    """By name, how far apart the optimizer takes entries of parameters whose gradients are ``apart``.

    It is asked, whatever it is: with gradients that are half of that off, to the same side in each step and to any.
    """
    generator = torch.Generator().manual_seed(0)

    def off(gradient: torch.Tensor, reach: torch.Tensor, side: int) -> torch.Tensor:
        sides = torch.randint(2, gradient.shape, generator=generator) * 2 - 1 if side == 0 else side
        return (gradient + sides * (reach / 2)).to(gradient.dtype)

    def replayed(side: int) -> dict[str, torch.Tensor]:
        steps = [{n: off(g, apart[n], side) if n in apart else g for n, g in step.items()} for step in updates]
        return _updated(job, steps, device)

    ends = [replayed(side) for side in (1, -1, *[0] * _REPLAYS)]
    taken = {name: torch.stack([end[name] for end in ends]) for name in apart}
    return {name: entries.amax(0) - entries.amin(0) for name, entries in taken.items()}


def _updated(job: Compiled, updates: Sequence[Mapping[str, torch.Tensor]], device: str) -> dict[str, torch.Tensor]:
    """What one device makes of the model's parameters with these gradients of each step."""
    ranks, model = job.job, job.reference().to(device)
    trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
    update = one_device(ranks.optimizer, ranks.scheduler, model, ranks.options)
    for gradients in updates:
        for name, parameter in trainable.items():
            parameter.grad = gradients[name].to(parameter, copy=True) if name in gradients else None
        if ranks.clip_norm is not None:
            nn.utils.clip_grad_norm_(list(trainable.values()), ranks.clip_norm)
        update.step()
    return {name: parameter.detach().cpu() for name, parameter in trainable.items()}


def _in_float64(job: Compiled, microbatches: Sequence[Any], steps: int, device: str) -> Trained | None:
    """What one device does without a lower precision; None where the model's code asks for other dtypes."""
    options = job.job.options.model_copy(update={"precision": "model"})
    model, wide = job.reference().to(device).double(), [_wider(part) for part in microbatches]
    try:
        return _trained_again(job, model, wide, steps, options)
    except (RuntimeError, TypeError):  # as torch refuses dtypes
        return None


def _in_other_order(
    job: Compiled, microbatches: Sequence[Any], expected: Trained, tolerance: float, device: str
) -> Trained | None:
    """What one device does where the last rows of each microbatch are its first: it rounds otherwise. None where more
    than rounding tells its first gradients from those ``expected``."""
    dims = {item.path: item.batch_dim for item in job.plan.inputs}

    def turned(batch: Any) -> Any:
        tensors, structure = flatten(batch)
        rows = {path: dim for path, dim in dims.items() if dim is not None}
        return structure.batch({path: t.flip(rows[path]) if path in rows else t for path, t in tensors.items()})

    parts, model = [turned(part) for part in microbatches], job.reference().to(device)
    found = _trained_again(job, model, parts, len(expected.losses), job.job.options)
    errors = [relative_errors(a, b) for a, b in zip(found.updates[:1], expected.updates[:1], strict=True)]
    return found if errors and max(errors[0].values(), default=0.0) <= tolerance else None


def _trained_again(
    job: Compiled, model: nn.Module, microbatches: Sequence[Any], steps: int, options: Options
) -> Trained:
    """With running averages among the parameters."""
    ranks = job.job
    found = train_one_device(
        model,
        microbatches,
        steps,
        job.loss,
        ranks.optimizer,
        ranks.clip_norm,
        scheduler=ranks.scheduler,
        options=options,
    )
    averages = {name: buffer.cpu() for name, buffer in model.named_buffers() if buffer.is_floating_point()}
    return replace(found, parameters=found.parameters | averages)


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
    updates: list[dict[str, torch.Tensor]] = []
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
        updates.append({n: gradient.cpu() for n, gradient in gradients.items()})
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(list(trainable.values()), clip_norm)
        update.step()
        if updated is not None:
            updated(step)
    parameters = {n: p.detach().clone().cpu() for n, p in trainable.items()}
    return Trained(losses, {n: gradient.cpu() for n, gradient in gradients.items()}, parameters, updates)


def relative_errors(
    found: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
    least: Mapping[str, float | torch.Tensor] | None = None,
) -> dict[str, float]:
    """By name; see :class:`Verification`. A tensor that is missing or of another shape is infinitely wrong. ``least``:
    what the largest entry of some counts as, at least, or what each entry does."""
    largest = max((float(t.abs().max()) for t in expected.values() if t.numel()), default=0.0)
    errors: dict[str, float] = {}
    for name, want in expected.items():
        have = found.get(name)
        if have is None or have.shape != want.shape:
            errors[name] = float("inf")
            continue
        own = float(want.abs().max()) if want.numel() else 0.0
        scale = max(own, _FLOOR * largest, 1e-300)
        counts = torch.as_tensor((least or {}).get(name, 0.0), dtype=torch.float64).clamp(min=scale)
        error = float(((have - want).abs().double() / counts).max()) if want.numel() else 0.0
        errors[name] = error if error == error else float("inf")
    return errors
