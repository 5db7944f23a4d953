"""The architecture as a table: who may import whom, who may touch what of torch, how long things may get."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SHIPPED = ("autopar", "passes", "cost_models")
ALL = (*SHIPPED, "tests", "examples", "benchmarks")

VALUES = {
    "errors",
    "options",
    "compression",
    "node_rows",
    "spmd",
    "mesh",
    "cluster",
    "graph",
    "pieces",
    "plan",
    "batch",
}
PLANNING = VALUES | {"rules", "cost_models", "passes", "schedules", "planner"}
RUNNING = {"errors", "options", "compression", "node_rows", "spmd", "mesh", "plan", "batch", "schedules"}
BELOW_API = PLANNING | {
    "storages",
    "documents",
    "capture",
    "expert_capture",
    "function_capture",
    "loop_capture",
    "region_capture",
    "row_capture",
    "state_capture",
    "value_capture",
    "source_lines",
    "codegen",
    "recipe",
    "runtime",
    "simulate",
    "report",
}

# Each module or package directly under autopar, and what it may import of the others.
ARROWS: dict[str, set[str]] = {
    "errors": set(),
    "compression": set(),
    "node_rows": set(),
    "options": {"errors"},
    "spmd": {"errors"},
    "shapes": {"errors"},
    "storages": {"shapes"},
    "mesh": {"errors"},
    "cluster": {"errors", "mesh"},
    "graph": {"errors", "spmd"},
    "pieces": {"graph"},
    "plan": {"errors", "options", "spmd", "mesh", "cluster"},
    "batch": {"errors"},
    "documents": {"errors"},
    "source_lines": set(),
    "liveness": {"errors", "graph", "source_lines"},
    "expert_capture": {"errors", "source_lines"},
    "loop_capture": {"errors"},
    "quick_export": set(),
    "region_capture": {"graph"},
    "row_capture": {"errors"},
    "ctc_loss": {"errors", "source_lines"},
    "state_capture": {"errors", "graph", "value_capture"},
    "value_capture": {"errors", "graph", "liveness", "source_lines"},
    "function_capture": {"ctc_loss", "errors", "source_lines"},
    "capture": {
        "errors",
        "graph",
        "batch",
        "documents",
        "expert_capture",
        "function_capture",
        "liveness",
        "quick_export",
        "loop_capture",
        "region_capture",
        "row_capture",
        "source_lines",
        "state_capture",
        "value_capture",
    },
    "rules": VALUES,
    "cost_models": VALUES,
    "passes": VALUES
    | {
        "capture",
        "expert_capture",
        "function_capture",
        "liveness",
        "loop_capture",
        "row_capture",
        "state_capture",
        "value_capture",
        "rules",
        "cost_models",
    },  # of capture, the graph that the first pass takes
    "schedules": VALUES | {"cost_models"},
    "planner": (PLANNING - {"planner"}) | {"storages"},
    "codegen": PLANNING | {"runtime"},  # the values that an emitted program ends with
    "recipe": {"errors"},
    "runtime": RUNNING | {"recipe", "storages"},
    "simulate": RUNNING | {"rules", "runtime", "shapes", "storages"},
    "audit": VALUES | {"rules", "cost_models", "schedules", "planner", "runtime", "shapes", "simulate", "storages"},
    "divergence": BELOW_API,
    "verification": BELOW_API | {"divergence"},
    "write": BELOW_API,
    "model_names": BELOW_API,
    "report": VALUES | {"cost_models", "schedules", "runtime", "simulate", "storages"},
    "preparation": VALUES | {"capture", "passes"},
    "programs": {"codegen", "planner", "runtime"},
    "search": PLANNING | {"report"},  # of the report, what it says while it searches
    "api": BELOW_API | {"audit", "preparation", "programs", "search", "verification", "write"},
    "autopar": BELOW_API | {"api", "preparation", "verification"},  # autopar/__init__.py, the public names
    "calibrate": {"errors", "mesh", "cluster", "cost_models", "runtime", "schedules"},
    "command_options": {"errors", "options", "cluster", "plan", "api", "model_names", "report"},
    "cli": BELOW_API | {"api", "autopar", "calibrate", "command_options", "write"},
    "__main__": {"cli"},
}

# The only files that may use names of torch that begin with an underscore, and which of them.
PRIVATE_TORCH = {
    "autopar/function_capture.py": "torch._C.DisableTorchFunction",  # has no public name
    "autopar/planner/saved_by_op.py": "torch._subclasses.fake_tensor.",  # runs ops on shapes alone
    "autopar/quick_export.py": "torch.fx._lazy_graph_module.",  # export has no option for what it does otherwise
    "autopar/row_capture.py": "torch._check",  # the documented way to say what is known of a size in an export
    "autopar/graph.py": "torch._ops.OpOverload",  # the type of an ATen op has no public name
    "autopar/runtime/recomputation.py": "torch._C._current_graph_task_id",  # as torch.utils.checkpoint asks it
    "autopar/simulate/torch_private.py": "torch.",
    "autopar/shapes.py": "torch.",  # what operations make of tensors without values
    "autopar/storages.py": "torch.",  # sees what operations make, fake tensors among it
    "autopar/value_capture.py": "torch.",  # computes apart from the trace
    "autopar/recipe/trace.py": "torch.utils._python_dispatch.TorchDispatchMode",  # sees in-place ops on meta tensors
}

# The only places that may call collectives of torch.distributed.
COLLECTIVE_CALLERS = ("autopar/runtime/collectives.py", "autopar/simulate/")
COLLECTIVES = {
    *("all_reduce", "all_reduce_coalesced", "reduce", "broadcast", "broadcast_object_list"),
    *("all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object"),
    *("gather", "gather_object", "scatter", "scatter_object_list"),
    *("reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single"),
    *("all_gather_single", "reduce_scatter_single"),
    *("send", "recv", "isend", "irecv", "send_object_list", "recv_object_list", "P2POp", "batch_isend_irecv"),
    *("barrier", "monitored_barrier"),
}

FILE_LINES = 600
FUNCTION_LINES = 60


@dataclass(frozen=True)
class Source:
    """One Python file: its path from the root, and its text."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    @property
    def lines(self) -> int:
        return len(self.text.splitlines())

    @property
    def module(self) -> tuple[str, ...]:
        """The installed dotted name in parts: passes/fold.py is autopar.passes.fold."""
        parts = Path(self.path).with_suffix("").parts
        parts = parts if parts[0] == "autopar" else ("autopar", *parts)
        return parts[:-1] if parts[-1] == "__init__" else parts

    @property
    def unit(self) -> str:
        """The row of ARROWS that this file belongs to."""
        return self.module[1] if len(self.module) > 1 else "autopar"


@cache
def sources(folders: tuple[str, ...] = SHIPPED) -> list[Source]:
    """Every Python file of the folders (autopar/passes and autopar/cost_models are symlinks)."""
    paths = sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    linked = (ROOT / "autopar/passes", ROOT / "autopar/cost_models")
    return [read(path) for path in paths if not any(path.is_relative_to(link) for link in linked)]


@cache
def read(path: Path) -> Source:
    return Source(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))


def imports(source: Source) -> Iterator[tuple[int, str, str]]:
    """``(line, full name, name it is bound to)`` for every import, wherever in the file it stands."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                bound = alias.asname or alias.name.partition(".")[0]
                yield node.lineno, alias.name, bound
        elif isinstance(node, ast.ImportFrom):
            base = [node.module] if node.module else []
            if node.level:
                package = source.module if source.path.endswith("__init__.py") else source.module[:-1]
                base = [*package[: len(package) - node.level + 1], *base]
            for alias in node.names:
                yield node.lineno, ".".join([*base, alias.name]), alias.asname or alias.name


def uses(source: Source) -> Iterator[tuple[int, str]]:
    """``(line, full name)`` for every import, and every dotted name that begins with something imported."""
    names = {}
    for line, name, bound in imports(source):
        yield line, name
        names[bound] = name if bound != name.partition(".")[0] else bound
    attributes = [node for node in ast.walk(source.tree) if isinstance(node, ast.Attribute)]
    inner = {id(node.value) for node in attributes}
    for node in attributes:
        root, _, rest = ast.unparse(node).partition(".")
        if id(node) not in inner and root in names:
            yield node.lineno, f"{names[root]}.{rest}"


def wrong_arrows(source: Source) -> list[str]:
    found = []
    for line, name, _ in imports(source):
        first, *rest = name.split(".")
        if first != "autopar":
            continue
        target = rest[0] if rest and rest[0] in ARROWS else "autopar"
        if target != source.unit and target not in ARROWS[source.unit]:
            found.append(f"{source.path}:{line} {source.unit} must not import {name}")
    return found


def private_names(source: Source) -> list[tuple[int, str]]:
    """Uses of underscore names of torch; operator names (torch.ops) and dunders are public."""
    return [
        (line, name)
        for line, name in uses(source)
        if name.startswith("torch.") and not name.startswith("torch.ops.")
        if any(part.startswith("_") and not part.startswith("__") for part in name.split("."))
    ]


def private_torch(source: Source) -> list[str]:
    allowed = PRIVATE_TORCH.get(source.path)
    return [
        f"{source.path}:{line} {name} is private to torch"
        for line, name in private_names(source)
        if allowed is None or not name.startswith(allowed)
    ]


def stray_collectives(source: Source) -> list[str]:
    if source.path.startswith(COLLECTIVE_CALLERS):
        return []
    return [
        f"{source.path}:{line} {name} belongs in autopar/runtime/collectives.py"
        for line, name in uses(source)
        if name.startswith(("torch.ops._c10d", "torch.ops.c10d"))
        or (name.startswith("torch.distributed.") and name.rpartition(".")[2] in COLLECTIVES)
    ]


def long_functions(source: Source) -> list[str]:
    found = []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES:
                found.append(f"{source.path}:{node.lineno} {node.name} has {length} lines")
    return found


def long_files(source: Source) -> list[str]:
    return [f"{source.path}:{source.lines} lines"] if source.lines > FILE_LINES else []


def check(found: list[str], rule: str) -> None:
    if found:
        pytest.fail("\n".join([rule, *found]), pytrace=False)


def test_arrows_have_no_cycle() -> None:
    assert next(iter(TopologicalSorter(ARROWS).static_order())) == "errors"


def test_every_module_has_its_row() -> None:
    rowless = [f"{source.path}:1" for source in sources() if source.unit not in ARROWS]
    check(rowless, "tests/test_layers.py: ARROWS has no row for")


def test_imports_follow_the_arrows() -> None:
    found = [line for source in sources() if source.unit in ARROWS for line in wrong_arrows(source)]
    check(found, "imports against the arrows (tests/test_layers.py: ARROWS)")


def test_private_torch_only_where_listed() -> None:
    check(
        [line for source in sources() for line in private_torch(source)],
        "private names of torch that PRIVATE_TORCH does not list",
    )


def test_the_list_of_private_torch_is_not_longer_than_needed() -> None:
    used = {(source.path, name) for source in sources() for _, name in private_names(source)}
    unused = [
        f"{path} {allowed}"
        for path, allowed in PRIVATE_TORCH.items()
        if not any(user == path and name.startswith(allowed) for user, name in used)
    ]
    check(unused, "listed in PRIVATE_TORCH, but not used")


def test_only_collectives_py_calls_collectives() -> None:
    check(
        [line for source in sources() for line in stray_collectives(source)],
        "collectives of torch.distributed outside of the one module that owns them",
    )


def test_files_are_short() -> None:
    check([line for source in sources(ALL) for line in long_files(source)], f"files over {FILE_LINES} lines")


def test_functions_are_short() -> None:
    check(
        [line for source in sources(ALL) for line in long_functions(source)],
        f"functions over {FUNCTION_LINES} lines",
    )


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("autopar/spmd.py", "import autopar.mesh"),
        ("autopar/rules/spec.py", "from autopar import planner"),
        ("autopar/rules/spec.py", "import autopar"),
        ("autopar/rules/spec.py", "from autopar import compile"),
        ("autopar/schedules/gpipe.py", "def f():\n    from autopar.planner.stages import cut"),
        ("autopar/schedules/gpipe.py", "from ..planner.stages import cut"),
        ("autopar/runtime/__init__.py", "from ..codegen import emit"),
        ("passes/fold.py", "from autopar.planner import sharding"),
        ("cost_models/step.py", "from autopar.passes import fold"),
    ],
)
def test_an_import_against_the_arrows_is_found(path: str, text: str) -> None:
    assert len(wrong_arrows(Source(path, text))) == 1


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("autopar/spmd.py", "import torch, re\nfrom autopar.errors import ArgumentError"),
        ("autopar/rules/spec.py", "from autopar.rules import base\nfrom . import base\nfrom .base import Op"),
        ("passes/fold.py", "from autopar.rules.base import Op\nfrom autopar.passes import base"),
        ("autopar/cli.py", "import autopar\nfrom autopar import planner, compile"),
    ],
)
def test_an_import_along_the_arrows_passes(path: str, text: str) -> None:
    assert wrong_arrows(Source(path, text)) == []


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("import torch._dynamo", "torch._dynamo"),
        ("from torch._C import Graph", "torch._C.Graph"),
        ("from torch import _C as core", "torch._C"),
        ("import torch\ntorch.utils._pytree.tree_map(f, x)", "torch.utils._pytree.tree_map"),
        ("import torch.distributed as dist\ndist._world", "torch.distributed._world"),
        ("from torch import nn\nclass A(nn.modules._X): ...", "torch.nn.modules._X"),
    ],
)
def test_a_private_name_of_torch_is_found(text: str, name: str) -> None:
    found = private_torch(Source("autopar/codegen/emit.py", text))
    assert len(found) == 1
    assert f" {name} " in found[0]


@pytest.mark.parametrize(
    "text",
    [
        "import torch\ntorch.ops.aten._grouped_mm.default\ntorch.__version__",
        "import _thread\n_thread.x\nself._torch._C",
        "from torch import fx\nfx.Graph().nodes",
    ],
)
def test_public_names_of_torch_pass(text: str) -> None:
    assert private_torch(Source("autopar/codegen/emit.py", text)) == []


@pytest.mark.parametrize(
    "text",
    [
        "import torch.distributed as dist\ndist.all_reduce(x)",
        "import torch\ntorch.distributed.barrier()",
        "from torch import distributed\nop = distributed.P2POp",
        "from torch.distributed import all_gather_into_tensor",
        "import torch\ntorch.ops._c10d_functional.all_reduce(x, 'sum', '')",
    ],
)
def test_a_stray_collective_is_found(text: str) -> None:
    assert len(stray_collectives(Source("autopar/runtime/grads.py", text))) == 1
    assert stray_collectives(Source("autopar/runtime/collectives.py", text)) == []


def test_our_own_collectives_are_none_of_torch() -> None:
    text = "import torch.distributed as dist\nfrom autopar.runtime import collectives\n"
    text += "collectives.all_reduce(x)\ndist.init_process_group()\nqueue.send(x)"
    assert stray_collectives(Source("autopar/runtime/grads.py", text)) == []


def test_lengths_are_found() -> None:
    body = "    pass\n" * FUNCTION_LINES
    source = Source("passes/long.py", f"def f():\n{body}" + "\n" * FILE_LINES)
    assert long_functions(source) == [f"passes/long.py:1 f has {FUNCTION_LINES + 1} lines"]
    assert len(long_files(source)) == 1
