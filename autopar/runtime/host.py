"""Memory of the host beside the device's.

What is offloaded is allocated here and nowhere else: pinned where the device is a GPU, and told apart from the
device's memory where both are the same, on CPU ranks (:mod:`autopar.simulate.memory` counts the two apart).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

_allocating: ContextVar[bool] = ContextVar("allocating_on_host", default=False)


@contextmanager
def host_memory() -> Iterator[None]:
    """Within, tensors that are made on the CPU lie on the host."""
    token = _allocating.set(True)
    try:
        yield
    finally:
        _allocating.reset(token)


def is_host_memory() -> bool:
    """Whether what is allocated now lies on the host."""
    return _allocating.get()


def host_empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised tensor on the host; pinned, so that copies to and from ``device`` run beside its compute."""
    with host_memory():
        return torch.empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=device.type == "cuda")


def to_host(tensor: Tensor) -> Tensor:
    """A copy on the host, started and not waited for on a GPU: synchronise the stream before it is read there."""
    host = host_empty(tensor.shape, tensor.dtype, tensor.device)
    return host.copy_(tensor.detach(), non_blocking=True)
