"""Which parameters of a stage are used together: those of one layer, or of the code between two layers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from torch import nn

from autopar.runtime.modules import Container
from autopar.runtime.program import Parameter

SPANNING = -1
"""The unit of parameters that several calls use."""


def layers(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The layers of an emitted stage, which it calls, by their paths; their own submodules are not among them."""
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if type(child) is Container:
            yield from layers(child, f"{path}.")
        else:
            yield path, child


def reader(name: str, paths: Iterable[str], readers: Mapping[str, str]) -> str:
    """Of the layers at ``paths``, that which reads this parameter first; "" for the stage's own code. ``readers`` as in
    :class:`autopar.runtime.program.Program`."""
    return readers[name] if name in readers else next((path for path in paths if name.startswith(f"{path}.")), "")


def units(
    module: nn.Module,
    parameters: Iterable[Parameter],
    spanning: Collection[str] = (),
    readers: Mapping[str, str] | None = None,
) -> dict[str, int]:
    """The unit of each parameter by name, counted in the order of use: layers and the code between them in turn.

    Even numbers are code of the stage itself, odd ones layers. ``spanning`` and ``readers`` are those of the program.
    Buffers, which are there all the time, are in none: a layer's own may be read anywhere.
    """
    paths = [path for path, _ in layers(module)]
    found: dict[str, int] = {}
    number_of: dict[str, int] = {}
    latest = 0
    for name in (parameter.name for parameter in parameters if not parameter.is_buffer):
        if name in spanning:
            found[name] = SPANNING
            continue
        path = reader(name, paths, readers or {})
        if path in number_of:
            found[name] = number_of[path]
            continue
        if (latest % 2 == 1) != bool(path) or path:
            latest += 2 if path and latest % 2 else 1
        if path:
            number_of[path] = latest
        found[name] = latest
    return found
