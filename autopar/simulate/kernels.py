"""Which kernels a program without values stands for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.overrides import TorchFunctionMode

from autopar.rules.forms import ON_CUDA
from autopar.runtime.stand_in import standing_for


@contextmanager
def kernels_of(device: str) -> Iterator[None]:
    """Within, ops run in the form that they have on a ``device`` of this kind ("cpu" or "cuda"): fused attention with
    dropout, say, which keeps no scores on CUDA."""
    if device != "cuda":
        yield
        return
    with _OnCuda(), standing_for(device):
        yield


class _OnCuda(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self._forms: dict[Any, Any] = {}  # by function: names take long to make

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        form = self._forms.get(func)
        if form is None:
            name = str(func)
            form = self._forms[func] = ON_CUDA.get(name) or ON_CUDA.get(f"{name}.default") or func
        return form(*args, **(kwargs or {}))
