"""What a job runs on: devices, the links between them, presets, and the user's own TOML.

Ranks are numbered node by node: ranks 0 … ``devices_per_node - 1`` share the first node. Presets are data
files, ``cost_models/data/*.toml``; a user's file looks the same, and ``str(cluster)`` writes one. Rates are what
data sheets promise, and fractions beside them what programs get of that; a measured file has the rates that were
measured, and no fractions.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from difflib import get_close_matches
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Final, TypeVar

from autopar.errors import ClusterError

KINDS: Final = ("cuda", "cpu")
DTYPES: Final = ("float64", "float32", "bfloat16", "float16", "float8_e4m3fn")


@dataclass(frozen=True)
class Text:
    """What a text of a cluster may be: one ``among`` these, or any."""

    among: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " or ".join(map(repr, self.among)) or "a text"

    def allows(self, value: object) -> bool:
        return isinstance(value, str) and (not self.among or value in self.among)


@dataclass(frozen=True)
class Figure:
    """What a number of a cluster may be: its unit, its bounds (both allowed), and one that makes sense."""

    unit: str
    low: float
    high: float
    example: str
    whole: bool = False

    def __str__(self) -> str:
        kind = "a whole number" if self.whole else "a number"
        return f"{kind} of {self.unit} from {self.low:g} to {self.high:g}, for example {self.example}"

    def allows(self, value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, int if self.whole else int | float):
            return False
        return self.low <= value <= self.high  # false for NaN


KEYS: Final[Mapping[str, Text | Figure]] = {
    "name": Text(),
    "kind": Text(KINDS),
    "sources": Text(),
    "devices_per_node": Figure("devices", 1, 1e6, "8", whole=True),
    "memory_bytes": Figure("bytes", 1e6, 1e18, "80e9", whole=True),
    "host_memory_bytes": Figure("bytes", 0, 1e18, "250e9", whole=True),
    "host_bytes_per_second": Figure("bytes/s", 0, 1e18, "64e9"),
    "host_duplex_bytes_per_second": Figure("bytes/s", 0, 1e18, "42e9"),
    "host_memory_bytes_per_second": Figure("bytes/s", 0, 1e18, "76.8e9"),
    "flops_per_second": Figure("FLOP/s", 1, 1e18, "989.4e12"),
    "memory_bytes_per_second": Figure("bytes/s", 1, 1e18, "3.35e12"),
    "launch_seconds": Figure("seconds", 0, 1, "2e-6"),
    "host_call_seconds": Figure("seconds", 0, 1, "2e-5"),
    "achievable_fraction": Figure("peak rates", 0.001, 1, "0.8"),
    "achievable_fraction_by_dtype": Figure("peak rates", 0.001, 1, "0.7"),
    "memory_achievable_fraction": Figure("memory bandwidths", 0.001, 1, "0.9"),
    "sustained_fraction": Figure("rates of short runs", 0.001, 1, "0.92"),
    "multiprocessors": Figure("multiprocessors", 0, 1e6, "132", whole=True),
    "element_seconds": Figure("seconds", 0, 1e-6, "1e-12"),
    "ramp_seconds": Figure("seconds", 0, 1, "4e-6"),
    "ramp_seconds_by_dtype": Figure("seconds", 0, 1, "8e-6"),
    "latency_seconds": Figure("seconds", 0, 1, "2e-6"),
    "bytes_per_second": Figure("bytes/s", 1, 1e18, "450e9"),
    "peer_bytes_per_second": Figure("bytes/s", 0, 1e18, "64e9"),
    "call_seconds": Figure("seconds", 0, 1, "1e-5"),
    "held_multiprocessors": Figure("multiprocessors", 0, 1e6, "16", whole=True),
}
BY_DTYPE: Final = ("flops_per_second", "achievable_fraction_by_dtype", "ramp_seconds_by_dtype")
TABLES: Final = (*BY_DTYPE, "sources")  # name -> what KEYS says


@dataclass(frozen=True)
class Device:
    """One accelerator, or one core of a CPU: what a single rank has to itself. Raises ClusterError."""

    name: str
    kind: str
    """Either "cuda" or "cpu"."""
    memory_bytes: int
    flops_per_second: Mapping[str, float] = field(hash=False)
    """Peak rate of matrix products by the name of the operands' dtype."""
    memory_bytes_per_second: float
    launch_seconds: float
    """What an op takes beyond its work."""
    achievable_fraction: float
    """The share of ``flops_per_second`` that the largest matrix products reach."""
    ramp_seconds: float
    """How long a matrix product that reaches half of that share would take at the full rate."""
    host_memory_bytes: int = 0
    """Its share of the memory of the machine that it is in; 0: nothing can be offloaded."""
    host_bytes_per_second: float = 0.0
    """Of copies between the two, in one direction."""
    host_duplex_bytes_per_second: float = 0.0
    """Of the same in each direction, while as many go in the other one. 0: not known, as where nothing does."""
    host_memory_bytes_per_second: float = 0.0
    """What the host's processors reach of its memory's bandwidth, this device's share: what is offloaded is updated and
    cast there, and copies go through it. 0: not known; updates are reckoned as on the device, casts as free, and copies
    as not held up."""
    memory_achievable_fraction: float = 1.0
    """The share of ``memory_bytes_per_second`` that large copies reach."""
    sustained_fraction: float = 1.0
    """The share of what large products reach for a moment that they hold in a step, at the limit of power."""
    multiprocessors: int = 0
    """Each makes a tile of a product's result at a time; 0: results don't come in tiles."""
    element_seconds: float = 0.0
    """What an element takes beside its bytes in kernels that load one at a time."""
    host_call_seconds: float = 0.0
    """What the host takes to issue an op of a program, or a gradient that a backward makes. 0: whoever computes them
    issues them, or it is not known."""
    achievable_fraction_by_dtype: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Of dtypes for which it is another one than ``achievable_fraction``."""
    ramp_seconds_by_dtype: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Of dtypes for which it is another one than ``ramp_seconds``."""

    def __post_init__(self) -> None:
        _check(self)
        if not self.flops_per_second:
            raise ClusterError(f"flops_per_second is empty; give a figure for any of {', '.join(DTYPES)}")
        _refuse_unknown("flops_per_second.", self.flops_per_second, DTYPES)
        for table in BY_DTYPE:
            _refuse_unknown(f"{table}.", getattr(self, table), self.flops_per_second)
        if self.host_memory_bytes_per_second > self.achievable_memory_bytes_per_second:
            raise ClusterError(
                f"host_memory_bytes_per_second is {self.host_memory_bytes_per_second:g}, more than programs reach of "
                f"the device's own memory, {self.achievable_memory_bytes_per_second:g}; give this device's share of it"
            )

    def rate(self, dtype: str) -> float:
        """Peak FLOP/s of matrix products of ``dtype``, such as "bfloat16". Raises ClusterError."""
        if dtype not in self.flops_per_second:
            known = ", ".join(self.flops_per_second)
            raise ClusterError(f"device {self.name!r} has no flops_per_second for {dtype}, only for {known}")
        return self.flops_per_second[dtype]

    def fraction(self, dtype: str) -> float:
        """The share of :meth:`rate` that the largest matrix products of ``dtype`` reach."""
        return self.achievable_fraction_by_dtype.get(dtype, self.achievable_fraction)

    def ramp(self, dtype: str) -> float:
        """``ramp_seconds`` of matrix products of ``dtype``."""
        return self.ramp_seconds_by_dtype.get(dtype, self.ramp_seconds)

    @property
    def achievable_memory_bytes_per_second(self) -> float:
        """What large copies reach, read and written bytes counted."""
        return self.memory_bytes_per_second * self.memory_achievable_fraction

    def update_bytes_per_second(self, *, on_host: bool) -> float:
        """At which optimizers read and write, where what they update lies ``on_host`` or on the device."""
        return (on_host and self.host_memory_bytes_per_second) or self.achievable_memory_bytes_per_second

    def swap_bytes_per_second(self, *, both_ways: bool) -> float:
        """Of activations to the host or from it, each way, where they may go ``both_ways`` at once: all of that goes
        through this device's share of the host's memory bandwidth."""
        rate = (both_ways and self.host_duplex_bytes_per_second) or self.host_bytes_per_second
        return min(rate, self.host_memory_bytes_per_second / (1 + both_ways) or rate)

    def held_share(self, link: Link) -> float:
        """The share of its multiprocessors that a collective over ``link`` holds while it runs, below 1; 0 where their
        number isn't known."""
        return link.held_multiprocessors / self.multiprocessors if self.multiprocessors else 0.0


@dataclass(frozen=True)
class Link:
    """How a device reaches others: latency of a message, bytes/s in one direction. Raises ClusterError."""

    name: str
    latency_seconds: float
    bytes_per_second: float
    """Of a device to all others together."""
    achievable_fraction: float = 1.0
    """The share of ``bytes_per_second`` that collectives of large tensors reach."""
    peer_bytes_per_second: float = 0.0
    """Of a device to one other, where each pair has a wire of its own; 0: the same as to all others together."""
    call_seconds: float = 0.0
    """What a collective takes beyond its messages."""
    held_multiprocessors: int = 0
    """Of a device, those that the kernel of a collective has to itself while it runs (NCCL's channels): what is
    computed beside it has the others. Between nodes: for each of a group's ranks in a node, thus for each of their
    network cards, up to those within a node. 0: none."""

    def __post_init__(self) -> None:
        _check(self)

    def achievable_bytes_per_second(self, size: int) -> float:
        """What large collectives of groups of ``size`` ranks (2 for a message) reach, per rank and direction."""
        wires = (size - 1) * self.peer_bytes_per_second or self.bytes_per_second
        return self.achievable_fraction * min(self.bytes_per_second, wires)

    def ring_bytes_per_second(self, size: int) -> float:
        """The same of collectives whose messages go round a ring."""
        return self.achievable_bytes_per_second(size)

    def exchange_bytes_per_second(self, size: int) -> float:
        """The same of an all-to-all."""
        return self.achievable_bytes_per_second(size)

    def exchange_latency_seconds(self, size: int) -> float:
        """Of a message of an all-to-all, on the average."""
        return self.latency_seconds


@dataclass(frozen=True)
class Crossing(Link):
    """Between nodes, of a group with ``local`` ranks in each: as many rings as that, each through another one's network
    card, move ``ring_limit`` bytes/s together, where messages to any rank have one card (hierarchical rings: NCCL's
    channels). ``latency_seconds`` is that of a hop of such a ring, on the average, ``held_multiprocessors`` for all."""

    ring_limit: float = 0.0
    local: int = 1
    local_limit: float = math.inf
    far_limit: float = math.inf
    """What a rank reaches among those in its node, and beside that to other nodes."""
    near_latency_seconds: float = 0.0
    far_latency_seconds: float = 0.0
    """Of a message within a node, and of one between two."""

    def ring_bytes_per_second(self, size: int) -> float:
        return self.ring_limit if self.local > 1 else super().ring_bytes_per_second(size)

    def exchange_bytes_per_second(self, size: int) -> float:
        if self.local == 1:
            return super().exchange_bytes_per_second(size)
        leaves = self.far_limit * (size - 1) / (size - self.local)
        return min(leaves, self.local_limit * (size - 1) / (self.local - 1))

    def exchange_latency_seconds(self, size: int) -> float:
        near, far = (self.local - 1) * self.near_latency_seconds, (size - self.local) * self.far_latency_seconds
        return (near + far) / (size - 1)


@dataclass(frozen=True)
class Cluster:
    """Equal nodes of equal devices. ``str`` and :meth:`parse` are inverses; both speak TOML.

    ``sources`` says where figures come from, by their dotted key; it doesn't take part in comparisons.
    """

    name: str
    devices_per_node: int
    device: Device
    intra_node: Link
    inter_node: Link
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        _check(self)
        held = max(self.intra_node.held_multiprocessors, self._held_across(self.devices_per_node))
        if 0 < self.device.multiprocessors <= held:
            raise ClusterError(
                f"held_multiprocessors of a link are {held}, but the device has {self.device.multiprocessors} "
                "multiprocessors, of which collectives leave some; give fewer"
            )

    @classmethod
    def load(cls, name_or_path: str | Path) -> Cluster:
        """A preset by its name (see :func:`presets`), or the TOML file at a path. Raises ClusterError.

        Files describe machines that exist, so figures that contradict each other are refused here; in code one may
        well ask what a faster network would bring.
        """
        if not isinstance(name_or_path, str | Path):
            raise ClusterError(f"a cluster is a preset's name or the path of a TOML file, not {name_or_path!r}; {_ONE}")
        if name_or_path in presets():
            text, origin = (_data() / f"{name_or_path}.toml").read_text(encoding="utf-8"), f"preset {name_or_path}"
        else:
            text, origin = _read(Path(name_or_path)), f"file {name_or_path}"
        cluster = cls.parse(text, f"cluster {origin}")
        for complaint in _contradictions(cluster):
            raise ClusterError(f"cluster {origin}: {complaint}")
        return cluster

    @classmethod
    def parse(cls, text: str, origin: str = "cluster") -> Cluster:
        """The cluster that TOML ``text`` describes. Raises ClusterError, which begins with ``origin``."""
        try:
            table = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ClusterError(f"{origin} is not TOML: {error}") from error
        if not table:
            raise ClusterError(f"{origin} is empty; {_START}")
        try:
            _refuse_several(table)
            for key, kind in _PARTS.items():
                if key in table:
                    table[key] = _build(kind, table[key], f"{key}.")
            return _build(cls, table)
        except ClusterError as error:
            raise ClusterError(f"{origin}: {error}") from None

    def __str__(self) -> str:
        lines = [f"name = {_toml(self.name)}", f"devices_per_node = {self.devices_per_node}"]
        for part in _PARTS:
            lines += _table(part, _given(getattr(self, part)))
        if self.sources:
            lines += _table("sources", self.sources)
        return "\n".join(lines) + "\n"

    def link(self, size: int, stride: int, world: int | None = None) -> Link:
        """The slowest link that groups of ``size`` ranks, ``stride`` ranks apart, cross.

        A job of ``world`` ranks is a row of blocks of ``size * stride`` ranks; not given, it is one block.
        Where blocks don't fill nodes evenly, the first may lie inside a node and a later one across two.
        """
        block = size * stride
        even = self.devices_per_node % block == 0 or (world or block) <= self.devices_per_node
        if size == 1 or (even and block <= self.devices_per_node):
            return self.intra_node
        if stride >= self.devices_per_node:  # no two ranks of a group share a node
            return self._crossing(self.inter_node, 1)
        slower = min(self.inter_node, self.intra_node, key=lambda link: link.achievable_bytes_per_second(size))
        local, left = divmod(self.devices_per_node, stride)
        return self._crossing(slower, 1 if left or size % local else local)

    def _crossing(self, slower: Link, local: int) -> Crossing:
        """Of a group that fills nodes with ``local`` ranks in each; else 1: of one card, and the ``slower`` link."""
        inside, outside = self.intra_node, self.inter_node
        hop = ((local - 1) * inside.latency_seconds + outside.latency_seconds) / local
        near = inside.achievable_bytes_per_second(local) if local > 1 else math.inf
        far = outside.achievable_bytes_per_second(2)
        own = {"latency_seconds": hop, "held_multiprocessors": self._held_across(local)}
        return Crossing(
            **{**{item.name: getattr(slower, item.name) for item in fields(Link)}, **own},
            ring_limit=min(near, local * far),
            local=local,
            local_limit=near,
            far_limit=far,
            near_latency_seconds=inside.latency_seconds,
            far_latency_seconds=outside.latency_seconds,
        )

    def _held_across(self, local: int) -> int:
        """Multiprocessors that a collective between nodes holds on a device, with ``local`` ranks in each node."""
        held = local * self.inter_node.held_multiprocessors
        return min(held, self.intra_node.held_multiprocessors or held)


def presets() -> tuple[str, ...]:
    """The names that :meth:`Cluster.load` knows."""
    files = (Path(file.name) for file in _data().iterdir())
    return tuple(sorted(file.stem for file in files if file.suffix == ".toml"))


def _data() -> Traversable:
    return resources.files("autopar.cost_models") / "data"


_START: Final = "start from a preset, print(autopar.Cluster.load('h100')), or measure this machine: autopar calibrate"


def _read(path: Path) -> str:
    try:
        if path.is_file():
            return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # the latter of text that isn't UTF-8
        raise ClusterError(f"cluster file {path} can't be read: {error}") from error
    raise ClusterError(
        f"there is no cluster {str(path)!r}{_meant(str(path), presets())}: presets are {', '.join(presets())}, "
        "and anything else must be the path of a TOML file"
    )


# Reading: TOML tables become dataclasses, which check themselves.

Part = TypeVar("Part", bound=Device | Link | Cluster)

_PARTS: Final[Mapping[str, type[Device] | type[Link]]] = {
    "device": Device,
    "intra_node": Link,
    "inter_node": Link,
}


def _build(kind: type[Part], table: Any, prefix: str = "") -> Part:
    """A ``kind`` from a table of TOML. Raises ClusterError, which begins with the dotted key."""
    if not isinstance(table, dict):
        raise ClusterError(f"{prefix.rstrip('.')} is {table!r}, but must be a table")
    known = [item.name for item in fields(kind)]
    _refuse_unknown(prefix, table, known)
    for key, item in zip(known, fields(kind), strict=True):
        if key not in table and _default(item) is MISSING:
            wanted = KEYS[key] if key in KEYS and key not in TABLES else f"a table [{prefix}{key}]"
            raise ClusterError(f"{prefix}{key} is missing; give {wanted}")
    try:
        return kind(**{key: _whole(key, value) for key, value in table.items()})
    except ClusterError as error:
        raise ClusterError(f"{prefix}{error}") from None


def _default(item: Field[Any]) -> Any:
    return item.default_factory() if item.default_factory is not MISSING else item.default


def _whole(key: str, value: Any) -> Any:
    """80e9 is a float in TOML; a number of bytes is whole."""
    kind = KEYS.get(key)
    counts = isinstance(kind, Figure) and kind.whole and isinstance(value, float) and value.is_integer()
    return int(value) if counts else value


def _check(part: Device | Link | Cluster) -> None:
    """Every value is what :data:`KEYS` says. Raises ClusterError, which begins with the key."""
    for key, name, value in _entries(part):
        if key in KEYS and not KEYS[key].allows(value):
            raise ClusterError(f"{name} is {value!r}, but must be {KEYS[key]}")


def _entries(part: Device | Link | Cluster) -> Iterator[tuple[str, str, Any]]:
    """``(key, dotted name, value)`` of each value, tables opened."""
    for key, value in vars(part).items():
        if key not in TABLES:
            yield key, key, value
        elif isinstance(value, Mapping):
            yield from ((key, f"{key}.{name}", entry) for name, entry in value.items())
        else:
            raise ClusterError(f"{key} is {value!r}, but must be a table")


def _refuse_unknown(prefix: str, given: Iterable[str], known: Iterable[str]) -> None:
    for key in given:
        if key not in known:
            meant = _meant(key, known)
            raise ClusterError(f"{prefix}{key} is unknown{meant}; what may stand there is {', '.join(known)}")


def _meant(given: str, known: Iterable[str]) -> str:
    close = get_close_matches(given.lower(), list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


_ONE: Final = (
    "plans are for equal nodes of equal devices: give one file for each kind, with one [device] table, and plan on each"
)


def _refuse_several(table: Mapping[str, Any]) -> None:
    """One cluster, one kind of device and of node. Raises ClusterError."""
    for key in ("device", "devices", "node", "nodes"):
        if isinstance(table.get(key), list):
            raise ClusterError(f"{key} is a list of {len(table[key])}; {_ONE}")


_SMALLEST: Final = 1e5
"""No link, memory or device is as slow, so that what is below was given in giga or tera."""


def _of_host(device: Device) -> dict[str, float]:
    """Rates of the host's that are known."""
    names = ("host_bytes_per_second", "host_duplex_bytes_per_second", "host_memory_bytes_per_second")
    return {f"device.{name}": rate for name in names if (rate := getattr(device, name))}


def _contradictions(cluster: Cluster) -> Iterator[str]:
    """What can't be true of a machine."""
    device, links = cluster.device, {part: getattr(cluster, part) for part in ("intra_node", "inter_node")}
    memory = device.memory_bytes_per_second
    rates = {f"device.flops_per_second.{dtype}": rate for dtype, rate in device.flops_per_second.items()}
    through_memory = {f"{part}.bytes_per_second": link.bytes_per_second for part, link in links.items()}
    rates_of_bytes = {"device.memory_bytes_per_second": memory, **through_memory, **_of_host(device)}
    for name, rate in {**rates, **rates_of_bytes}.items():
        if rate < _SMALLEST:
            unit = "FLOP/s" if name in rates else "bytes/s"
            yield f"{name} is {rate:g}, which is no device's; it is a number of {unit}: {rate:g}e9, or {rate:g}e12?"
    if device.host_bytes_per_second:
        through_memory["device.host_bytes_per_second"] = device.host_bytes_per_second
    for name, rate in through_memory.items():
        if rate > memory:
            yield (
                f"{name} is {rate:g}, more than device.memory_bytes_per_second, {memory:g}, but a device reads from "
                "its memory what it sends; both are bytes (not bits) per second"
            )
    for part, link in links.items():
        if link.peer_bytes_per_second > link.bytes_per_second:
            yield (
                f"{part}.peer_bytes_per_second is {link.peer_bytes_per_second:g}, more than bytes_per_second, "
                f"{link.bytes_per_second:g}, which is to all others together"
            )
    if device.host_duplex_bytes_per_second > device.host_bytes_per_second:
        yield (
            f"device.host_duplex_bytes_per_second is {device.host_duplex_bytes_per_second:g}, more than "
            f"host_bytes_per_second, {device.host_bytes_per_second:g}, which copies reach where nothing goes the other "
            "way; the former is of each direction, not of both together"
        )
    if device.host_memory_bytes and not device.host_bytes_per_second:
        yield (
            f"device.host_memory_bytes is {device.host_memory_bytes:g}, but there is no host_bytes_per_second: give "
            "what copies reach in one direction, or leave out both if nothing is to be offloaded"
        )


# Writing.


def _given(part: Device | Link) -> dict[str, Any]:
    """What a file must say of it: all that isn't a default."""
    values = {item.name: (getattr(part, item.name), _default(item)) for item in fields(part)}
    return {name: value for name, (value, default) in values.items() if value != default}


def _table(name: str, values: Mapping[str, Any]) -> Iterator[str]:
    """Lines of TOML; a table inside comes after the pairs, as TOML wants it."""
    yield from ("", f"[{name}]")
    inner = {key: value for key, value in values.items() if isinstance(value, Mapping)}
    for key, value in values.items():
        if key not in inner:
            yield f"{key if key.isidentifier() else _toml(key)} = {_toml(value)}"
    for key, value in inner.items():
        yield from _table(f"{name}.{key}", value)


def _toml(value: str | float) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    short = f"{value:g}"
    return short if float(short) == value else repr(value)
