"""Clusters: presets, a user's file, refusals that name the key, and which link a group crosses."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections import Counter
from dataclasses import replace
from importlib import resources
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cluster import Cluster, Device, Link, presets
from autopar.errors import ClusterError

DATA = resources.files("autopar.cost_models") / "data"
TOML = """
name = "two boxes"
devices_per_node = 4

[device]
name = "A"
kind = "cuda"
memory_bytes = 16e9
memory_bytes_per_second = 1e12
launch_seconds = 3e-6
achievable_fraction = 0.5
ramp_seconds = 0

[device.flops_per_second]
float32 = 2e13

[intra_node]
name = "fast"
latency_seconds = 1e-6
bytes_per_second = 1e11

[inter_node]
name = "slow"
latency_seconds = 1e-5
bytes_per_second = 1e10
"""


def with_line(pattern: str, line: str) -> str:
    """TOML with the first line that begins with ``pattern`` replaced."""
    text, count = re.subn(rf"^{re.escape(pattern)}.*$", line, TOML, count=1, flags=re.MULTILINE)
    assert count == 1
    return text


def figures(table: dict[str, object], prefix: str = "") -> set[str]:
    """Dotted keys of all numbers of a file."""
    found = set()
    for key, value in table.items():
        if isinstance(value, dict):
            found |= figures(value, f"{prefix}{key}.")
        elif not isinstance(value, str):
            found.add(prefix + key)
    return found


def test_presets() -> None:
    assert presets() == ("a100", "b200", "cpu", "gb200", "h100", "h200", "h800", "mi300x")


@pytest.mark.parametrize("name", presets())
def test_every_figure_of_a_preset_says_where_it_comes_from(name: str) -> None:
    cluster = Cluster.load(name)
    assert cluster.name == name
    assert set(cluster.sources) == figures(tomllib.loads((DATA / f"{name}.toml").read_text(encoding="utf-8")))
    assert all(cluster.sources.values())


@pytest.mark.parametrize("name", presets())
def test_a_cluster_prints_as_a_file_that_reads_back(name: str, tmp_path: Path) -> None:
    cluster = Cluster.load(name)
    path = tmp_path / "cluster.toml"
    path.write_text(str(cluster), encoding="utf-8")
    again = Cluster.load(path)
    assert again == cluster
    assert again.sources == cluster.sources
    assert hash(again) == hash(cluster)


def test_h100_is_the_data_sheet() -> None:
    cluster = Cluster.load("h100")
    assert cluster.device.memory_bytes == 80_000_000_000
    assert isinstance(cluster.device.memory_bytes, int)
    assert cluster.device.rate("bfloat16") == 989.4e12
    assert cluster.intra_node.bytes_per_second == 450e9
    assert cluster.inter_node.bytes_per_second == 50e9
    assert cluster.devices_per_node == 8


def test_h800_is_an_h100_with_a_narrower_nvlink() -> None:
    h800, h100 = Cluster.load("h800"), Cluster.load("h100")
    assert h800.device.rate("bfloat16") == h100.device.rate("bfloat16")
    assert h800.intra_node.bytes_per_second == 200e9
    assert h800.inter_node.bytes_per_second == h100.inter_node.bytes_per_second


def test_what_is_achieved() -> None:
    h100 = Cluster.load("h100")
    assert h100.device.fraction("bfloat16") == h100.device.achievable_fraction == 0.803
    assert h100.device.fraction("float8_e4m3fn") == 0.709
    assert h100.device.achievable_memory_bytes_per_second == pytest.approx(0.887 * 3.35e12)
    assert h100.intra_node.achievable_bytes_per_second(2) == h100.intra_node.achievable_bytes_per_second(8)
    assert h100.intra_node.achievable_bytes_per_second(8) == pytest.approx(0.817 * 450e9)


def test_pairs_of_mi300x_have_a_wire_of_their_own() -> None:
    """Two devices reach a seventh of what eight do; 48 and 313 GB/s were measured."""
    rates = [Cluster.load("mi300x").intra_node.achievable_bytes_per_second(size) for size in (2, 4, 8, 16)]
    assert rates == pytest.approx([0.698 * 64e9, 0.698 * 192e9, 0.698 * 448e9, 0.698 * 448e9])


def test_a_rack_of_72_is_one_node() -> None:
    rack = Cluster.load("gb200")
    assert rack.link(8, 1, 256) == rack.intra_node
    assert rack.link(32, 8, 256).name == rack.inter_node.name


def test_a_users_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(TOML, encoding="utf-8")
    device = Device("A", "cuda", 16_000_000_000, {"float32": 2e13}, 1e12, 3e-6, 0.5, 0)
    expected = Cluster("two boxes", 4, device, Link("fast", 1e-6, 1e11), Link("slow", 1e-5, 1e10))
    assert Cluster.load(path) == expected
    assert Cluster.load(str(path)) == expected


numbers = st.floats(min_value=1, max_value=1e18)


@given(numbers, numbers, st.floats(min_value=0, max_value=1), st.integers(1, 10**6))
def test_any_figures_read_back_exactly(rate: float, bandwidth: float, latency: float, count: int) -> None:
    base = Cluster.load("cpu")
    device = dataclasses.replace(base.device, flops_per_second={"float32": rate}, launch_seconds=latency)
    cluster = Cluster('a "quoted" name', count, device, Link("ü\n", latency, bandwidth), base.inter_node)
    assert Cluster.parse(str(cluster)) == cluster


@pytest.mark.parametrize(
    ("pattern", "line", "message"),
    [
        ("memory_bytes =", "", "device.memory_bytes is missing; give a whole number of bytes"),
        ("memory_bytes =", "memory_bytes = -16e9", "device.memory_bytes is -16000000000, but must be"),
        ("memory_bytes =", "memory_bytes = 1e6.5", "is not TOML"),
        (
            "memory_bytes =",
            "memory_bytes = 1000000.5",
            "memory_bytes is 1000000.5, but must be a whole number",
        ),
        (
            "memory_bytes_per",
            "memory_bytes_per_second = 0",
            "device.memory_bytes_per_second is 0, but must be",
        ),
        ("memory_bytes_per", 'memory_bytes_per_second = "1"', "device.memory_bytes_per_second is '1', but"),
        ("memory_bytes_per", "memory_bytes_per_second = nan", "device.memory_bytes_per_second is nan, but"),
        ("launch_seconds", "launch_seconds = true", "device.launch_seconds is True, but must be a number"),
        ("launch_seconds", "lunch_seconds = 1", "device.lunch_seconds is unknown (did you mean 'launch_seconds'?)"),
        ("achievable", "achievable_fraction = 80", "device.achievable_fraction is 80, but must be a number"),
        ("kind", 'kind = "tpu"', "device.kind is 'tpu', but must be 'cuda' or 'cpu'"),
        ("float32", "float32 = 2e19", "device.flops_per_second.float32 is 2e+19, but must be a number of"),
        (
            "float32",
            "fp32 = 2e13",
            "device.flops_per_second.fp32 is unknown; what may stand there is float64",
        ),
        ("float32", "", "device.flops_per_second is empty; give a figure for any of float64, float32"),
        ("[device.flops", "[device.rates]", "device.rates is unknown"),
        ("[intra_node]", "[inside]", "inside is unknown; what may stand there is name, devices_per_node"),
        ("latency_seconds", "latency_seconds = inf", "intra_node.latency_seconds is inf, but must be"),
        ("devices_per_node", "devices_per_node = 0", "devices_per_node is 0, but must be a whole number of"),
        ("ramp", "ramp_seconds = 0\nachievable_fraction_by_dtype = {bfloat16 = 0.7}", "by_dtype.bfloat16 is unknown"),
        ("ramp", "ramp_seconds = 0\nachievable_fraction_by_dtype = {float32 = 2}", "by_dtype.float32 is 2, but must"),
        ("ramp", "ramp_seconds = 0\nmemory_achievable_fraction = 1.1", "memory_achievable_fraction is 1.1, but must"),
        (
            "[device]",
            "[[device]]",
            "device is a list of 1; plans are for equal nodes of equal devices: give one",
        ),
        ("name", 'name = "c"\ndevices = [{}, {}]', "devices is a list of 2; plans are for equal nodes of equal"),
        ("name", "name = 7", "name is 7, but must be a text"),
        ("name", 'name = "c"\nsources = {name = 1}', "sources.name is 1, but must be a text"),
        ("name", 'name = "c"\nsources = "me"', "sources is 'me', but must be a table"),
    ],
)
def test_a_wrong_file_is_refused(pattern: str, line: str, message: str) -> None:
    with pytest.raises(ClusterError) as caught:
        Cluster.parse(with_line(pattern, line), "mine.toml")
    assert str(caught.value).startswith("mine.toml")
    assert message in str(caught.value)


@pytest.mark.parametrize("text", ["", "# nothing but a comment\n"])
def test_an_empty_file_is_refused(text: str) -> None:
    with pytest.raises(ClusterError, match=r"^cluster is empty; start from a preset, .* autopar calibrate$"):
        Cluster.parse(text)


@pytest.mark.parametrize(
    ("pattern", "line", "message"),
    [
        (
            "bytes_per_second",
            "bytes_per_second = 450",
            "intra_node.bytes_per_second is 450, which is no device's",
        ),
        (
            "float32",
            "float32 = 989.4",
            "per_second.float32 is 989.4, which is no device's; it is",
        ),
        (
            "bytes_per_second",
            "bytes_per_second = 3.6e12",
            "intra_node.bytes_per_second is 3.6e+12, more than",
        ),
        ("ramp", "ramp_seconds = 0\nhost_bytes_per_second = 55", "device.host_bytes_per_second is 55, which is no"),
        ("ramp", "ramp_seconds = 0\nhost_memory_bytes_per_second = 77", "host_memory_bytes_per_second is 77, which is"),
        ("ramp", "ramp_seconds = 0\nhost_bytes_per_second = 2e12", "device.host_bytes_per_second is 2e+12, more than"),
        (
            "ramp",
            "ramp_seconds = 0\nhost_bytes_per_second = 5e10\nhost_duplex_bytes_per_second = 8e10",
            "host_duplex_bytes_per_second is 8e+10, more than host_bytes_per_second, 5e+10, which",
        ),
        ("ramp", "ramp_seconds = 0\nhost_memory_bytes = 1e9", "is 1e+09, but there is no host_bytes_per_second: give"),
        (
            "bytes_per",
            "bytes_per_second = 1e11\npeer_bytes_per_second = 2e11",
            "intra_node.peer_bytes_per_second is",
        ),
    ],
)
def test_a_file_that_contradicts_itself_is_refused(pattern: str, line: str, message: str, tmp_path: Path) -> None:
    """In code the same figures are allowed: one may ask what a faster network would bring."""
    path = tmp_path / "mine.toml"
    path.write_text(with_line(pattern, line), encoding="utf-8")
    with pytest.raises(ClusterError) as caught:
        Cluster.load(path)
    assert str(caught.value).startswith(f"cluster file {path}: ")
    assert message in str(caught.value)
    assert str(Cluster.parse(with_line(pattern, line)))


@pytest.mark.parametrize("key", ["device", "intra_node", "inter_node"])
def test_a_missing_or_misshapen_part_is_refused(key: str) -> None:
    table = re.sub(rf"\n\[{key}\](.|\n)*?(?=\n\[(?!device\.)|\Z)", "", TOML)
    with pytest.raises(ClusterError, match=rf"^cluster: {key} is missing; give a table \[{key}\]"):
        Cluster.parse(table)
    with pytest.raises(ClusterError, match=rf"^cluster: {key} is 3, but must be a table"):
        Cluster.parse(f"{key} = 3\n{table}")


def test_values_built_in_code_are_checked_too() -> None:
    with pytest.raises(ClusterError, match=r"^bytes_per_second is 0, but must be a number of bytes/s from 1 "):
        Link("broken", 0, 0)
    with pytest.raises(ClusterError, match=r"^flops_per_second.float32 is 0, but must be a number of FLOP/s"):
        dataclasses.replace(Cluster.load("cpu").device, flops_per_second={"float32": 0})


@pytest.mark.parametrize("name", ["h300", "", "no/such/file.toml"])
def test_an_unknown_preset_lists_the_known_ones(name: str) -> None:
    with pytest.raises(
        ClusterError, match=r"there is no cluster .* presets are a100, b200, cpu, .*, mi300x, .* TOML file"
    ):
        Cluster.load(name)


def test_several_clusters_are_refused() -> None:
    with pytest.raises(ClusterError, match=r"not \['h100', 'a100'\]; plans are for equal nodes of equal devices: give"):
        Cluster.load(["h100", "a100"])  # type: ignore[arg-type]


def test_a_misspelt_preset_gets_a_hint() -> None:
    with pytest.raises(ClusterError, match=r"there is no cluster 'H10O' \(did you mean 'h100'\?\): presets are"):
        Cluster.load("H10O")


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "binary.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ClusterError, match=r"binary\.toml can't be read"):
        Cluster.load(path)


def test_a_dtype_without_a_figure_is_refused() -> None:
    with pytest.raises(ClusterError, match="device 'A' has no flops_per_second for bfloat16, only for float32"):
        Cluster.parse(TOML).device.rate("bfloat16")


@pytest.mark.parametrize(
    ("size", "stride", "link"),
    [
        (1, 64, "NVLink 4"),
        (8, 1, "NVLink 4"),
        (2, 4, "NVLink 4"),
        (3, 2, "NVLink 4"),
        (16, 1, "InfiniBand NDR"),
        (2, 8, "InfiniBand NDR"),
        (4, 4, "InfiniBand NDR"),
    ],
)
def test_the_link_of_a_group(size: int, stride: int, link: str) -> None:
    assert Cluster.load("h100").link(size, stride).name == link


@given(
    size=st.integers(2, 6),
    stride=st.integers(1, 6),
    blocks=st.integers(1, 6),
    devices=st.integers(1, 12),
    outside=st.sampled_from([1e9, 1e12]),
)
def test_the_link_is_the_slowest_of_those_that_neighbours_use(
    size: int, stride: int, blocks: int, devices: int, outside: float
) -> None:
    """Against all groups of the axis, rank by rank; the network may be the faster one.

    A group with as many ranks in each of its nodes has that many network cards for its rings.
    """
    inside = Link("inside", 0, 1e10)
    cluster = Cluster("c", devices, Cluster.load("cpu").device, inside, Link("outside", 0, outside))
    world = size * stride * blocks
    firsts = [rank for rank in range(world) if rank // stride % size == 0]
    groups = [range(first, first + size * stride, stride) for first in firsts]
    nodes = [(a // devices, b // devices) for group in groups for a, b in pairwise(group)]
    used = {cluster.intra_node if a == b else cluster.inter_node for a, b in nodes}
    slowest, found = min(used, key=lambda link: link.bytes_per_second), cluster.link(size, stride, world)
    assert found.name == slowest.name
    assert found.achievable_bytes_per_second(size) == slowest.bytes_per_second
    cards = {count for group in groups for count in Counter(rank // devices for rank in group).values()}
    rings = cards.pop() if len(cards) == 1 and found.name == "outside" else 1
    assert found.ring_bytes_per_second(size) == (min(1e10, rings * outside) if rings > 1 else slowest.bytes_per_second)


def test_collectives_hold_multiprocessors_for_each_card() -> None:
    """Of an A100's 108: 24 within a node; between nodes 2 for each of the ranks that a node has, so 16 for eight."""
    a100 = Cluster.load("a100")
    for size, stride, held in ((8, 1, 24), (2, 4, 24), (64, 1, 16), (16, 4, 4), (8, 8, 2)):
        link = a100.link(size, stride, 64)
        assert link.held_multiprocessors == held
        assert a100.device.held_share(link) == held / 108
    assert Cluster.load("gb200").link(144, 1).held_multiprocessors == 24, "no more than the wires of a node take"
    cpu = Cluster.load("cpu")
    assert cpu.device.held_share(cpu.link(8, 1)) == 0.0


def test_no_host_is_faster_than_its_devices() -> None:
    device = Cluster.load("h100").device
    with pytest.raises(ClusterError, match="more than programs reach of the device's own memory"):
        replace(device, host_memory_bytes_per_second=3e12)
    assert device.update_bytes_per_second(on_host=True) == 76.8e9
    assert device.update_bytes_per_second(on_host=False) == device.achievable_memory_bytes_per_second


def test_collectives_leave_some_multiprocessors() -> None:
    a100 = Cluster.load("a100")
    for held, many in ((108, 0), (0, 14)):
        links = {
            "intra_node": replace(a100.intra_node, held_multiprocessors=held),
            "inter_node": replace(a100.inter_node, held_multiprocessors=many),
        }
        with pytest.raises(ClusterError, match="the device has 108 multiprocessors, of which collectives leave some"):
            replace(a100, **links)
    unknown = replace(a100.device, multiprocessors=0)
    assert replace(a100, device=unknown).device.held_share(a100.intra_node) == 0.0


def test_rings_over_nodes_use_all_cards() -> None:
    """What 8 GPUs of a node have between them is the limit, or what their 8 cards have."""
    h100 = Cluster.load("h100")
    assert h100.link(16, 1).ring_bytes_per_second(16) == pytest.approx(8 * 0.74 * 50e9)
    assert h100.link(8, 4).ring_bytes_per_second(8) == pytest.approx(2 * 0.74 * 50e9)
    assert h100.link(16, 1).achievable_bytes_per_second(16) == pytest.approx(0.74 * 50e9)
    assert h100.link(2, 8).ring_bytes_per_second(2) == pytest.approx(0.74 * 50e9)


def test_copies_both_ways_share_the_hosts_memory() -> None:
    """Of rates that aren't known, nothing is said."""
    device = replace(Cluster.load("cpu").device, host_bytes_per_second=50.0)
    known = replace(device, host_duplex_bytes_per_second=40.0)
    assert device.swap_bytes_per_second(both_ways=True) == known.swap_bytes_per_second(both_ways=False) == 50
    assert known.swap_bytes_per_second(both_ways=True) == 40
    for memory, least in ((100.0, 40), (70.0, 35)):
        shared = replace(known, host_memory_bytes_per_second=memory)
        assert shared.swap_bytes_per_second(both_ways=True) == least
    narrow = replace(known, host_memory_bytes_per_second=45.0)
    assert (narrow.swap_bytes_per_second(both_ways=False), narrow.swap_bytes_per_second(both_ways=True)) == (45, 22.5)
