"""Phases and kinds of a tracked program, against sums by hand; float32 tensors, so 4 bytes an element."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from autopar import simulate
from autopar.runtime.host import host_empty, host_memory, to_host
from autopar.shapes import Shapes
from autopar.simulate.memory import MemoryTracker, ShapeTracker


def test_phases_and_kinds() -> None:
    with MemoryTracker() as tracker:
        tracker.mark("start")
        weight = torch.ones(100)
        tracker.own("parameters", [weight])
        tracker.mark("forward", "saved")
        kept = weight * 2
        passing = weight * 3  # gone before the phase is over
        del passing
        tracker.mark("backward", "gradients")
        gradient = kept * 2
        del kept
        tracker.mark("")
    forward, backward = tracker.phases[1:]
    assert dict(forward.start) == {"parameters": 400}
    assert dict(forward.peak) == {"parameters": 400, "saved": 400, "temporaries": 400}
    assert dict(forward.end) == dict(backward.start) == {"parameters": 400, "saved": 400}
    assert dict(backward.peak) == {"parameters": 400, "saved": 400, "gradients": 400}
    assert dict(backward.end) == {"parameters": 400, "gradients": 400}
    assert (forward.peak_bytes, tracker.peak_bytes, tracker.live_bytes) == (1200, 1200, 800)
    del gradient, weight
    assert tracker.live_bytes == 0


@pytest.mark.parametrize("seed", range(4))
def test_as_a_ledger_has_it(seed: int) -> None:
    """Memory that comes, goes, changes and is claimed at random; of each phase the first moment with the most."""
    draw = random.Random(seed)
    with ShapeTracker(Shapes()) as tracker:
        alive: dict[int, Tensor] = {}
        sizes, kinds, born, died = dict[int, int](), dict[int, str](), dict[int, tuple[int, str]](), dict[int, int]()
        for phase in range(12):
            keeps = draw.choice(["saved", "gradients"])
            tracker.mark(str(phase), keeps)
            top = dict(sizes)
            for number in range(100 * phase, 100 * phase + 30):
                if alive and draw.random() < 0.5:
                    chosen = draw.choice(list(alive))
                    match draw.choice(["drop", "resize", "own"]):
                        case "drop":
                            del alive[chosen], sizes[chosen]
                            died[chosen] = phase
                        case "resize":
                            sizes[chosen] = 4 * draw.randrange(100)
                            alive[chosen].untyped_storage().resize_(sizes[chosen])
                        case _:
                            tracker.own("parameters", [alive[chosen]])
                            kinds.setdefault(chosen, "parameters")
                else:
                    alive[number] = torch.empty(elements := draw.randrange(100))
                    sizes[number], born[number] = 4 * elements, (phase, keeps)
                top = dict(sizes) if sum(sizes.values()) > sum(top.values()) else top
            tracker.mark("")
            ledger: Counter[str] = Counter()
            for number, size in top.items():
                first, kind = born[number]
                passes = died.get(number) == first == phase
                ledger[kinds.get(number) or ("temporaries" if passes else kind)] += size
            assert tracker.phases[-1].peak == +ledger
            assert sum(tracker.phases[-1].end.values()) == sum(sizes.values())


def test_a_phase_begins_with_what_lives() -> None:
    """The peak of a phase in which nothing happens is what was there."""
    with MemoryTracker() as tracker:
        held = torch.ones(100)
        tracker.mark("idle")
        tracker.mark("")
    assert tracker.phases[0].peak_bytes == held.nbytes
    assert tracker.peak_bytes == 400


def test_forgetting_begins_anew() -> None:
    with MemoryTracker() as tracker:
        large = torch.ones(1000)
        del large
        small = torch.ones(10)
        tracker.forget()
    assert tracker.peak_bytes == small.nbytes


def test_storages_that_are_freed_and_made_again() -> None:
    """As FSDP2 does with gathered weights: the tensor stays, its storage is resized without an operation."""
    with MemoryTracker() as tracker:
        tracker.mark("start")
        a, b = torch.ones(1000), torch.ones(1000)
        for tensor in (a, b):
            tensor.untyped_storage().resize_(0)
        tracker.mark("use")
        for tensor in (a, b, a):  # one after the other: never both
            tensor.untyped_storage().resize_(4000)
            tensor.fill_(1.0)
            tensor.untyped_storage().resize_(0)
        tracker.mark("")
    assert tracker.phases[0].peak_bytes == 8000
    assert tracker.phases[1].peak_bytes == 4000
    assert tracker.live_bytes == 0


def test_memory_that_is_taken_counts_before_it_is_used() -> None:
    """Weights that are about to be gathered lie beside what is made in the meantime."""
    with MemoryTracker() as tracker:
        weight, freed = torch.ones(1000), torch.ones(1000)
        weight.untyped_storage().resize_(0)
        tracker.mark("gather")
        freed.untyped_storage().resize_(0)  # seen at the next mark alone
        tracker.mark("use")
        before = torch.ones(1250)
        del before
        weight.untyped_storage().resize_(4000)
        packed = torch.ones(500)
        del packed
        weight.untyped_storage().resize_(0)
        tracker.mark("")
    assert [phase.peak_bytes for phase in tracker.phases] == [4000, 4000 + 2000]


def test_a_peak_names_what_was_resized_since() -> None:
    with MemoryTracker() as tracker:
        tracker.mark("one")
        weight = torch.ones(1000)
        tracker.own("gathered", [weight])
        kept = weight + 1
        weight.untyped_storage().resize_(0)
        tracker.mark("")
    assert dict(tracker.phases[0].peak) == {"gathered": 4000, "buffers": 4000}
    assert dict(tracker.phases[0].end) == {"buffers": kept.nbytes}


def test_host_memory_is_told_apart() -> None:
    with MemoryTracker() as tracker:
        device = torch.ones(100)
        host = host_empty((1000,), torch.float32, device.device)
        copied = to_host(device)
        with host_memory():
            more = torch.ones(10)
        assert (tracker.live_bytes, tracker.host_bytes) == (400, 4000 + 400 + 40)
        del host, copied, more
    assert (tracker.host_bytes, tracker.host_peak_bytes, tracker.peak_bytes) == (0, 4440, 400)


def test_fake_tensors_count_where_asked() -> None:
    with FakeTensorMode(), MemoryTracker(fake=True) as tracker:
        x = torch.ones(1000, requires_grad=True)
        y = x.exp()
        assert tracker.live_bytes == 8000
        y.sum().backward()
        assert x.grad is not None
        del y
        assert tracker.live_bytes == 8000  # x and its gradient
        x.grad.untyped_storage().resize_(0)
        tracker.mark("")
        assert tracker.live_bytes == 4000


def test_fsdp2_frees_what_it_gathered() -> None:
    """Of two equal layers, never both are whole."""
    layers, width = 4, 64

    def program(rank: int) -> int:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
        mesh = init_device_mesh("cpu", (2,))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        with MemoryTracker() as tracker, torch.no_grad():
            model(torch.ones(1, width))
        return tracker.peak_bytes

    weight = 4 * width * width
    for measured in simulate.run(program, 2).results:
        assert measured < 3.6 * weight  # gathered, and as it arrived; the next one's; but not all four
