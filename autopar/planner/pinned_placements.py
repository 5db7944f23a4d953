"""Placements of parameters that a user pins: patterns over names, the type that is wanted on each axis.

A folded block is solved once for all of its calls, so parameters in its place have one type in all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Final

from torch import fx

from autopar.errors import ArgumentError, ShardingError
from autopar.graph import Model, ParameterInfo
from autopar.spmd import I, R, Type, parse

AXES: Final = ("dp", "ep", "cp", "tp")
"""The axes that parameters have a type on."""

Placements = Mapping[str, Mapping[str, str]]
"""Type by axis by pattern: ``{"model.layers.*.mlp.down_proj.weight": {"tp": "S(0)"}}``."""


def check_placements(model: Model, placements: Placements) -> None:
    """Raises ArgumentError for a pattern that no parameter's name matches, an axis that parameters have no type on, a
    text that is no type, and one that splits a dim which there isn't."""
    names = [name for parameter in model.parameters.values() for name in _names(parameter)]
    for pattern, wanted in placements.items():
        if not any(fnmatchcase(name, pattern) for name in names):
            near = get_close_matches(pattern, names, n=3, cutoff=0.4) or names[:3]
            raise ArgumentError(
                f"placements: no parameter of {model.name} is called {pattern!r}; there are {', '.join(near)}, …"
            )
        for axis, text in wanted.items():
            if axis not in AXES:
                raise ArgumentError(
                    f"placements: {pattern!r} has a type on {axis!r}, which is no axis that parameters are placed on; "
                    f"those are {', '.join(AXES)}"
                )
            kind = _parsed(pattern, axis, text)
            for parameter in model.parameters.values():
                shape = parameter.meta.shape
                if kind.is_shard and kind.dim >= len(shape) and _is_meant(parameter, pattern):
                    fits = f"its dims are 0 to {len(shape) - 1}" if shape else "it has none to split"
                    raise ArgumentError(
                        f"placements: {pattern!r} is {text} on {axis}, but {parameter.name} is {list(shape)}: {fits}"
                    )


def split_axes(placements: Placements) -> dict[str, str]:
    """The axes that parameters are to be split over, and the first of the patterns that say so. Raises ArgumentError
    for a text that is no type."""
    found: dict[str, str] = {}
    for pattern, wanted in placements.items():
        for axis, text in wanted.items():
            if axis in AXES and _parsed(pattern, axis, text).is_shard:
                found.setdefault(axis, pattern)
    return found


def pinned_types(model: Model, placements: Placements, axis: str) -> dict[tuple[int, fx.Node], Type]:
    """By (block, parameter): the type that is pinned on ``axis``.

    Raises ArgumentError where patterns contradict each other, ShardingError where the calls of a block differ.
    """
    found: dict[tuple[int, fx.Node], Type] = {}
    if not any(axis in wanted for wanted in placements.values()):
        return found
    wanted = {name: _wanted(parameter, placements, axis) for name, parameter in model.parameters.items()}
    for number, block in enumerate(model.blocks):
        calls = [call.parameters for call in model.calls if call.block == number] or [()]
        for node, names in zip(block.parameters, zip(*calls, strict=True), strict=False):
            kinds = {wanted[name]: name for name in reversed(names)}
            if len(kinds) > 1:
                texts = [f"{name} {'free' if kind is None else kind}" for kind, name in kinds.items()]
                raise ShardingError(
                    f"placements on {axis}: {' and '.join(texts)}, but both are parameters of {block.name}, which is "
                    "planned once for all its calls: pin all of them alike, with a pattern such as 'layers.*.weight'"
                )
            kind = wanted[names[0]]
            if kind is not None:
                found[number, node] = kind
    return found


def restricted(name: str, axis: str, size: int, possible: Sequence[Type], kind: Type) -> list[Type]:
    """Of the ``possible`` types of a parameter the pinned one: I and R both say that it is not split.

    Raises ShardingError with the possible ones where that is none of them.
    """
    kept = [other for other in possible if other == kind or (kind in (I, R) and other in (I, R))]
    if not kept:
        texts = ", ".join(repr(str(other)) for other in possible)
        raise ShardingError(
            f"placements: {name} can't be {str(kind)!r} on {axis}, of {size} ranks; there it may be {texts}"
        )
    return kept


def _wanted(parameter: ParameterInfo, placements: Placements, axis: str) -> Type | None:
    found: dict[Type, str] = {}
    for pattern, wanted in placements.items():
        if axis in wanted and _is_meant(parameter, pattern):
            found[_parsed(pattern, axis, wanted[axis])] = pattern
    if len(found) > 1:
        texts = " and ".join(f"{pattern!r} {kind}" for kind, pattern in found.items())
        raise ArgumentError(f"placements: {parameter.name} is pinned twice on {axis}: {texts}")
    return next(iter(found), None)


def _parsed(pattern: str, axis: str, text: str) -> Type:
    try:
        kind = parse(text)
    except ArgumentError as error:
        raise ArgumentError(f"placements: {pattern!r} on {axis}: {error}") from error
    if kind.kind == "P":
        raise ArgumentError(f"placements: {pattern!r} on {axis} is P, a pending sum; parameters are I or S(dim)")
    return kind


def _is_meant(parameter: ParameterInfo, pattern: str) -> bool:
    return any(fnmatchcase(name, pattern) for name in _names(parameter))


def _names(parameter: ParameterInfo) -> Iterator[str]:
    yield from (parameter.name, *parameter.aliases, *parameter.stacked)
