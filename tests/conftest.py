"""What every test relies on: the installed package with its compiled module, and what this machine offers."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from kernels import gpu

ROOT = Path(__file__).resolve().parent.parent

# Processes that tests start must find the installed package too, and the helpers beside the tests; never the
# source tree, which has no compiled module.
os.environ["PYTHONSAFEPATH"] = "1"
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])],
)


class _SkipsWithoutHypothesis:
    """Where Hypothesis is not installed, a module that imports it is skipped, and the reason says so."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "hypothesis":
            pytest.skip("Hypothesis is not installed", allow_module_level=True)


sys.meta_path.append(_SkipsWithoutHypothesis())  # the last to be asked


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "seconds that a test may take; counts where pytest-timeout is installed")
    parser.addoption(
        "--data",
        metavar="PATH",
        type=Path,
        default=None,
        help="directory with cifar10_10k.npz and wikitext2.txt; tests that need them are skipped without it",
    )


def _import_problem() -> str | None:
    """Say why the package cannot be tested, or None. A GPU's kernels can be without the compiled module."""
    try:
        package = importlib.import_module("gradcomp")
    except ImportError as error:
        return f"gradcomp cannot be imported ({error})"
    try:
        importlib.import_module("gradcomp._native")
    except ImportError as error:
        if gpu.problem() is None:
            return None
        return f"gradcomp from {package.__path__[0]} has no working compiled module ({error})"
    return None


def pytest_sessionstart(session: pytest.Session) -> None:
    if problem := _import_problem():
        pytest.exit(f"{problem}. Tests run against the installed package: use `make test`.", returncode=3)


def pytest_report_header(config: pytest.Config) -> list[str]:
    if _import_problem():
        return []
    package = importlib.import_module("gradcomp")
    try:
        native = importlib.import_module("gradcomp._native")
        isa = native.isa() if hasattr(native, "isa") else "unknown"
    except ImportError:
        isa = "none"
    version = importlib.import_module("gradcomp.version").__version__
    return [f"gradcomp {version} from {package.__path__[0]}, native kernels: {isa}"]


# ------------------------------------------------------------------------------------------ what is here


def _network_namespaces() -> str | None:
    if os.geteuid() != 0:
        return "needs root"
    if shutil.which("ip") is None:
        return "needs iproute2"
    name = f"gradcomp-{uuid.uuid4().hex[:8]}"
    added = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if added.returncode != 0:
        return f"no network namespaces: {added.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
    return None


def _sanitizer() -> str | None:
    maps = Path("/proc/self/maps")
    loaded = maps.exists() and "libasan" in maps.read_text()
    return None if loaded else "not a sanitizer build (make sanitize)"


_REQUIREMENTS = {"gpu": gpu.problem, "network": _network_namespaces, "sanitizer": _sanitizer}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for marker, problem_of in _REQUIREMENTS.items():
        marked = [item for item in items if item.get_closest_marker(marker)]
        if marked and (problem := problem_of()):
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=f"{marker}: {problem}"))


@pytest.fixture(scope="session")
def data_file(pytestconfig: pytest.Config):
    """``data_file(name)``: the path of a data file, or a skip that says what is missing."""
    directory: Path | None = pytestconfig.getoption("--data")

    def find(name: str) -> Path:
        if directory is None:
            pytest.skip(f"needs {name}: pass --data PATH")
        path = directory / name
        if not path.is_file():
            pytest.skip(f"needs {name}: not in {directory}")
        return path

    return find
