"""Install gradcomp's wheel beside each supported version of a framework, without a compiler, and run it there.

    python scripts/versions.py --wheels dist --only tf-2.16-py3.12

Each row makes an empty environment, installs the framework, then the wheel, runs the digits example with two ranks and
a set of tests, and removes the environment. No compiler is on PATH where the example and the tests run. A Markdown
table ends the output: what ran, and what could not be had and why. A row of PyTorch downloads gigabytes where the
package index has no build for CPUs. pip's own variables, as PIP_EXTRA_INDEX_URL, name another index. The exit status is
1 if a row failed; a row that could not be had is no failure.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import interpreters

ROOT = Path(__file__).resolve().parents[1]
COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "clang++", "zig", "cmake", "ninja")
TOOLS = ("pytest>=8.2", "pytest-timeout>=2.3", "hypothesis>=6.100")
_CODECS = ("tests/kernels/test_golden.py", "tests/compress/test_golden.py")
_MOST_SECONDS = 1800.0


@dataclass(frozen=True)
class Framework:
    """What is installed for it, what runs, and where its version stands."""

    distribution: str
    extras: str
    example: tuple[str, ...]
    tests: tuple[str, ...]


FRAMEWORKS = {
    "torch": Framework(
        distribution="torch",
        extras="torch,demo",
        example=("python", "examples/digits.py", "--demo", "--epochs=5"),
        tests=(
            *_CODECS,
            *(
                f"tests/torch/test_{name}.py"
                for name in ("gradients", "sparse", "recomputation", "loss_scale", "ddp", "ddp_input")
            ),
        ),
    ),
    "tf": Framework(
        distribution="tensorflow-cpu",
        extras="tf,demo",
        example=("mpiexec", "-n", "2", "python", "examples/tf_keras_digits.py", "--epochs=5"),
        tests=(
            *_CODECS,
            "tests/tf/test_launch.py",
            "tests/tf/test_optimizer.py",
            "tests/tf/test_callbacks.py",
        ),
    ),
}


@dataclass(frozen=True)
class Row:
    """A framework's version ("" for the newest) and a version of Python."""

    framework: str
    version: str
    python: str

    @property
    def name(self) -> str:
        """As ``--only`` takes it."""
        return f"{self.framework}-{self.version or 'newest'}-py{self.python}"

    @property
    def requirement(self) -> str:
        """For pip."""
        name = FRAMEWORKS[self.framework].distribution
        return f"{name}=={self.version}.*" if self.version else name


ROWS = [
    *(Row("torch", "2.6", python) for python in ("3.11", "3.12", "3.13")),
    Row("torch", "2.13", "3.11"),
    *(Row("torch", "", python) for python in ("3.11", "3.12", "3.13")),
    *(Row("tf", "2.16", python) for python in ("3.11", "3.12")),  # there is none for 3.13
    *(Row("tf", "", python) for python in ("3.11", "3.12", "3.13")),
]


@dataclass(frozen=True)
class Result:
    """A line of the table. ``failed``: something ran and was wrong, other than that it could not be had."""

    row: Row
    installed: str
    example: str
    tests: str
    failed: bool = False

    def line(self) -> str:
        """In Markdown."""
        return f"| `{self.row.name}` | {self.installed} | {self.example} | {self.tests} |"


class _AbsentError(Exception):
    """A row could not be had, and why."""


def _wheel(folder: Path, python: Path) -> Path:
    """The wheel that pip takes for this interpreter."""
    command = [str(python), "-m", "pip", "debug", "--verbose"]
    tags = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for wheel in sorted(folder.glob("gradcomp-*.whl")):
        interpreter, abi, platforms = wheel.stem.split("-")[-3:]
        if any(re.search(rf"^ *{interpreter}-{abi}-{each}$", tags, re.M) for each in platforms.split(".")):
            return wheel.resolve()
    raise _AbsentError(f"no wheel in {folder} fits: run make wheels")


def _pip(python: Path, *arguments: str | Path) -> None:
    try:
        interpreters.install(python, *map(str, arguments))
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.splitlines() if line.startswith("ERROR:")]
        raise _AbsentError(f"pip: {(lines or [error.stderr.strip()])[0]}") from error


def _bare_environment(python: Path) -> dict[str, str]:
    """Programs of that environment only: no compiler. The source tree stays off sys.path, as in make test."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIP_"))}
    environment = {
        **kept,
        "PATH": str(python.parent),
        "PYTHONSAFEPATH": "1",
        "CC": "",
        "CXX": "",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    found = [name for name in COMPILERS if shutil.which(name, path=environment["PATH"])]
    if found:
        raise SystemExit(f"{python.parent} has {', '.join(found)}: this is no environment without a compiler")
    return environment


def _run(python: Path, *command: str) -> tuple[bool, str, float]:
    """Whether a command in the environment ended well, what it said, and how long it took."""
    program, *arguments = command
    began = time.monotonic()
    try:
        done = subprocess.run(
            [str(python.parent / program), *arguments],
            cwd=ROOT,
            env=_bare_environment(python),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=_MOST_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return False, f"it took longer than {_MOST_SECONDS:.0f} s", _MOST_SECONDS
    return done.returncode == 0, done.stdout, time.monotonic() - began


def _versions(python: Path, distribution: str) -> str:
    names = ("numpy", "ml_dtypes", "keras") if distribution != "torch" else ("numpy", "ml_dtypes")
    program = (
        "from importlib.metadata import version\n"
        f"print(', '.join(f'{{name}} {{version(name)}}' for name in {(distribution, *names)!r}))"
    )
    ended, text, _ = _run(python, "python", "-c", program)
    return text.strip() if ended else distribution


def try_row(row: Row, wheels: Path, folder: Path, tests: bool) -> Result:
    """Run a row in a new environment; what cannot be had is a line of the table."""
    framework = FRAMEWORKS[row.framework]
    interpreter = interpreters.find(row.python)
    if interpreter is None:
        return Result(row, f"not here: no CPython {row.python} on this machine", "", "")
    try:
        python = interpreters.environment(interpreter, folder)
        wheel = _wheel(wheels, python)
        print(f"{row.name}: installing {row.requirement}", flush=True)
        _pip(python, "--no-cache-dir", row.requirement)
        # From here on is what a user waits for who has the framework.
        began = time.monotonic()
        _pip(python, f"{wheel}[{framework.extras}]", row.requirement)
    except _AbsentError as reason:
        return Result(row, f"not here: {reason}", "", "")
    ran, said, _ = _run(python, *framework.example)
    seconds = time.monotonic() - began
    print(f"{said}\n{row.name}: wheel installed and example run in {seconds:.0f} s", flush=True)
    example = f"passed, {seconds:.0f} s with the wheel's installation" if ran else "FAILED"
    passed, summary = True, "not run"
    if tests:
        _pip(python, *TOOLS)
        passed, said, _ = _run(python, "pytest", "-q", "-p", "no:cacheprovider", *framework.tests)
        summary = said.strip().splitlines()[-1].strip("= ")
        print(said if not passed else summary, flush=True)
    installed = _versions(python, framework.distribution)
    return Result(row, installed, example, summary, failed=not (ran and passed))


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [row.name for row in ROWS]
    parser.add_argument("--wheels", type=Path, default=ROOT / "dist")
    parser.add_argument(
        "--only", nargs="+", choices=names, default=names, metavar="ROW", help=", ".join(names)
    )
    parser.add_argument("--no-tests", action="store_true", help="the example alone")
    parser.add_argument(
        "--work", type=Path, help="where environments are made; a temporary folder by default"
    )
    options = parser.parse_args()
    results = []
    for row in (row for row in ROWS if row.name in options.only):
        with tempfile.TemporaryDirectory(prefix="gradcomp-", dir=options.work) as folder:
            results.append(try_row(row, options.wheels, Path(folder) / row.name, not options.no_tests))
    print(f"\nLoad of this machine at the end: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores\n")
    print("| row | installed | digits, two ranks | tests |\n|---|---|---|---|")
    print("\n".join(result.line() for result in results))
    return 1 if any(result.failed for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
