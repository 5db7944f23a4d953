"""From what the user gave to the optimizer of one rank: right on what the rank stores, or refused."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn
from torch.optim import Adafactor, Muon, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from autopar.errors import ArgumentError
from autopar.mesh import Mesh
from autopar.options import Options
from autopar.runtime.axes import Axes
from autopar.runtime.modules import dtype_of
from autopar.runtime.optimizers import probe
from autopar.runtime.optimizers.adafactor import ShardedAdafactor
from autopar.runtime.optimizers.layout import Layout, is_split
from autopar.runtime.optimizers.muon import ShardedMuon
from autopar.runtime.optimizers.narrow import NarrowState
from autopar.runtime.optimizers.parameters import Parameters
from autopar.runtime.optimizers.recipe import Maker, SchedulerMaker, made
from autopar.runtime.optimizers.several import Several
from autopar.runtime.optimizers.stacked import Apart, Idle, lend_gradients
from autopar.runtime.program import Parameter, Router

REPLACEMENTS: Final = {Adafactor: ShardedAdafactor, Muon: ShardedMuon}
"""Classes of torch that need whole parameters, and ours that does the same on parts."""

Specs = Mapping[str, Parameter]
"""All trainable parameters of a job, of all ranks, by name."""


def make_optimizer(
    maker: Maker,
    specs: Specs,
    masters: Mapping[str, nn.Parameter],
    axes: Axes,
    options: Options,
    routers: Iterable[Router] = (),
) -> Optimizer | None:
    """The optimizer of this rank, over its ``masters``; None where the model trains nothing.

    ``routers`` say which experts may have no gradient in a step.

    Raises ArgumentError as :func:`check_optimizer`.
    """
    device = next((master.device for master in masters.values()), axes.device)
    apart = Apart.of(specs, masters, axes)
    specs, masters = apart.specs, apart.masters
    parameters = Parameters.stored(specs.values(), masters, device)
    names = {parameter: name for name, parameter in parameters.named()}
    layouts = {masters[name]: Layout.of(spec, axes) for name, spec in specs.items() if name in masters}
    optimizers = []
    for optimizer in made(maker, parameters) if len(parameters) else []:
        form = _form(optimizer, _own(optimizer, names, specs), axes.mesh, options, device)
        optimizers.append(form.of(optimizer, layouts))
    if not optimizers:
        return None
    together = _as_one(optimizers)
    lend_gradients(together, apart.parts, Idle.of(routers, axes.routers))
    return together


def check_optimizer(
    maker: Maker, scheduler: SchedulerMaker | None, specs: Specs, mesh: Mesh, options: Options, device: torch.device
) -> None:
    """Whether ``maker`` makes an optimizer that is right on ``mesh``, without its ranks.

    Raises ArgumentError where it steps by closures or sparse gradients; where its update of one element depends on
    others that a rank doesn't store, and there is none of ours that does the same; where ``options.state_dtype`` asks
    for narrow moments and it has none; where ``scheduler`` doesn't make one that goes by steps.
    """
    specs = Apart.of(specs, {}).specs
    parameters = Parameters.stored(specs.values(), {}, device)
    names = {parameter: name for name, parameter in parameters.named()}
    optimizers = made(maker, parameters) if len(parameters) else []
    for optimizer in optimizers:
        with contextlib.suppress(probe.UntriedError):  # the ranks' machines may be others: they try again
            _form(optimizer, _own(optimizer, names, specs), mesh, options, device)
    if scheduler is not None and optimizers:
        follow(_as_one(optimizers), scheduler)


def one_device(
    maker: Maker, scheduler: SchedulerMaker | None, model: nn.Module, options: Options | None = None
) -> Optimizer:
    """What a user would write by hand for one device: the optimizer and scheduler over ``model``'s own parameters."""
    parameters = Parameters.of(model)
    device = next(iter(parameters)).device
    optimizers = made(maker, parameters)
    optimizer = _as_one([_form(one, [], Mesh(), options or Options(), device).of(one, {}) for one in optimizers])
    if scheduler is not None:
        follow(optimizer, scheduler)
    return optimizer


def follow(optimizer: Optimizer, scheduler: SchedulerMaker) -> LRScheduler:
    """Let the scheduler step whenever ``optimizer`` has: not after a step that a loss scaler skipped.

    Raises ArgumentError where it isn't a scheduler, or goes by a measure of the training instead of steps.
    """
    found = scheduler(optimizer)
    if not isinstance(found, LRScheduler):
        raise ArgumentError(f"scheduler made a {type(found).__name__}; it must make a torch LRScheduler")
    if isinstance(found, ReduceLROnPlateau):
        raise ArgumentError(
            "scheduler made a ReduceLROnPlateau, which goes by a loss that you measure; make it over "
            "job.running.optimizer and step it yourself, with the same figure on every rank"
        )
    optimizer.register_step_post_hook(lambda optimizer, args, kwargs: found.step())
    return found


def specs_of(parameters: Iterable[Parameter]) -> dict[str, Parameter]:
    """Trainable ones by name, a tied one as its first copy is stored."""
    found: dict[str, Parameter] = {}
    for parameter in parameters:
        if parameter.trainable and not parameter.is_buffer:
            found.setdefault(parameter.name, parameter)
    return found


def _own(optimizer: Optimizer, names: Mapping[nn.Parameter, str], specs: Specs) -> list[Parameter]:
    """What of the model ``optimizer`` trains, wherever it lies: all ranks decide alike."""
    return [specs[names[p]] for group in optimizer.param_groups for p in group["params"]]


@dataclass(frozen=True)
class _Form:
    """What becomes of an optimizer: replaced by a class of ours, its moments narrowed."""

    replaced: type[Optimizer] | None = None
    moments: torch.dtype | None = None
    separable: bool = False

    def of(self, optimizer: Optimizer, layouts: Mapping[nn.Parameter, Layout]) -> Optimizer:
        if self.replaced is not None:
            optimizer = REPLACEMENTS[self.replaced](optimizer.param_groups, layouts)
        if self.moments is not None:
            optimizer = NarrowState(optimizer, self.moments, separable=self.separable)
        return optimizer


def _form(
    optimizer: Optimizer, parameters: list[Parameter], mesh: Mesh, options: Options, device: torch.device
) -> _Form:
    """The form in which ``optimizer`` is right for ``parameters`` on ``mesh``. Raises ArgumentError."""
    probe.refuse(optimizer)
    if not any(group["params"] for group in optimizer.param_groups):
        return _Form()
    split = next((p for p in parameters if is_split(p, mesh)), None)
    moments = _moments_dtype(optimizer, options)
    replaced = next((kind for kind in REPLACEMENTS if split and type(optimizer) is kind), None)
    if moments is None and (replaced or (split is None and mesh.pp == 1)):
        return _Form(replaced)
    found = probe.traits(optimizer, device)
    if replaced is None:
        _check(optimizer, found, split, mesh)
    if moments is not None and not found.moments:
        raise ArgumentError(
            f"state_dtype={options.state_dtype!r}, but {type(optimizer).__name__} keeps no moments of its parameters' "
            "shapes with these options; leave state_dtype out"
        )
    # Ours step all parameters together, as they communicate for all at once.
    return _Form(replaced, moments, separable=found.separable and replaced is None)


def _check(optimizer: Optimizer, found: probe.Traits, split: Parameter | None, mesh: Mesh) -> None:
    """Raise ArgumentError where ``optimizer`` needs what the ranks of ``mesh`` don't have."""
    title = type(optimizer).__name__
    if not found.independent and (split or mesh.pp > 1):
        raise ArgumentError(
            f"optimizer {title} makes the update of one parameter depend on others, which lie on other ranks of "
            f"{mesh}; use one that updates each by itself, such as AdamW, or pp=1, tp=1 and zero=0"
        )
    if split is not None and not found.elementwise:
        raise ArgumentError(
            f"optimizer {title} needs whole parameters{_because(found)}, and ranks store parts of {split.name!r}; use "
            "one that goes element by element (AdamW, SGD …), torch.optim.Adafactor or torch.optim.Muon, which are "
            'made right on parts, or tp=1, zero=0 and vocabulary="redistributed"'
        )


def _because(found: probe.Traits) -> str:
    if not found.strange:
        return ": trained in parts, a matrix comes out different"
    shapes = ", ".join(f"{name} {list(shape)}" for name, shape in found.strange.items())
    return f": it keeps state of another shape than theirs ({shapes} for a parameter of [8, 12])"


def _moments_dtype(optimizer: Optimizer, options: Options) -> torch.dtype | None:
    """What moments are kept in; None: what their parameters are. Raises ArgumentError where that is narrower."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if not options.state_dtype or not parameters:
        return None
    dtype = dtype_of(options.state_dtype)
    narrowest = min((p.dtype for p in parameters), key=lambda one: one.itemsize)
    if dtype == narrowest:
        return None
    if dtype.itemsize >= narrowest.itemsize:
        raise ArgumentError(
            f"state_dtype={options.state_dtype!r} is no narrower than the {narrowest} that "
            f'{type(optimizer).__name__} updates; leave it out, or say precision="bf16", which updates float32 '
            "masters"
        )
    return dtype


def _as_one(optimizers: list[Optimizer]) -> Optimizer:
    return Several(optimizers) if len(optimizers) > 1 else optimizers[0]
