"""Tensors on the CPU that stand for those of another device, where memory is predicted without values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

_device: ContextVar[str] = ContextVar("device_that_is_stood_for", default="")


@contextmanager
def standing_for(device: str) -> Iterator[None]:
    """Within, kernels are chosen as for tensors on a ``device`` of this kind ("cpu" or "cuda")."""
    token = _device.set(device)
    try:
        yield
    finally:
        _device.reset(token)


def device_type(x: Tensor) -> str:
    """Of the device that kernels for ``x`` are chosen for."""
    if torch.compiler.is_compiling():  # where nothing is predicted, and no context is read
        return x.device.type
    return _device.get() or x.device.type
