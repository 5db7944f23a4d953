"""What every test shares: golden text, one thread, one seed, and no GPU tests where CUDA is missing."""

from __future__ import annotations

import difflib
import os
import random
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest
import torch

GOLDEN = Path(__file__).parent / "golden"
CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []

hypothesis.settings.register_profile("autopar", derandomize=True, deadline=None)
hypothesis.settings.load_profile("autopar")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden with what the tests produce")


class FailuresAtOnce:
    """Names each failure when it happens: a run that is stopped has no summary."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self._config.pluginmanager.getplugin("terminalreporter")
        if report.failed and terminal is not None:
            terminal.write_line(f"\n{report.nodeid} failed:\n{report.longreprtext}")


def pytest_configure(config: pytest.Config) -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(FailuresAtOnce(config))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    left_out = [item for item in items if item.get_closest_marker("gpu")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _one_core(request: pytest.FixtureRequest, worker_id: str) -> None:
    """Where there are several workers: ranks take turns, and waking one on another core takes a quarter of the time of
    a simulation. Real processes run side by side."""
    if worker_id != "master" and CORES:
        own = CORES[int(worker_id.removeprefix("gw")) % len(CORES)]
        os.sched_setaffinity(0, CORES if request.node.get_closest_marker("gloo") else [own])


@pytest.fixture(autouse=True)
def _seed() -> None:
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """``golden(name, text)``: ``text`` equals tests/golden/<name>; ``--update-golden`` rewrites that file."""
    update = request.config.getoption("--update-golden")

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        text = text.rstrip("\n") + "\n"
        if update:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            return
        if not path.exists():
            pytest.fail(f"tests/golden/{name} doesn't exist; pytest --update-golden writes it", pytrace=False)
        expected = path.read_text(encoding="utf-8")
        if text != expected:
            lines = difflib.unified_diff(
                expected.splitlines(), text.splitlines(), f"tests/golden/{name}", "this run", lineterm=""
            )
            hint = "if the change is meant: pytest --update-golden, and review the diff"
            pytest.fail("\n".join([*lines, "", hint]), pytrace=False)

    return compare
