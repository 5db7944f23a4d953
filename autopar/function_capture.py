"""Calls in a model's code that a trace would get wrong, done another way while it is captured.

A ``torch.autograd.Function`` has a backward of its own, and a graph of operations has only theirs: captured as it is,
its forward would be differentiated instead. So its result y is captured as ``y + (z - z.detach())`` with a z that has
this gradient. A backward is linear in the gradient g that it is given: b(g) = Bg, and z = Bᵀx has the gradient Bg with
regard to x. Autograd itself transposes b: z is the derivative of ``b(g)·x`` with regard to g.

What ``torch.vmap`` maps is captured as the operations on all at once that it comes down to.
``module.to(dtype)`` that changes nothing returns the module, without writing to its parameters. A loss that asks of
values whether they are valid doesn't ask, and ``x.data`` is ``x.detach()``. What ``torch.utils.checkpoint`` computes in
a function of its own (``use_reentrant=True``) is captured as what it computes. A parameter that is frozen while some of
the code runs is detached there. Distributions don't look whether what they are given is valid. Hooks that are given
gradients are refused: a graph of operations has none.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor, fx, nn
from torch.autograd import Function
from torch.distributions import Distribution, Normal
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, make_fx
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from autopar.ctc_loss import ctc_loss
from autopar.errors import CaptureError
from autopar.source_lines import calling_line

_DATA: Final[Any] = Tensor.data.__get__  # type: ignore[attr-defined]
_FREEZES: Final = (Tensor.requires_grad_, Tensor.requires_grad.__set__)  # type: ignore[attr-defined]
_READS: Final[Any] = Tensor.requires_grad.__get__  # type: ignore[attr-defined]

_HOOKED: Final = (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook)

_NO_HOOKS: Final = "a hook of {} waits for gradients, which what is compiled doesn't call"
_NO_HOOKS_BUT: Final = (
    "Remove it if it only looks on (handle.remove()); what changes a gradient can be a torch.autograd.Function in the "
    "forward pass whose backward does that."
)

_MAPPING: Final = ("torch._functorch.predispatch", "torch._functorch.vmap")


@contextlib.contextmanager
def traceable_calls() -> Iterator[None]:
    """Within it, functions with backwards of their own, moves of modules that change nothing, ``torch.vmap`` and
    distributions can be traced."""
    move, apply, vmap = nn.Module.to, Function.__dict__["apply"], torch.vmap
    checks = _validates()
    mapping: list[Any] = []  # what is mapped within something else is traced with that

    def moved(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        return module if _is_idle(module, args, kwargs) else move(module, *args, **kwargs)

    def applied(kind: type[Function], *args: Any) -> Any:
        takes_gradient = [isinstance(a, Tensor) and a.requires_grad for a in args]
        if kind is CheckpointFunction:
            return _checkpointed(*args)
        is_torchs = kind.__module__.partition(".")[0] == "torch"  # operations of its own
        if is_torchs or not any(takes_gradient) or not torch.is_grad_enabled():
            return apply.__get__(None, kind)(*args)
        return _applied(kind, args, takes_gradient)

    def mapped(function: Callable[..., Any], *dims: Any, **options: Any) -> Callable[..., Any]:
        many = vmap(function, *dims, **options)

        def called(*args: Any, **kwargs: Any) -> Any:
            if mapping or not all(isinstance(a, Tensor) for a in args):
                return many(*args, **kwargs)
            mapping.append(many)
            try:
                with _Unrecorded():
                    return _traced(lambda *given: many(*given, **kwargs), args)
            finally:
                mapping.clear()

        return called

    torch.vmap = torch.func.vmap = mapped  # type: ignore[assignment]
    nn.Module.to = moved  # type: ignore[method-assign, assignment]
    Function.apply = classmethod(applied)  # type: ignore[method-assign, assignment]
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        torch.vmap = torch.func.vmap = vmap
        nn.Module.to = move  # type: ignore[method-assign]
        Function.apply = apply  # type: ignore[method-assign]
        Distribution.set_default_validate_args(checks)


def _validates() -> bool:
    """Whether distributions look at what they are given; nothing of torch's that is public says so."""
    try:
        Normal(torch.zeros(()), torch.zeros(()))
    except ValueError:
        return True
    return False


def _checkpointed(function: Callable[..., Any], preserves_random: bool, *args: Any) -> Any:
    """What a reentrant checkpoint computes: where none of its tensors takes a gradient, no parameter gets one."""
    takes_gradient = any(isinstance(a, Tensor) and a.requires_grad for a in args)
    with contextlib.nullcontext() if takes_gradient else torch.no_grad():
        return function(*args)


class _Unrecorded(TorchFunctionMode):
    """Within it, an export doesn't record where ``vmap`` begins and ends."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        maps = getattr(func, "__module__", "") in _MAPPING
        with torch._C.DisableTorchFunction() if maps else contextlib.nullcontext():
            return func(*args, **(kwargs or {}))


class TracedValues(TorchFunctionMode):
    """Within it, a loss of torch that first looks whether values are valid, or how long targets are, which a trace
    can't, doesn't look, and ``x.data``, which a trace loses, is ``x.detach()``: what is written to it is written to x.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _DATA:
            return args[0].detach()
        if func in _HOOKED:
            raise CaptureError(f"{_NO_HOOKS.format('a tensor')}\n  at {calling_line()}\n{_NO_HOOKS_BUT}")
        return _LOSSES.get(func, func)(*args, **(kwargs or {}))


def check_hooks(model: nn.Module) -> None:
    """Raise CaptureError where hooks would be given gradients, and may make others of them."""
    for path, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise CaptureError(f"{_NO_HOOKS.format(f'{type(module).__name__} {path!r}')}. {_NO_HOOKS_BUT}")
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise CaptureError(f"{_NO_HOOKS.format(f'parameter {name!r}')}. {_NO_HOOKS_BUT}")


class Freezes(TorchFunctionMode):
    """Within it, a parameter that the model's code freezes (``p.requires_grad_(False)``) is detached until the code
    trains it again. Raises CaptureError where it trains a frozen one, and at the end where one is still frozen."""

    def __init__(self) -> None:
        super().__init__()
        self._frozen: dict[Tensor, str] = {}
        """By parameter, the line."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _FREEZES and isinstance(args[0], nn.Parameter):
            return self._set(args[0], *args[1:], **kwargs)
        if self._frozen and func is _READS:
            return args[0] not in self._frozen and args[0].requires_grad
        if self._frozen:
            args, kwargs = self._held(args), self._held(kwargs)
        return func(*args, **kwargs)

    def _held(self, item: Any) -> Any:
        if type(item) in (tuple, list):
            return type(item)(map(self._held, item))
        if type(item) is dict:
            return {key: self._held(value) for key, value in item.items()}
        return item.detach() if isinstance(item, nn.Parameter) and item in self._frozen else item

    def _set(self, parameter: nn.Parameter, requires_grad: bool = True) -> nn.Parameter:
        if not requires_grad and parameter.requires_grad:
            self._frozen.setdefault(parameter, calling_line())
        elif requires_grad and self._frozen.pop(parameter, None) is None and not parameter.requires_grad:
            raise CaptureError(
                f"the model's code lets a frozen parameter be trained (requires_grad)\n  at {calling_line()}\n"
                "Do it before the model is compiled."
            )
        return parameter

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        if kind is None and self._frozen:
            raise CaptureError(
                f"the model's code freezes a parameter and leaves it so (requires_grad)\n  at "
                f"{next(iter(self._frozen.values()))}\nDo it before the model is compiled, or let it be trained again "
                "before the forward pass ends."
            )


def _gaussian_nll(
    input: Tensor, target: Tensor, var: Tensor | float, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Tensor:
    """:func:`torch.nn.functional.gaussian_nll_loss` of variances that aren't negative. Those below ``eps`` count as
    ``eps``, and have the gradient that they would have there."""
    if not isinstance(var, Tensor):
        var = torch.full_like(input, var)
    elif var.shape != input.shape and var.shape == input.shape[:-1]:
        var = var.unsqueeze(-1)
    bounded = var + (var.clamp(min=eps) - var).detach()
    loss = 0.5 * (bounded.log() + (input - target) ** 2 / bounded)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    return loss if reduction == "none" else loss.mean() if reduction == "mean" else loss.sum()


_LOSSES: Final[dict[Any, Callable[..., Tensor]]] = {
    functional.gaussian_nll_loss: _gaussian_nll,
    functional.ctc_loss: ctc_loss,
}


def _is_idle(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether all tensors of the module are what ``to`` would make of them."""
    for tensor in (*module.parameters(), *module.buffers()):
        moved = torch.empty(0, dtype=tensor.dtype, device=tensor.device).to(*args, **kwargs)
        dtype = moved.dtype if tensor.is_floating_point() else tensor.dtype
        if (dtype, moved.device) != (tensor.dtype, tensor.device):
            return False
    return True


class _Context:
    """What ``forward`` and ``backward`` of a function keep things in."""

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: tuple[Any, ...] = ()
        self.without_gradient: tuple[Tensor, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        self.without_gradient = tensors

    def set_materialize_grads(self, value: bool) -> None:
        """Gradients that nothing gives are zeros here in any case."""


def _applied(kind: type[Any], args: tuple[Any, ...], takes_gradient: list[bool]) -> Any:
    context = _Context(tuple(takes_gradient))
    held = [a.detach() if isinstance(a, Tensor) else a for a in args]
    if kind.setup_context is Function.setup_context:
        made = kind.forward(context, *held)
    else:
        made = kind.forward(*held)
        kind.setup_context(context, tuple(held), made)
    outputs = made if isinstance(made, tuple) else (made,)
    has = [
        isinstance(y, Tensor) and y.is_floating_point() and all(y is not other for other in context.without_gradient)
        for y in outputs
    ]
    wanted = [torch.zeros_like(y) for y, needed in zip(outputs, has, strict=True) if needed]

    def transposed(*given: Tensor) -> list[Tensor | None]:
        gradients = iter(g.requires_grad_() for g in given)
        whole = [next(gradients) if needed else torch.zeros_like(y) for y, needed in zip(outputs, has, strict=True)]
        return _transposed(kind, kind.backward(context, *whole), args, takes_gradient, given)

    moments = iter(_traced(transposed, wanted))
    results = tuple(y + _only_gradient(next(moments)) if h else y for y, h in zip(outputs, has, strict=True))
    return results if isinstance(made, tuple) else results[0]


def _traced(function: Callable[..., Any], given: Sequence[Tensor]) -> Any:
    """What ``function`` makes of ``given``, by the operations that it comes down to below autograd and ``vmap``.

    A trace sees the user's; but autograd takes some of them apart, and hands on what it kept of the parts, which no
    trace has seen; and what is mapped computes something else than its operations say.
    """
    with disable_proxy_modes_tracing():
        graph = make_fx(function)(*given)
    graph.graph.eliminate_dead_code()
    return fx.Interpreter(graph).run(*given)


def _transposed(
    kind: type[Any], made: Any, args: Sequence[Any], takes_gradient: list[bool], gradients: Sequence[Tensor]
) -> list[Tensor | None]:
    """Of a backward that ``made`` b of ``gradients`` for each x of ``args``: the transposed map, of all x."""
    found = made if isinstance(made, tuple) else (made,)
    taken = [(b, x) for b, x, needed in zip(found, args, takes_gradient, strict=False) if needed and b is not None]
    if not taken:
        return [None] * len(gradients)
    if not all(b.requires_grad for b, _ in taken):
        raise CaptureError(
            f"the backward of {kind.__name__} computes in a way that autograd doesn't see (detach, no_grad, .data)\n"
            f"  at {calling_line()}\nWrite it with differentiable torch operations, or leave it to autograd."
        )
    given = [x.reshape(b.shape) for b, x in taken]
    return list(torch.autograd.grad([b for b, _ in taken], gradients, given, create_graph=True, allow_unused=True))


def _only_gradient(z: Tensor | None) -> Tensor | float:
    """Zero, with the gradient of ``z``."""
    return 0.0 if z is None else z - z.detach()
