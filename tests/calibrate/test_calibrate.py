"""This machine's CPU with tiny sizes: a file that loads, a plan made with it, and the refusals."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tomllib
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from typer.testing import CliRunner

from autopar import cli
from autopar.calibrate import Calibration, calibrate, host
from autopar.calibrate.clock import Clock
from autopar.calibrate.describe import Measured, cluster_of
from autopar.calibrate.fit import ProductFit
from autopar.calibrate.memory import element_seconds
from autopar.calibrate.processes import measure_in_processes
from autopar.calibrate.samples import Effort, Message, Product, cubes
from autopar.calibrate.table import measurements, tables
from autopar.cluster import Cluster
from autopar.cost_models import compute
from autopar.errors import ArgumentError
from tests.pinned import compile_pinned

ROOT = Path(__file__).parents[2]
TINY = Effort(2, 0.0, cubes(8, 32, 64), 1.0, 1 << 20, ())
MESSAGES = (Message("all_reduce", "intra_node", 2, 1024, 1e-4), Message("all_reduce", "intra_node", 2, 1 << 20, 1e-3))
GPU = Measured(
    device_name="Some GPU",
    device_type="cuda",
    memory_bytes=10**11,
    host_memory_bytes=10**11,
    devices_per_node=8,
    memory_bytes_per_second=3e12,
    host_bytes_per_second=5e10,
    host_duplex_bytes_per_second=4e10,
    host_memory_bytes_per_second=7e10,
    launch_seconds=2e-6,
    host_call_seconds=2e-5,
    multiprocessors=132,
    element_seconds=1e-12,
    sustained_fraction=0.91,
    products=ProductFit({"bfloat16": 8e14, "float32": 5e13}, {"bfloat16": 4e-6, "float32": 2e-6}),
)


def figures(table: dict[str, object], prefix: str = "") -> set[str]:
    """Dotted keys of all numbers of a file."""
    keys = set()
    for key, value in table.items():
        if isinstance(value, dict):
            keys |= figures(value, f"{prefix}{key}.")
        elif not isinstance(value, str):
            keys.add(prefix + key)
    return keys


@pytest.fixture(scope="module")
def found() -> Calibration:
    return calibrate("cpu", name="here", effort=TINY)


def test_the_file_loads_and_a_plan_uses_it(found: Calibration, tmp_path: Path) -> None:
    path = tmp_path / "here.toml"
    path.write_text(str(found.cluster), encoding="utf-8")
    assert Cluster.load(path) == found.cluster
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    job = compile_pinned(
        model, 2, sample=torch.randn(4, 8), loss=lambda out, _: out.square().mean(), mesh={"dp": 2}, cluster=path
    )
    assert Cluster.parse(job.plan.cluster_toml) == found.cluster
    assert job.plan.cluster == "here"


def test_what_a_cpu_gets(found: Calibration) -> None:
    device = found.cluster.device
    assert device.kind == "cpu"
    assert {"float32", "float64"} <= set(device.flops_per_second)
    assert "float8_e4m3fn" not in device.flops_per_second
    assert 1e7 < device.rate("float32") < 1e13
    assert 1e-8 < device.launch_seconds < 1e-2
    assert found.cluster.intra_node.name == "gloo inside a machine (not measured)"


def test_every_figure_says_how_it_was_measured(found: Calibration) -> None:
    gpu = cluster_of("gpu", GPU, MESSAGES, date(2026, 1, 2))
    for cluster in (found.cluster, gpu):
        missing = figures(tomllib.loads(str(cluster))) - set(cluster.sources)
        assert not missing
    assert gpu.sources["device.launch_seconds"].startswith("measured by autopar calibrate, 2026-01-02, torch ")
    assert "Some GPU" in gpu.sources["device.launch_seconds"]
    assert gpu.sources["intra_node.bytes_per_second"].endswith(": 2 collectives on groups of 2")
    assert gpu.sources["inter_node.bytes_per_second"].startswith("not measured, as in the preset h100: NVIDIA DGX")
    assert gpu.inter_node.bytes_per_second == 50e9
    assert gpu.intra_node.bytes_per_second == pytest.approx((2**20 - 2**10) / 9e-4, rel=1e-2)
    assert gpu.device.ramp("bfloat16") == 4e-6


class Counted(TorchFunctionMode):
    """Ops, and gradients of their operands, while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.ops = self.gradients = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") != "__get__":  # an attribute of a tensor
            self.ops += 1
            self.gradients += sum(isinstance(each, torch.Tensor) and each.requires_grad for each in args)
        return result


def test_the_calls_of_the_host_are_counted() -> None:
    """As often as a layer has them; on a CPU nothing but computing them takes time."""
    layer, x = host.Layer(), torch.ones(1, 8, 64, requires_grad=True, device="meta")
    with Counted() as counted:
        layer(x)
    assert (counted.ops, counted.gradients) == (host.OPS, host.GRADIENTS)
    dtypes = [weight.dtype for weight in layer.parameters()]
    assert (len(dtypes), dtypes.count(torch.bfloat16)) == (host.WEIGHTS, host.COPIES)
    assert 1e-8 < host.host_call_seconds(Clock(torch.device("cpu"), 2, 0.0)) < 1e-2


def test_a_cpu_has_no_other_host(found: Calibration) -> None:
    assert found.cluster.device.host_call_seconds == 0.0
    assert cluster_of("gpu", GPU, MESSAGES, date(2026, 1, 2)).device.host_call_seconds == 2e-5


def test_measurements_stand_beside_the_fit(found: Calibration) -> None:
    both = Calibration(found.cluster, found.products, MESSAGES)
    products, links = tables(both)
    assert products.row_count == 3
    assert links.row_count == 2
    assert [column.header for column in links.columns] == ["ranks", "bytes", "all_reduce"]
    rows = measurements(both)
    assert len(rows) == len(found.products) + 2
    assert all(row["seconds"] > 0 and row["fitted_seconds"] > 0 for row in rows)


def test_short_runs_are_compared_with_short_runs() -> None:
    """A device that slows down without a pause (to 0.91) was measured before it did."""
    gpu = cluster_of("gpu", GPU, MESSAGES, date(2026, 1, 2))
    peak = dataclasses.replace(gpu.device, sustained_fraction=1.0)
    product = Product("bfloat16", 8192, 8192, 8192, 2, 1.0)
    seconds = compute.seconds(product.flops, product.moved_bytes, "bfloat16", peak, 8192.0**2)
    (row,) = measurements(Calibration(gpu, (dataclasses.replace(product, seconds=seconds),), ()))
    assert row["fitted_seconds"] == pytest.approx(row["seconds"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_without_a_gpu_cuda_is_refused() -> None:
    with pytest.raises(ArgumentError, match="there is no CUDA device that torch can use; run this where there is one"):
        calibrate("cuda")


def test_other_devices_are_refused() -> None:
    with pytest.raises(ArgumentError, match="device is 'tpu', but must be 'cuda' or 'cpu'"):
        calibrate("tpu")


def test_torchrun_with_one_process_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(ArgumentError, match="torchrun started one process, which has nobody to talk to: give"):
        calibrate("cpu", effort=TINY)


def test_where_it_can_not_write_it_says_so_before_it_measures(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli.app, ["calibrate", "-o", str(tmp_path / "absent" / "mine.toml")])
    assert isinstance(result.exception, ArgumentError)
    assert "is no folder that you may write to" in str(result.exception)


def test_the_command_writes_a_file(monkeypatch: pytest.MonkeyPatch, found: Calibration, tmp_path: Path) -> None:
    asked = {}

    def once(device: str | None, **options: object) -> Calibration:
        asked.update(options, device=device)
        return busy

    busy = dataclasses.replace(found, busy_cores=3.0)
    monkeypatch.setattr(cli, "calibrate", once)
    path = tmp_path / "mine.toml"
    result = CliRunner().invoke(cli.app, ["calibrate", "--quick", "--device", "cpu", "-o", str(path)])
    assert result.exit_code == 0, result.output
    assert asked["quick"] is True
    assert asked["name"] == "mine"
    assert Cluster.load(path) == found.cluster
    assert "--cluster" in result.output
    assert "others kept 3.0 cores busy" in result.output
    machine = json.loads(CliRunner().invoke(cli.app, ["calibrate", "--json"]).stdout)
    assert Cluster.parse(machine["cluster"]) == found.cluster
    assert len(machine["measured"]) == len(found.products)


@pytest.mark.slow
@pytest.mark.gloo
def test_it_starts_processes_of_its_own() -> None:
    messages = measure_in_processes(2, Effort(1, 0.0, (), 1.0, 1024, (1024, 65536)))
    assert {(m.link, m.size) for m in messages} == {("intra_node", 2)}
    assert all(m.seconds > 0 for m in messages)


@pytest.mark.slow
@pytest.mark.gloo
def test_under_torchrun_its_processes_are_measured(tmp_path: Path) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(
        "import sys\n"
        "from autopar.calibrate import calibrate\n"
        "from autopar.calibrate.samples import Effort, cubes\n"
        "found = calibrate('cpu', effort=Effort(1, 0.0, cubes(8, 32), 1.0, 1 << 20, (1024, 65536)))\n"
        "if found.rank == 0:\n"
        "    open(sys.argv[1], 'w').write(str(found.cluster))\n"
    )
    out = tmp_path / "mine.toml"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(worker)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(out)], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    cluster = Cluster.load(out)
    assert cluster.devices_per_node == 2
    assert cluster.intra_node.name == "gloo, intra node"
    assert "on groups of 2" in cluster.sources["intra_node.latency_seconds"]


def test_what_an_element_takes_is_beside_its_bytes() -> None:
    clock = Clock(torch.device("cpu"), 2, 0.0)
    endless = element_seconds(clock, TINY, 1e18)
    assert 0 < endless < 1e-6
    assert element_seconds(clock, TINY, 1.0) == 0
