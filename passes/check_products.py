"""check_products: refuse a model that multiplies nothing, as experts with a capacity of 0 slots do.

Guarantees: no factor of a product has a dim of size 0. A size that is 0 comes from numbers in the model's code, which
capture has made part of the graph.
"""

from __future__ import annotations

from autopar.capture import Flat
from autopar.errors import CaptureError
from autopar.graph import info, op_name, operands, where
from autopar.rules import lookup
from autopar.rules.contraction import Product


def check_products(flat: Flat) -> Flat:
    """Raises CaptureError naming the line where a dim of size 0 comes up."""
    for node in flat.nodes:
        if not isinstance(lookup(op_name(node)), Product):
            continue
        empty = [operand for operand in operands(node) if 0 in info(operand).meta.shape]
        if empty:
            raise CaptureError(
                f"{where(node)}: a factor has shape {list(info(empty[0]).meta.shape)}, so nothing is computed. If that "
                "is a capacity of experts, it is 0 slots for this sample: raise the capacity factor or give more tokens"
            )
    return flat
