"""The outer search: which degrees, schedule and ways to save memory make the shortest step that fits.

``pins`` is what a user fixed; ``space`` lists what is left, as regions (degrees and rows of a microbatch) of points
(everything else); ``profiles`` places a model once for all regions that its placement doesn't tell apart; ``bounds``
says what no point of a region can beat, ``costing`` what a point takes; ``loop`` goes through them, best bound first;
``choose`` builds the best, ``infeasible`` says what would work where nothing fits.
"""

from autopar.search.choose import choose, searching
from autopar.search.pins import Pins

__all__ = ["Pins", "choose", "searching"]
