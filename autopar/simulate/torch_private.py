"""Every private name of torch that simulated ranks need, in one place.

torch.distributed keeps its state per process. For ranks that are threads, :func:`rank_threads` gives each its
own while a simulation runs, and puts everything back afterwards:

- ``distributed_c10d._world``, torch's documented point for replacing that state (its own threaded test
  backend uses it), becomes an object that shows a rank its own world and any other thread the caller's;
- the registry of group names in C++ becomes one per thread (``_set_thread_isolation_mode``);
- the backend is registered as ``"threaded"``, the one name for which ``DeviceMesh`` tells the meshes of
  different threads apart: under any other, DTensor's caches would hand one rank's mesh to another;
- what ``init_process_group`` and dispatch modes leave in variables of the process is restored.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.distributed import Backend, ProcessGroup, distributed_c10d
from torch.utils import _python_dispatch

from autopar.errors import ArgumentError

BACKEND = "threaded"
_c10d: Any = torch._C._distributed_c10d
_guards: Any = torch._C._dynamo.guards

_TABLES = ("backend_list", "backend_capability", "backend_type_map", "default_device_backend_map", "_plugins")
_LEFT_BEHIND = (
    (sys, "excepthook"),
    (distributed_c10d, "_backend"),
    (distributed_c10d, "_default_pg_init_method"),
    (_python_dispatch, "_is_in_torch_dispatch_mode"),
    (_python_dispatch, "_is_in_non_infra_torch_dispatch_mode"),
    (_python_dispatch, "_is_in_any_mode_without_ignore_compile_internals"),
)

MakeGroup = Callable[[str, tuple[int, ...]], ProcessGroup]
"""Makes the running rank's side of a group, from torch's name for the group and its ranks; none: all."""


def _simulating() -> bool:
    return isinstance(distributed_c10d._world, _WorldPerThread)


@contextmanager
def rank_threads(make_group: MakeGroup) -> Iterator[Callable[[], None]]:
    """While open, threads that call the yielded function have torch.distributed state of their own.

    Raises ArgumentError inside another simulation.
    """
    if _simulating():
        raise ArgumentError(
            "simulate.run was called while another simulation runs in this process; "
            "let that one return first, or use sub-groups of its ranks"
        )
    # A CUDA build without a GPU ties this guard to the first thread that uses fake tensors (as DTensor does),
    # and crashes in another one after that thread has ended. So tie it to the caller's.
    torch._C._ensureCUDADeviceGuardSet()
    world = _WorldPerThread(distributed_c10d._world)
    with _restored(), _backend_registered(make_group):
        distributed_c10d._world = world  # type: ignore[assignment]
        _c10d._set_thread_isolation_mode(True)
        try:
            yield world.enter
        finally:
            _c10d._set_thread_isolation_mode(False)
            distributed_c10d._world = world.callers()
            default = distributed_c10d._world.default_pg
            _c10d._set_global_rank(default.rank() if default is not None else -1)


@contextmanager
def _restored() -> Iterator[None]:
    before = [(owner, name, getattr(owner, name)) for owner, name in _LEFT_BEHIND]
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
        _guards.set_is_in_mode_without_ignore_compile_internals(
            _python_dispatch._is_in_any_mode_without_ignore_compile_internals
        )


@contextmanager
def _backend_registered(make_group: MakeGroup) -> Iterator[None]:
    def backend(options: Any, _: object) -> ProcessGroup:
        return make_group(options.group_id, tuple(options.global_ranks_in_group))

    before = {name: getattr(Backend, name) for name in _TABLES}
    known = hasattr(Backend, BACKEND.upper())
    for name, table in before.items():
        setattr(Backend, name, table.copy())
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    Backend.register_backend(BACKEND, backend, extended_api=True, devices=devices)
    try:
        yield
    finally:
        for name, table in before.items():
            setattr(Backend, name, table)
        if not known:
            delattr(Backend, BACKEND.upper())


class _World:
    """One rank's torch.distributed state; the attributes are those of ``distributed_c10d._World``."""

    def __init__(self) -> None:
        self.default_pg: ProcessGroup | None = None
        self.pg_map: dict[ProcessGroup, Any] = _Groups()
        self.pg_names: dict[ProcessGroup, str] = {}
        self.pg_group_ranks: dict[ProcessGroup, dict[int, int]] = {}
        self.pg_backend_config: dict[ProcessGroup, str] = {}
        self.pg_to_tag: dict[ProcessGroup, str] = {}
        self.pg_coalesce_state: dict[ProcessGroup, list[Any]] = {}
        self.tags_to_pg: dict[str, list[ProcessGroup]] = {}
        self.group_count = 0
        self.comms: list[Any] = []

    pg_config_info = distributed_c10d._World.pg_config_info


class _Groups(dict[ProcessGroup, Any]):
    """A rank's groups. Refuses real backends: a rank that blocks in one would stop all others for good."""

    def __setitem__(self, group: ProcessGroup, value: Any) -> None:
        if not getattr(group, "is_simulated", False):
            raise ArgumentError(f"a simulated rank asked for a group with backend {value[0]!r}; leave `backend` out")
        super().__setitem__(group, value)


class _WorldPerThread:
    """Stands in for ``distributed_c10d._world``: a rank's thread sees its own, any other the caller's."""

    def __init__(self, callers: Any) -> None:
        object.__setattr__(self, "_callers", callers)
        object.__setattr__(self, "_own", threading.local())

    def enter(self) -> None:
        """Give the calling thread a world of its own."""
        self._own.world = _World()

    def callers(self) -> Any:
        return self._callers

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(self._own, "world", self._callers), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(getattr(self._own, "world", self._callers), name, value)


def version(tensor: torch.Tensor) -> int:
    """How often the tensor was written through autograd's eyes; 0 for tensors of inference mode."""
    return 0 if tensor.is_inference() else tensor._version


def describe(group: ProcessGroup, description: str) -> None:
    """Set ``group.group_desc``."""
    group._set_group_desc(description)


def without_function_modes() -> AbstractContextManager[Any]:
    """Within, no mode sees functions of torch (operations still do what they do): each costs microseconds."""
    return torch._C.DisableTorchFunction()


def complete_gradient(parameter: torch.nn.Parameter, given: list[torch.Tensor]) -> None:
    """As autograd does when the gradient of ``parameter`` that is ``given`` is complete: added, then whoever wants to
    know is told. It is taken out of the list: a caller may hold its arguments until a call returns (as where dynamo
    evaluates frames), and autograd holds it no longer."""
    gradient = given.pop()
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        with torch.no_grad():
            parameter.grad.add_(gradient)
    del gradient
    with without_function_modes():
        for hook in tuple((getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values()):
            hook(parameter)
