"""The outer search: which degrees, schedule and ways to save memory make the shortest step that fits.

To be read in this order:

- what is searched: ``pins`` (what a user fixed) and ``space``: regions (degrees, and rows of a microbatch) of points
  (everything else);
- what is known of it: ``profiles`` places a model once for all regions that its placement doesn't tell apart,
  ``references`` says which of them are worth it, ``scaling`` what others take at least by those;
- what no point beats: ``bounds`` over all cuts of one profile's units (with ``gradients``, ``held``, ``hulls``,
  ``interleaving`` and ``keeping``), and many points' at once: ``wholesale``, a row of equal ``layers`` on ``ranks``,
  stored in several ``ways``; of regions and families ``outlook``, of regions that wait ``ahead``;
- what a point takes: ``costing``, which lays it out;
- how all are gone through: ``dive`` finds a good plan by estimates (``ends``, ``learned``), with what is like the best
  (``climb``) and, where nothing fits, like what lacks the least (``squeeze``); ``proof`` takes what waits
  (``waiting``), the best bound first, for so much ``work``, each with a ``reckoning`` of its own; ``search`` does both,
  at the same time where there are several processes (``sharing``);
- what comes of it: ``choose`` builds the best, ``fronts`` says what wasn't chosen and why, ``infeasible`` what would
  work where nothing fits, ``watching`` how it goes.
"""

from autopar.search.choose import choose, searching
from autopar.search.pins import Pins

__all__ = ["Pins", "choose", "searching"]
