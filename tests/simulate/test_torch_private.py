"""A simulation leaves the process as it found it, and real backends out."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils import _python_dispatch

from autopar import simulate
from autopar.errors import ArgumentError, DeadRankError

TABLES = ("_plugins", "backend_capability", "backend_type_map", "default_device_backend_map")


def state() -> list[object]:
    backend = distributed_c10d.Backend
    return [
        distributed_c10d._world,
        distributed_c10d._backend,
        distributed_c10d._default_pg_init_method,
        sys.excepthook,
        *(dict(getattr(backend, table)) for table in TABLES),
        *(id(getattr(backend, table)) for table in TABLES),
        list(backend.backend_list),
        hasattr(backend, "THREADED"),
        _python_dispatch._is_in_torch_dispatch_mode,
        _python_dispatch._is_in_non_infra_torch_dispatch_mode,
        _python_dispatch._is_in_any_mode_without_ignore_compile_internals,
        torch.get_num_threads(),
        torch.is_grad_enabled(),
        threading.active_count(),
    ]


def program(rank: int) -> None:
    group = dist.new_group([0, 1])
    if rank < 2:
        dist.all_reduce(torch.ones(2), group=group)
    with torch.no_grad():
        dist.barrier()


class Watching(_python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def entering_modes_in_turns(rank: int) -> None:
    dist.barrier()
    with Watching():
        dist.barrier()


def failing(rank: int) -> None:
    dist.barrier()
    raise ValueError(rank)


@pytest.fixture
def gloo(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_nothing_is_left_behind() -> None:
    before = state()
    for harmless in (program, entering_modes_in_turns):
        simulate.run(harmless, 3)
        assert state() == before
    with pytest.raises(DeadRankError):
        simulate.run(failing, 3)
    assert state() == before
    assert not dist.is_initialized()


@pytest.mark.usefixtures("gloo")
def test_a_caller_with_groups_of_his_own() -> None:
    mine = dist.new_group([0], group_desc="mine")
    before = state()
    seen = simulate.run(lambda rank: (dist.get_rank(), dist.get_world_size(), dist.get_backend()), 3).results
    assert seen == [(rank, 3, "threaded") for rank in range(3)]
    assert state() == before
    assert dist.get_backend() == "gloo"
    assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
    assert distributed_c10d._resolve_process_group(mine.group_name) is mine
    x = torch.ones(2)
    dist.all_reduce(x, group=mine)
    summed = dist._functional_collectives.all_reduce(x, "sum", mine)
    assert (summed + 0).tolist() == [1, 1]


@pytest.mark.usefixtures("gloo")
def test_other_threads_see_the_callers_groups() -> None:
    seen = []

    def look() -> None:
        seen.append((dist.get_backend(), dist.get_world_size()))

    def program(rank: int) -> None:
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()

    simulate.run(program, 2)
    assert seen == [("gloo", 1)] * 2


def test_a_program_may_destroy_its_groups() -> None:
    def program(rank: int) -> bool:
        dist.barrier()
        dist.destroy_process_group()
        return dist.is_initialized()

    assert simulate.run(program, 2).results == [False, False]
    assert not dist.is_initialized()


def test_a_simulation_in_a_simulation_is_refused() -> None:
    with pytest.raises(DeadRankError) as caught:
        simulate.run(lambda rank: simulate.run(program, 2), 2)
    assert isinstance(caught.value.__cause__, ArgumentError)
    assert "while another simulation runs" in str(caught.value)


def test_a_group_of_a_real_backend() -> None:
    def program(rank: int) -> str:
        return (
            dist.get_backend_config(dist.new_group([0], backend="gloo"))
            + type(dist.new_group([0], backend="gloo")).__name__
        )

    # From 2.13 on, torch asks the world's group for its sub-groups, which then are simulated too.
    if "all_gather_single" in vars(dist):
        assert simulate.run(program, 1).results[0].endswith("SimulatedGroup")
    else:
        with pytest.raises(DeadRankError, match="group with backend 'gloo'; leave `backend` out"):
            simulate.run(program, 1)


def test_a_process_group_is_freed() -> None:
    import gc
    import weakref

    alive = simulate.run(lambda rank: weakref.ref(dist.group.WORLD), 2).results
    gc.collect()
    assert [reference() for reference in alive] == [None, None]
    assert os.getpid()
