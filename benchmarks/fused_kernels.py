"""Models of ``transformers`` with Megatron's kernels: where that has one for several steps, one op stands for them.

Megatron-Core computes norms (Transformer Engine), rotary positions (``--no-rope-fusion`` isn't given) and SwiGLU
(``--no-bias-swiglu-fusion`` isn't given) in one kernel each, and keeps embeddings in bf16, where ``transformers`` under
autocast computes norms and positions op by op in float32. An op that stands for a kernel reads and writes as many bytes
as that, forward and backward; its values are other ones, which don't matter where nothing is computed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROTARY = "apply_rotary_pos_emb"


class Norm(nn.Module):
    """RMSNorm in one op, of bf16 as under Transformer Engine."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cuda", enabled=False):
            return F.rms_norm(x, self.weight.shape, self.weight.to(torch.bfloat16))


class Embedding(nn.Module):
    """Rows of a table that is kept in bf16."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight.to(torch.bfloat16))


def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
    """One op that reads and writes each of ``q`` and ``k [batch, heads, sequence, width]``."""
    return q * cos.unsqueeze(1), k * cos.unsqueeze(1)


@contextmanager
def fused_kernels(model: nn.Module) -> Iterator[nn.Module]:
    """``model`` with such ops in place of its own, as long as the context is entered; its norms stay replaced.

    Raises ValueError where it has no function of rotary positions by its usual name, or no norm.
    """
    norms = [(name, module) for name, module in model.named_modules() if type(module).__name__.endswith("RMSNorm")]
    if not norms:
        raise ValueError(f"{type(model).__name__} has no RMSNorm to replace")
    for name, module in norms:
        model.set_submodule(name, Norm(module.weight))
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Embedding):
            model.set_submodule(name, Embedding(module.weight))
        elif hasattr(module, "act_fn"):
            module.act_fn = nn.Identity()  # the product with the other half is SwiGLU's one kernel
    home = sys.modules[type(model).__module__]
    if not hasattr(home, ROTARY):
        raise ValueError(f"{home.__name__} has no {ROTARY} to replace")
    with ExitStack() as stack:
        stack.enter_context(patch.object(home, ROTARY, rotated))
        yield model
