"""Optimizers on parameters of which each rank stores a part: any of torch's, and what users write."""

from autopar.runtime.optimizers.make import check_optimizer, follow, make_optimizer, one_device, specs_of
from autopar.runtime.optimizers.parameters import Parameters
from autopar.runtime.optimizers.recipe import GivenOptimizer, Maker, Recipe, SchedulerMaker, adamw, maker

__all__ = [
    "GivenOptimizer",
    "Maker",
    "Parameters",
    "Recipe",
    "SchedulerMaker",
    "adamw",
    "check_optimizer",
    "follow",
    "make_optimizer",
    "maker",
    "one_device",
    "specs_of",
]
