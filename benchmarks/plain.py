"""What benchmarks of a runtime pin, and tests, so that no search chooses for them."""

from __future__ import annotations

from typing import Any, Final

PLAIN: Final[dict[str, Any]] = {
    "schedule": "1f1b",
    "vocabulary": "redistributed",
    "zero": 0,
    "zero_ranks": 0,
    "offload": (),
    "head_chunks": 1,
}
