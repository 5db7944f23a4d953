"""transformers in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class Float64(TorchFunctionMode):
    """transformers casts to float32 in norms, rotary tables and the loss; within this mode such casts go to float64.

    So that a whole model computes in float64, where an error is a mistake and not rounding.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.float:
            func, args = Tensor.to, (*args, torch.float64)
        if func in (Tensor.to, Tensor.type):
            args = tuple(torch.float64 if a is torch.float32 else a for a in args)
        kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in kwargs.items()}
        return func(*args, **kwargs)
