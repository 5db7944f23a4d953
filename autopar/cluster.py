"""What a job runs on: devices, the links between them, presets, and the user's own TOML.

Ranks are numbered node by node: ranks 0 … ``devices_per_node - 1`` share the first node. Presets are data
files, ``cost_models/data/*.toml``; a user's file looks the same, and ``str(cluster)`` writes one.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
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
    "flops_per_second": Figure("FLOP/s", 1, 1e18, "989.4e12"),
    "memory_bytes_per_second": Figure("bytes/s", 1, 1e18, "3.35e12"),
    "launch_seconds": Figure("seconds", 0, 1, "2e-6"),
    "achievable_fraction": Figure("peak rates", 0.001, 1, "0.8"),
    "ramp_seconds": Figure("seconds", 0, 1, "4e-6"),
    "latency_seconds": Figure("seconds", 0, 1, "2e-6"),
    "bytes_per_second": Figure("bytes/s", 1, 1e18, "450e9"),
}
TABLES: Final = ("flops_per_second", "sources")  # name -> what KEYS says


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

    def __post_init__(self) -> None:
        _check(self)
        if not self.flops_per_second:
            raise ClusterError(f"flops_per_second is empty; give a figure for any of {', '.join(DTYPES)}")
        _refuse_unknown("flops_per_second.", self.flops_per_second, DTYPES)

    def rate(self, dtype: str) -> float:
        """Peak FLOP/s of matrix products of ``dtype``, such as "bfloat16". Raises ClusterError."""
        if dtype not in self.flops_per_second:
            known = ", ".join(self.flops_per_second)
            raise ClusterError(f"device {self.name!r} has no flops_per_second for {dtype}, only for {known}")
        return self.flops_per_second[dtype]


@dataclass(frozen=True)
class Link:
    """How a device reaches others: latency of a message, bytes/s of one device in one direction."""

    name: str
    latency_seconds: float
    bytes_per_second: float

    def __post_init__(self) -> None:
        _check(self)


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

    @classmethod
    def load(cls, name_or_path: str | Path) -> Cluster:
        """A preset by its name (see :func:`presets`), or the TOML file at a path. Raises ClusterError."""
        if name_or_path in presets():
            text = (_data() / f"{name_or_path}.toml").read_text(encoding="utf-8")
            return cls.parse(text, f"cluster preset {name_or_path}")
        path = Path(name_or_path)
        if not path.is_file():
            raise ClusterError(
                f"there is no cluster {str(path)!r}: presets are {', '.join(presets())}, "
                "and anything else must be the path of a TOML file"
            )
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ClusterError(f"cluster file {path} can't be read: {error}") from error
        return cls.parse(text, f"cluster file {path}")

    @classmethod
    def parse(cls, text: str, origin: str = "cluster") -> Cluster:
        """The cluster that TOML ``text`` describes. Raises ClusterError, which begins with ``origin``."""
        try:
            table = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ClusterError(f"{origin} is not TOML: {error}") from error
        try:
            for key, kind in _PARTS.items():
                if key in table:
                    table[key] = _build(kind, table[key], f"{key}.")
            return _build(cls, table)
        except ClusterError as error:
            raise ClusterError(f"{origin}: {error}") from None

    def __str__(self) -> str:
        lines = [f"name = {_toml(self.name)}", f"devices_per_node = {self.devices_per_node}"]
        for part in _PARTS:
            lines += _table(part, vars(getattr(self, part)))
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
            return self.inter_node
        return min(self.inter_node, self.intra_node, key=lambda link: link.bytes_per_second)


def presets() -> tuple[str, ...]:
    """The names that :meth:`Cluster.load` knows."""
    files = (Path(file.name) for file in _data().iterdir())
    return tuple(sorted(file.stem for file in files if file.suffix == ".toml"))


def _data() -> Traversable:
    return resources.files("autopar.cost_models") / "data"


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
    optional = {"sources", *(item.name for item in fields(kind) if item.default is not MISSING)}
    _refuse_unknown(prefix, table, known)
    for key in known:
        if key not in table and key not in optional:
            wanted = KEYS[key] if key in KEYS and key not in TABLES else f"a table [{prefix}{key}]"
            raise ClusterError(f"{prefix}{key} is missing; give {wanted}")
    try:
        return kind(**{key: _whole(key, value) for key, value in table.items()})
    except ClusterError as error:
        raise ClusterError(f"{prefix}{error}") from None


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
            raise ClusterError(f"{prefix}{key} is unknown; what may stand there is {', '.join(known)}")


# Writing.


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
