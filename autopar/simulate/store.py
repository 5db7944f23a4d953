"""The key-value store of simulated ranks: torch's own block a thread where the scheduler can't see it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch import distributed

from autopar.simulate.baton import Baton
from autopar.simulate.calls import Waiting
from autopar.simulate.sites import Site, caller

_Store: Any = distributed.Store  # type: ignore[attr-defined]


@dataclass(eq=False)
class KeysWait:
    """A rank waits until all ``keys`` are set."""

    rank: int
    keys: tuple[str, ...]
    site: Site

    def needs(self) -> list[int]:
        return []

    def __str__(self) -> str:
        return f"store.wait({', '.join(map(repr, self.keys))})"


class SharedStore(_Store):  # type: ignore[misc]
    """One store for all ranks. Time-outs are ignored: a wait that can't end is a deadlock, seen at once."""

    def __init__(self, baton: Baton[Waiting]) -> None:
        super().__init__()
        self._baton = baton
        self._values: dict[str, bytes] = {}
        self._waiting: list[KeysWait] = []

    def set(self, key: str, value: bytes | str) -> None:
        self._values[key] = value.encode() if isinstance(value, str) else bytes(value)
        for waiting in list(self._waiting):
            if self.check(waiting.keys):
                self._waiting.remove(waiting)
                self._baton.wake(waiting.rank, waiting)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def add(self, key: str, amount: int) -> int:
        total = int(self._values.get(key, b"0")) + amount
        self.set(key, str(total))
        return total

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Set where the value is ``expected``, or where there is none and ``expected`` is empty."""
        if self._values.get(key, b"") == bytes(expected):
            self.set(key, desired)
        return self._values.get(key, bytes(expected))

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        if not self.check(keys):
            waiting = KeysWait(self._baton.current, tuple(keys), caller())
            self._waiting.append(waiting)
            self._baton.block(waiting)

    def deleteKey(self, key: str) -> bool:  # so spelled by C++
        return self._values.pop(key, None) is not None

    def getNumKeys(self) -> int:
        return len(self._values)
