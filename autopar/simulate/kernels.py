"""Which kernels a program without values stands for."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.overrides import TorchFunctionMode

from autopar.rules.forms import ON_CUDA


def kernels_of(device: str) -> AbstractContextManager[Any]:
    """Within, ops run in the form that they have on a ``device`` of this kind ("cpu" or "cuda"): fused attention with
    dropout, say, which keeps no scores on CUDA."""
    return _OnCuda() if device == "cuda" else nullcontext()


class _OnCuda(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = str(func)
        form = ON_CUDA.get(name) or ON_CUDA.get(f"{name}.default") or func
        return form(*args, **(kwargs or {}))
