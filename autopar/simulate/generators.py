"""One rank's random number generators, in and out of the process' global ones."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch

_numpy: Any = numpy.random  # its stubs leave out get_bit_generator and set_bit_generator


class Generators:
    """The state after ``torch.manual_seed(seed)``, ``random.seed(seed)``, ``numpy.random.seed(seed % 2**32)``.

    numpy's global generator is exchanged as an object, which costs a hundredth of copying its state. The one
    number that its legacy normal distribution holds back for the next call is lost at that.
    """

    def __init__(self, seed: int) -> None:
        self._torch = torch.Generator().manual_seed(seed).get_state()
        self._python = random.Random(seed).getstate()
        self._numpy = _numpy.MT19937()
        self._numpy.state = _numpy.RandomState(seed % 2**32).get_state(legacy=False)

    def install(self) -> None:
        """Make this rank's generators those of the process."""
        torch.default_generator.set_state(self._torch)
        random.setstate(self._python)
        _numpy.set_bit_generator(self._numpy)

    def keep(self) -> None:
        """Remember how far the rank has drawn."""
        self._torch = torch.default_generator.get_state()
        self._python = random.getstate()


@contextmanager
def callers_generators() -> Iterator[None]:
    """Put the caller's generators back afterwards."""
    torch_state, python_state = torch.default_generator.get_state(), random.getstate()
    numpy_generator, numpy_state = _numpy.get_bit_generator(), _numpy.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(torch_state)
        random.setstate(python_state)
        _numpy.set_bit_generator(numpy_generator)
        _numpy.set_state(numpy_state)
