"""defer_weights: products with a weight become ones whose weight gradient can be put off.

Guarantees: equal values and gradients; every product of a value with a trainable two-dimensional parameter calls
the runtime's ``linear`` or ``matmul``, whose backward can leave the parameter's gradient to a pass of its own. Runs
on local graphs from which ``hoist`` has removed the converts: where one is left, or the weight is gathered or cast,
its gradient has to go back through that at once. Example: ``aten.linear(x, w)`` becomes ``linear(x, w)``, and
``x @ w.t()`` too.
"""

from __future__ import annotations

from autopar.graph import Model
from autopar.passes.products import LINEAR, MATMUL, replace_products


def defer_weights(model: Model) -> Model:
    """In place, after all axes are solved. Raises nothing: what can't be put off stays as it is."""
    return replace_products(model, {LINEAR: "linear", MATMUL: "matmul"})
