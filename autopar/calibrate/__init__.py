"""Measures the machine that it runs on, and describes it as a cluster file: ``autopar calibrate -o mine.toml``.

:mod:`~autopar.calibrate.products`, :mod:`~autopar.calibrate.memory`, :mod:`~autopar.calibrate.launch` and
:mod:`~autopar.calibrate.collectives` take times, :mod:`~autopar.calibrate.fit` finds the figures with which the cost
models come closest to them, :mod:`~autopar.calibrate.describe` writes those down, each with its source.
"""

from autopar.calibrate.run import Calibration, calibrate

__all__ = ["Calibration", "calibrate"]
