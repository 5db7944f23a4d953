"""Memory of a rank, against hand computation and against PyTorch's own optimizer."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost_models import memory
from autopar.cost_models.memory import Memory, training_memory


def test_by_hand() -> None:
    """1,000 parameters in float32, 3 microbatches of 500 saved bytes, 70 bytes of working memory."""
    found = training_memory(1000, 500, 3, working_bytes=70)
    assert found == Memory(4000, 4000, 8000, 1500, 70)
    assert found.peak_bytes == 17570


def test_itemsizes_by_hand() -> None:
    found = training_memory(10, 0, 0, parameter_itemsize=2, gradient_itemsize=4, moment_itemsize=8)
    assert found == Memory(20, 40, 160, 0, 0)


def test_states_are_those_of_torch() -> None:
    model = torch.nn.Linear(24, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(1, 24)).sum().backward()
    optimizer.step()
    parameters = list(model.parameters())
    found = training_memory(sum(p.numel() for p in parameters), 0, 0)
    assert found.parameter_bytes == sum(p.nbytes for p in parameters)
    assert found.gradient_bytes == sum(p.grad.nbytes for p in parameters if p.grad is not None)
    moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    assert found.optimizer_bytes == sum(moment.nbytes for moment in moments)


counts = st.integers(0, 10**12)
itemsizes = st.sampled_from([1, 2, 4, 8])


@given(counts, counts, st.integers(0, 64), counts, itemsizes, itemsizes, itemsizes)
def test_the_peak_is_the_sum_of_its_parts(
    parameters: int, saved: int, in_flight: int, working: int, p: int, g: int, m: int
) -> None:
    sizes = {"parameter_itemsize": p, "gradient_itemsize": g, "moment_itemsize": m}
    found = training_memory(parameters, saved, in_flight, working_bytes=working, **sizes)
    peak = memory.PEAK_BYTES(
        parameters=parameters, saved_bytes=saved, in_flight=in_flight, working_bytes=working, **sizes
    )
    assert found.peak_bytes == peak
