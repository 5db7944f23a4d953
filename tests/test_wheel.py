"""The wheel, built from the sdist and installed alone: every module imports, and all is under autopar."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = ("autopar", "passes", "cost_models", "pyproject.toml", "README.md", "LICENSE")
IGNORED = shutil.ignore_patterns("__pycache__", "*.pyc", "*.egg-info")

IMPORT_EVERYTHING = """
import importlib, pkgutil
import autopar

def stop(name):
    raise

modules = [m.name for m in pkgutil.walk_packages(autopar.__path__, "autopar.", onerror=stop)]
for name in modules:
    importlib.import_module(name)
print(autopar.__file__, *modules, sep="\\n")
"""


def run(*command: str | Path, cwd: Path) -> str:
    """The command's output; fails the test with everything it printed where it didn't succeed."""
    done = subprocess.run(command, cwd=cwd, text=True, capture_output=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def module_files() -> set[str]:
    """What a wheel must hold of Python: the path of every module under its installed name."""
    folders = {"autopar": "autopar", "passes": "autopar/passes", "cost_models": "autopar/cost_models"}
    linked = (ROOT / "autopar/passes", ROOT / "autopar/cost_models")
    return {
        f"{installed}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, installed in folders.items()
        for path in (ROOT / folder).rglob("*.py")
        if not any(path.is_relative_to(link) for link in linked)
    }


def module_name(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the sdist, and of the wheel that was built from it."""
    copy, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, symlinks=True, ignore=IGNORED)
        else:
            shutil.copy(source, copy / name)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, copy, cwd=copy)
    return out


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (path,) = dist.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a fresh environment: the wheel is its own, the dependencies are this environment's."""
    home = tmp_path_factory.mktemp("venv")
    venv.create(home, symlinks=True)
    interpreter = home / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", interpreter)
    run(*pip, "install", "--no-deps", "--no-index", wheel, cwd=home)
    site = site_packages(interpreter)
    shared = dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
    (site / "dependencies.pth").write_text("\n".join(shared) + "\n", encoding="utf-8")
    return interpreter


def site_packages(python: Path) -> Path:
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(run(python, "-c", code, cwd=python.parent).strip())


@pytest.mark.slow
def test_wheel_holds_every_module_and_data_file(wheel: Path) -> None:
    names = set(ZipFile(wheel).namelist())
    data = {f"autopar/{path.relative_to(ROOT).as_posix()}" for path in ROOT.glob("cost_models/data/*.toml")}
    assert module_files() - names == set()
    assert data | {"autopar/py.typed"} <= names
    assert {name for name in names if name.endswith(".py")} == module_files()


@pytest.mark.slow
def test_sdist_holds_files_instead_of_links(dist: Path) -> None:
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        members = {member.name.partition("/")[2]: member for member in archive.getmembers()}
    assert [name for name, member in members.items() if member.issym() or member.islnk()] == []
    assert module_files() <= set(members)


@pytest.mark.slow
def test_installed_wheel_imports_every_module(python: Path, tmp_path: Path) -> None:
    where, *names = run(python, "-I", "-c", IMPORT_EVERYTHING, cwd=tmp_path).splitlines()
    assert Path(where).is_relative_to(site_packages(python))
    assert {"autopar", *names} == {module_name(file) for file in module_files()}


@pytest.mark.slow
def test_nothing_but_autopar_lands_in_site_packages(python: Path) -> None:
    installed = {path.name.partition("-")[0] for path in site_packages(python).iterdir()}
    assert installed == {"autopar", "dependencies.pth"}


@pytest.mark.parametrize("folder", ["passes", "cost_models"])
def test_top_level_folders_refuse_their_bare_name(folder: str) -> None:
    command = (sys.executable, "-c", f"import {folder}")
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=False)
    assert done.returncode == 1
    assert f"ImportError: import autopar.{folder}" in done.stderr
