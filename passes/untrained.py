"""untrained: weights of several calls that no gradient reaches aren't trained.

Guarantees: equal values and gradients. On one device such a weight has no gradient (None), and an optimizer leaves it
as it is, as it does one that is frozen. Stages that hold copies of a weight sum their gradients and can't know that
none of them has one: they would sum zeros, and an optimizer would decay the weight.

Example: an embedding and a head that are tied, and both read ``weight.detach()``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import replace

from autopar.graph import Model
from autopar.passes.edges import gradient_paths, results_reached


def untrained(model: Model) -> Model:
    """``model``, in which such weights are frozen."""
    users = Counter(name for call in model.calls for name in dict.fromkeys(call.parameters))
    trained = _reached(model)
    for name, known in model.parameters.items():
        if users[name] > 1 and known.trainable and not known.is_buffer and name not in trained:
            model.parameters[name] = replace(known, trainable=False)
    return model


def _reached(model: Model) -> Collection[str]:
    """Names of the parameters that the gradient of the loss reaches."""
    found: set[str] = set()
    reached = results_reached(model)
    for index, call in enumerate(model.calls):
        block = model.block_of(call)
        seen = gradient_paths(block, reached[index])
        found.update(name for name, node in zip(call.parameters, block.parameters, strict=True) if node in seen)
    return found
