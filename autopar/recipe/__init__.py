"""Init recipes: how each weight of a model that holds no values is made, as data.

Recorded at compile time (:func:`record`, :func:`construct`), written as JSON, played on every rank.
"""

from __future__ import annotations

from autopar.recipe.play import copied, initialize, play, replica
from autopar.recipe.record import construct, record
from autopar.recipe.steps import Constant, Recipe, Step, Value, constant, from_json, to_json

__all__ = [
    "Constant",
    "Recipe",
    "Step",
    "Value",
    "constant",
    "construct",
    "copied",
    "from_json",
    "initialize",
    "play",
    "record",
    "replica",
    "to_json",
]
