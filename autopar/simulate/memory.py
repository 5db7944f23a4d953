"""How much memory a simulated rank's tensors take."""

from __future__ import annotations

from autopar.runtime.host import is_host_memory
from autopar.storages import StorageTracker


class MemoryTracker(StorageTracker):
    """Counts device and host apart: what is made within :func:`autopar.runtime.host.host_memory` lies on the host."""

    def __init__(self, *, fake: bool = False) -> None:
        super().__init__(fake=fake, is_host=is_host_memory)
