"""What a rank's executor holds from step to step, by what it is for."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from autopar.runtime.executor import Executor


def holdings(executor: Executor) -> dict[str, list[Tensor]]:
    """Kind -> tensors: parameters (masters, and what isn't trained), gradients there are now, optimizer state, and
    working copies (those of stages are ``gathered``, where they are made for a pass).

    A tensor may lie in the memory of another of a kind before it: a working copy that is its master, say.
    """
    streamed = [executor.stages[stage] for stage in executor.streams]
    modules = [*executor.stages.values(), *([executor.vocabulary[0]] if executor.vocabulary else [])]
    masters: list[Tensor] = list(executor.named_parameters().values())
    copies: list[Tensor] = [parameter for module in modules for parameter in module.parameters()]
    fixed = [tensor for tensor in copies if not tensor.requires_grad]
    fixed += [buffer for module in modules for buffer in module.buffers()]
    return {
        "parameters": [*masters, *fixed],
        "gradients": [master.grad for master in masters if master.grad is not None],
        "optimizer": list(_states(executor)),
        "gathered": [copy for module in streamed for copy in module.parameters()],
        "working": copies,
    }


def _states(executor: Executor) -> Iterator[Tensor]:
    if executor.optimizer is not None:
        for state in executor.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))
