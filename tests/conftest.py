"""What every test relies on: the installed package with its compiled module, and what this machine offers."""

from __future__ import annotations

import functools
import gc
import importlib
import logging
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiers
from kernels import gpu as lent_gpu

pytest.register_assert_rewrite("gradcomp.testing")

ROOT = Path(__file__).resolve().parent.parent

# Processes that tests start must find the installed package too, and the helpers beside the tests; never the
# source tree, which has no compiled module.
os.environ["PYTHONSAFEPATH"] = "1"
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
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
    parser.addoption(
        "--full", action="store_true", help="every case; the rules of the default run: tests/tiers.py"
    )
    parser.addoption(
        "--full-only", action="store_true", help="only the cases that the default run leaves out"
    )
    parser.addoption(
        "--part",
        metavar="K/N",
        type=_part,
        default=(0, 1),
        help="only part K of N, 0 <= K < N; what one worker runs together stays together",
    )


def _part(text: str) -> tuple[int, int]:
    part, parts = map(int, text.split("/"))
    if not 0 <= part < parts:
        raise ValueError(f"part {part} of {parts} does not exist")
    return part, parts


def pytest_configure(config: pytest.Config) -> None:
    tiers.all_examples = config.getoption("--full") or config.getoption("--full-only")


def _import_problem() -> str | None:
    """Say why the package cannot be tested, or None. A GPU's kernels can be without the compiled module."""
    try:
        package = importlib.import_module("gradcomp")
    except ImportError as error:
        return f"gradcomp cannot be imported ({error})"
    try:
        importlib.import_module("gradcomp._native")
    except ImportError as error:
        if lent_gpu.problem() is None:
            return None
        return f"gradcomp from {package.__path__[0]} has no working compiled module ({error})"
    return None


def pytest_sessionstart(session: pytest.Session) -> None:
    if problem := _import_problem():
        pytest.exit(f"{problem}. Tests run against the installed package: use `make test`.", returncode=3)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported and collected stays to the end: the garbage collector need not look at it again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


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


_REQUIREMENTS = {"gpu": lent_gpu.problem, "network": _network_namespaces, "sanitizer": _sanitizer}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for marker, problem_of in _REQUIREMENTS.items():
        marked = [item for item in items if item.get_closest_marker(marker)]
        if marked and (problem := problem_of()):
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=f"{marker}: {problem}"))
    _choose_tier(config, items)
    _choose_part(config, items)
    items.sort(key=lambda item: _turn(item.nodeid))


def _choose_tier(config: pytest.Config, items: list[pytest.Item]) -> None:
    named = any("::" in argument for argument in config.args)  # whoever names a test wants all of it
    if config.getoption("--full") or (named and not config.getoption("--full-only")):
        return
    default = tiers.default_run(items, _family)
    only = config.getoption("--full-only")
    if only:  # and more examples of what Hypothesis draws
        default = {
            one for one in default if not getattr(getattr(one, "obj", None), "is_hypothesis_test", False)
        }
    left_out = [item for item in items if (item in default) == only]
    items[:] = [item for item in items if (item in default) != only]
    config.hook.pytest_deselected(items=left_out)


def _choose_part(config: pytest.Config, items: list[pytest.Item]) -> None:
    part, parts = config.getoption("--part")
    chosen = [item for item in items if tiers.part_of(_group(item.nodeid), parts) == part]
    if len(chosen) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
        items[:] = chosen


def _family(value: object) -> type | None:
    """The class of the compressor of a row, or of the row of that name."""
    from configurations import ROWS, Row

    row = ROWS.get(value) if isinstance(value, str) else value
    return type(row.compressor) if isinstance(row, Row) else None


# ------------------------------------------------------------------------------------------ workers

_COMPUTE = {"kernels", "core", "compress", "reduce", "control", "exchange"}


def _computes(nodeid: str) -> bool:
    """Whether a test computes in its own process, so that its file may be divided."""
    file = nodeid.split("::", maxsplit=1)[0]
    return file.split("/")[1] in _COMPUTE and not _on_ranks(file)


def _on_ranks(file: str) -> bool:
    return "from batch import" in _text(file)


@functools.cache
def _text(file: str) -> str:
    return (ROOT / file).read_text(encoding="utf-8")


def _turn(nodeid: str) -> int:
    """Short tests last, so that workers end together; behind them what is alone: the other workers are done by then."""
    if "pytestmark = pytest.mark.alone" in _text(nodeid.split("::", maxsplit=1)[0]):
        return 2
    return int(_computes(nodeid))


def _group(nodeid: str) -> str:
    """What one worker runs: the cases of a test that computes, a file, all of TensorFlow's, the longest import."""
    if _computes(nodeid):
        return nodeid.split("[", maxsplit=1)[0]
    file = nodeid.split("::", maxsplit=1)[0]
    return "tests/tf" if file.startswith("tests/tf/") else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A scheduler that gives workers groups of tests: those of a group may share launches, and what ranks import."""
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return _group(nodeid)

    config.option.loadscopereorder = False
    return Groups(config, log)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, bool | None, bool | None]:
    """Tests marked ``alone`` run while the other workers wait; outside of every time limit."""
    with tiers.turn(exclusive=item.get_closest_marker("alone") is not None):
        return (yield)


@pytest.fixture(autouse=True)
def _log_of_its_own() -> Iterator[None]:
    """Another test of this process may have initialised gradcomp, with a log level."""
    logger = logging.getLogger("gradcomp")
    level = logger.level
    logger.setLevel(logging.NOTSET)
    yield
    logger.setLevel(level)


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


@pytest.fixture
def gpu() -> Iterator[Any]:
    """A stand-in for a GPU, whose kernels run on the CPU."""
    from kernels import standin

    with standin.device() as (device, _):
        yield device
