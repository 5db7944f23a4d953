"""What saves memory changes no number, combined too. (Each way alone, on more meshes: the files beside this one.)"""

from __future__ import annotations

from typing import Any

import pytest

from tests.ranks.test_parity import verification

WAYS: dict[str, dict[str, Any]] = {
    "zero-3, recompute": {"zero": 3, "recompute": "full"},
    "zero-1, selective, head": {"zero": 1, "recompute": "selective", "head_chunks": 2},
    "zero-2, all": {
        "zero": 2,
        "recompute": "selective",
        "head_chunks": 2,
        "offload": ("optimizer", "activations"),
        "activations": "lossless",
    },
    "zero-3, all": {
        "zero": 3,
        "recompute": "full",
        "head_chunks": 2,
        "offload": ("optimizer", "parameters"),
        "activations": "lossless",
    },
}
PLACES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "dp2": ({"dp": 2}, {"microbatches": 2}),
    "dp2 tp2": ({"dp": 2, "tp": 2}, {"microbatches": 1}),
    "pp2 dp2 1f1b": ({"pp": 2, "dp": 2}, {"microbatches": 4}),
    "pp2 dp2 zb-v": ({"pp": 2, "dp": 2}, {"microbatches": 4, "schedule": "zb-v"}),
    "pp2 dp2 v-half vocab-2": (
        {"pp": 2, "dp": 2},
        {"microbatches": 4, "schedule": "v-half", "vocabulary": "vocab-2"},
    ),
}


MODELS = ("gpt2", "llama")  # tied, and not


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("way", WAYS)
def test_parity(way: str, place: str) -> None:
    """The models take turns: every way and every place meets both."""
    mesh, schedule = PLACES[place]
    model = MODELS[(list(WAYS).index(way) + list(PLACES).index(place)) % 2]
    result = verification(model, mesh, **schedule, **WAYS[way])
    assert result.tolerance == 1e-9
    assert result.ok, str(result)
