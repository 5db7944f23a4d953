"""By what calls of functions are compared: arguments by value and type, nodes of a graph as operands."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import fx


def key_of(argument: Any) -> Hashable:
    """By which an argument is compared: nodes are compared as operands, numbers of other types differ."""
    if isinstance(argument, fx.Node):
        return fx.Node
    if isinstance(argument, list | tuple):
        return tuple(map(key_of, argument))
    if isinstance(argument, dict):
        return tuple((name, key_of(value)) for name, value in argument.items())
    if isinstance(argument, slice):
        return key_of((argument.start, argument.stop, argument.step))
    hashable: Hashable = argument if type(argument) is int else (type(argument), argument)
    return hashable
