"""Memory of a rank, against hand computation and against PyTorch's own optimizer."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost_models.memory import ACTIVATION_BYTES, ADAMW_BYTES, GRADIENT_BYTES, PARAMETER_BYTES, PEAK_BYTES


def test_by_hand() -> None:
    """1,000 parameters in bf16 with gradients in float32 and moments in float64, 3 microbatches of 500 saved bytes."""
    assert PARAMETER_BYTES(parameters=1000, parameter_itemsize=2) == 2000
    assert GRADIENT_BYTES(parameters=1000, gradient_itemsize=4) == 4000
    assert ADAMW_BYTES(parameters=1000, moment_itemsize=8) == 16_000
    assert ACTIVATION_BYTES(saved_bytes=500, in_flight=3) == 1500


def test_states_are_those_of_torch() -> None:
    model = torch.nn.Linear(24, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(1, 24)).sum().backward()
    optimizer.step()
    parameters = list(model.parameters())
    count = sum(p.numel() for p in parameters)
    assert PARAMETER_BYTES(parameters=count, parameter_itemsize=4) == sum(p.nbytes for p in parameters)
    gradients = [p.grad.nbytes for p in parameters if p.grad is not None]
    assert GRADIENT_BYTES(parameters=count, gradient_itemsize=4) == sum(gradients)
    moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    assert ADAMW_BYTES(parameters=count, moment_itemsize=4) == sum(moment.nbytes for moment in moments)


counts = st.integers(0, 10**12)
itemsizes = st.sampled_from([1, 2, 4, 8])


@given(counts, counts, st.integers(0, 64), counts, itemsizes, itemsizes, itemsizes)
def test_the_peak_is_the_sum_of_its_parts(
    parameters: int, saved: int, in_flight: int, working: int, p: int, g: int, m: int
) -> None:
    parts = (
        PARAMETER_BYTES(parameters=parameters, parameter_itemsize=p),
        GRADIENT_BYTES(parameters=parameters, gradient_itemsize=g),
        ADAMW_BYTES(parameters=parameters, moment_itemsize=m),
        ACTIVATION_BYTES(saved_bytes=saved, in_flight=in_flight),
        working,
    )
    found = PEAK_BYTES(
        parameters=parameters,
        parameter_itemsize=p,
        gradient_itemsize=g,
        moment_itemsize=m,
        saved_bytes=saved,
        in_flight=in_flight,
        working_bytes=working,
    )
    assert found == sum(parts)
