"""Random ops on many ranks: equal where their value is replicated, independent where it is split.

Every random op runs under a seed of its own, made from where it stands (training step, microbatch, layer, op)
and from the rank's place on the axes that split its value. So it repeats itself when it is recomputed in the
backward, and no rank's stream depends on what other ops drew before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from autopar.runtime.axes import Axes


def op_seed(axes: Axes, op: int, own_axes: Sequence[str]) -> int:
    """The seed of random op number ``op`` here and now; ranks that differ only on other axes get the same."""
    place = [(name, axes[name].index) for name in sorted(own_axes)]
    text = repr((axes.seed, axes.stream.step, axes.stream.microbatch, axes.scope, op, place))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


@contextmanager
def rng(axes: Axes, op: int, own_axes: Sequence[str]) -> Iterator[None]:
    """Within, the default generator of the CPU (and the rank's GPU) draws for ``op``; after it, as before."""
    with seeded(op_seed(axes, op, own_axes), axes.device):
        yield


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Within, the default generators of the CPU and of ``device`` draw from ``seed`` on; after it, as before."""
    generators = [torch.default_generator]
    if device.type == "cuda":
        index = device.index if device.index is not None else torch.cuda.current_device()
        generators.append(torch.cuda.default_generators[index])
    states = [generator.get_state() for generator in generators]
    try:
        for generator in generators:
            generator.manual_seed(seed)
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def seed_of_op() -> int:
    """Directly within :func:`rng`, before anything is drawn: the seed, from which the same can be drawn again."""
    return torch.default_generator.initial_seed()
