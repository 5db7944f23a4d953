"""How large single tensors get while code runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Largest(TorchDispatchMode):
    """Within it, ``bytes`` is the size of the largest storage that an operation on this thread returned so far."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for item in made if isinstance(made, list | tuple) else (made,):
            if isinstance(item, Tensor) and not isinstance(item, torch.nn.Parameter):
                self.bytes = max(self.bytes, item.untyped_storage().nbytes())
        return made
