"""Measures one thread of this machine as a device, and gloo between two of its processes, as a cluster file.

    python benchmarks/device_figures.py > my_cpu.toml

Takes ten seconds. Each figure is the best of its repetitions, so that other work disturbs it little.
The link between nodes is not measured, but typical figures of Ethernet on top of gloo's own.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from autopar.cluster import DTYPES, Cluster, Device, Link

MEMORY_BYTES = 4 << 30
RANKS_PER_NODE = 64
ETHERNET_SECONDS, ETHERNET_BYTES_PER_SECOND = 50e-6, 12.5e9  # one card of 100 Gb/s for all ranks of a node
LARGE, SMALL = 512, 16  # matrix sizes
EMULATED = ("bfloat16", "float16")  # most CPUs compute them slowly: smaller matrices
COPIED_BYTES = 256 << 20
REDUCED_BYTES = 32 << 20


def best_seconds(call: Callable[[], object], repeats: int, inner: int = 1) -> float:
    """Seconds of one ``call``: the best of ``repeats`` means over ``inner`` calls, after one to warm up."""
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(inner):
            call()
        times.append((time.perf_counter() - start) / inner)
    return min(times)


def matmul_seconds(size: int, dtype: torch.dtype, repeats: int, inner: int = 1) -> float:
    a = torch.randn(size, size).to(dtype)
    return best_seconds(lambda: torch.mm(a, a), repeats, inner)


def rounded(figure: float) -> float:
    return float(f"{figure:.2g}")


def flops_per_second(dtype: str) -> float:
    size = LARGE // 4 if dtype in EMULATED else LARGE
    return rounded(2 * size**3 / matmul_seconds(size, getattr(torch, dtype), 20))


def measure_device() -> Device:
    rates = {dtype: flops_per_second(dtype) for dtype in DTYPES}
    one, source = torch.ones(1), torch.ones(COPIED_BYTES // 4)
    target = torch.empty_like(source)
    copied = COPIED_BYTES / best_seconds(lambda: target.copy_(source), 10)
    launch = best_seconds(lambda: torch.add(one, one), 20, 2000)
    small = matmul_seconds(SMALL, torch.float32, 20, 2000)
    return Device(
        name="one thread of a CPU core",
        kind="cpu",
        memory_bytes=MEMORY_BYTES,
        flops_per_second=rates,
        memory_bytes_per_second=rounded(2 * copied),
        launch_seconds=rounded(launch),
        achievable_fraction=1,
        ramp_seconds=rounded(max(0.0, small - launch - 2 * SMALL**3 / rates["float32"])),
        host_memory_bytes=MEMORY_BYTES,
        host_bytes_per_second=rounded(copied),
    )


def all_reduce_seconds(rank: int, folder: str) -> tuple[float, float]:
    """A small and a large all-reduce, as one of two processes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    small, large = torch.ones(1), torch.ones(REDUCED_BYTES // 4)
    seconds = (
        best_seconds(lambda: dist.all_reduce(small), 20, 200),
        best_seconds(lambda: dist.all_reduce(large), 20),
    )
    dist.destroy_process_group()
    return seconds


def measure_links() -> tuple[Link, Link]:
    """Two ranks all-reduce in two messages, and each sends as many bytes as the tensor has."""
    with tempfile.TemporaryDirectory() as folder, multiprocessing.get_context("spawn").Pool(2) as pool:
        (small, large), _ = pool.starmap(all_reduce_seconds, [(0, folder), (1, folder)], chunksize=1)
    latency, bandwidth = rounded(small / 2), rounded(REDUCED_BYTES / (large - small))
    inside = Link("gloo inside a machine", latency, bandwidth)
    slowest = min(bandwidth, ETHERNET_BYTES_PER_SECOND / RANKS_PER_NODE)
    return inside, Link("gloo over Ethernet", rounded(latency + ETHERNET_SECONDS), rounded(slowest))


def main() -> None:
    torch.set_num_threads(1)
    print(Cluster("cpu", RANKS_PER_NODE, measure_device(), *measure_links()), end="")


if __name__ == "__main__":
    main()
