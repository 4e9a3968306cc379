"""Change the package at places drawn from a seed, one at a time, and count how many changes the default run notices.

    python scripts/mutate.py --count 40 --seed 1 --jobs 3

Each change is made in a copy of the installed package, which the tests then import. A change of ``gradcomp/<part>``
runs the default tests of the folders in ``_TESTS``, files that name the changed code first, until the first failure,
which is printed. A missed change may be one that changes nothing: read it. The exit status is 1 if fewer than
``--least`` changes are noticed.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path(str(importlib.import_module("gradcomp").__file__)).parent

#: Up to the first failure, which the summary names.
_PYTEST = ("-m", "pytest", "-xq", "--tb=no", "-rfE", "-p", "no:cacheprovider")
#: A run of tests that takes longer hangs.
_MOST_SECONDS = 1800.0

#: The folders of tests that each part's changes run: its own first, those that start many ranks last.
_TESTS = {
    "exchange": ("exchange", "compress", "reduce", "control", "job", "torch"),
    "reduce": ("reduce", "exchange", "compress", "control", "torch"),
    "compress": ("compress", "reduce", "exchange", "control", "torch"),
    "control": ("control", "exchange", "torch"),
    "job": ("job", "torch"),
    "transport": ("transport", "exchange", "torch"),
    "torch": ("torch",),
}
_COMPARISONS = {
    ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt,
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip


@dataclass(frozen=True)
class Change:
    """A replacement of one piece of a file."""

    path: Path
    line: int
    kind: str
    begin: int
    end: int
    text: str

    def apply(self, tree: Path) -> None:
        """Make it in a copy of the source tree."""
        file = tree / "gradcomp" / self.path
        source = file.read_bytes()
        file.write_bytes(source[: self.begin] + self.text.encode() + source[self.end :])


def changes(path: Path) -> Iterator[Change]:
    """All that can be changed in a file, by its path in the package."""
    source = (PACKAGE / path).read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node in ast.walk(ast.parse(source)):
        for kind, target, text in _of_node(node):
            assert target.end_lineno is not None
            assert target.end_col_offset is not None
            begin = starts[target.lineno - 1] + target.col_offset
            end = starts[target.end_lineno - 1] + target.end_col_offset
            yield Change(path, target.lineno, kind, begin, end, text)


def tests_of(change: Change, folder: Path) -> list[str]:
    """Return the files of a folder of tests, those first that name the module, classes and functions of the change."""
    around = {
        node.name
        for node in ast.walk(ast.parse((PACKAGE / change.path).read_bytes()))
        if isinstance(node, (ast.ClassDef, ast.FunctionDef))
        and node.lineno <= change.line <= (node.end_lineno or 0)
    }
    named = {change.path.stem, *around} - {"__init__", "__post_init__"}
    files = {
        str(file): set(re.findall(r"\w+", file.read_text())) for file in sorted(folder.rglob("test_*.py"))
    }
    return sorted(files, key=lambda file: -len(named & files[file]))


def _of_node(node: ast.AST) -> Iterator[tuple[str, ast.expr | ast.stmt, str]]:
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _COMPARISONS:
        flipped = ast.Compare(node.left, [_COMPARISONS[type(node.ops[0])](), *node.ops[1:]], node.comparators)
        yield "comparison flipped", node, f"({ast.unparse(flipped)})"
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield "one more", node, str(node.value + 1)
    elif isinstance(node, (ast.If, ast.IfExp, ast.While)):
        yield "branch negated", node.test, f"(not ({ast.unparse(node.test)}))"
    elif isinstance(node, (ast.Assign, ast.AugAssign)) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    ):
        yield "statement dropped", node, "pass"


def _in_code(change: Change) -> bool:
    """Not in a class's or a module's list of names, nor in a text: such changes often mean nothing."""
    source = (PACKAGE / change.path).read_bytes()
    return any(
        isinstance(node, ast.FunctionDef) and node.body[0].lineno <= change.line <= (node.end_lineno or 0)
        for node in ast.walk(ast.parse(source))
    )


def absent_folders() -> list[str]:
    """The folders of the package and of tests that the table names but that do not exist."""
    named = {f"gradcomp/{part}" for part in _TESTS} | {
        f"tests/{name}" for each in _TESTS.values() for name in each
    }
    return sorted(name for name in named if not (ROOT / name).is_dir())


def drawn(seed: int, count: int) -> list[Change]:
    """Places of all parts: the kind of change is drawn first, for some kinds have many more places."""
    if absent := absent_folders():
        raise SystemExit(f"no such folders, mend _TESTS: {', '.join(absent)}")
    generator = random.Random(seed)
    by_kind: dict[str, list[Change]] = {}
    for part in _TESTS:
        for file in sorted((PACKAGE / part).rglob("*.py")):
            for change in changes(file.relative_to(PACKAGE)):
                by_kind.setdefault(change.kind, []).append(change)
    found: list[Change] = []
    while len(found) < count:
        change = generator.choice(by_kind[generator.choice(sorted(by_kind))])
        if change not in found and _in_code(change):
            found.append(change)
    return found


def noticed_by(change: Change, arguments: list[str]) -> str | None:
    """Return the first test that fails, or why none could run; None if all pass."""
    part = change.path.parts[0]
    with tempfile.TemporaryDirectory(prefix="gradcomp-mutate-") as directory:
        tree = Path(directory)
        shutil.copytree(PACKAGE, tree / "gradcomp", ignore=shutil.ignore_patterns("__pycache__"))
        change.apply(tree)
        environment = {
            **os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1",
        }  # fmt: skip
        for tests in _TESTS[part]:
            command = [sys.executable, *_PYTEST, *arguments]
            try:
                done = subprocess.run(
                    [*command, *tests_of(change, ROOT / "tests" / tests)],
                    env=environment,
                    cwd=ROOT,
                    capture_output=True,
                    text=True,
                    check=False,
                    timeout=_MOST_SECONDS,
                )
            except subprocess.TimeoutExpired:
                return f"tests/{tests} hangs"
            if done.returncode in (1, 2, 3):
                # A test, an import of a test or the import of the package has failed.
                failures = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
                return failures[0] if failures else f"tests/{tests} cannot be run"
            done.check_returncode()
    return None


def main() -> int:
    """Draw, change, run and count."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=40, help="how many changes")
    parser.add_argument("--seed", type=int, default=1, help="which")
    parser.add_argument("--least", type=int, help="how many must be noticed (default: 95%%)")
    parser.add_argument("--list", action="store_true", help="only say what would be changed")
    parser.add_argument("--jobs", type=int, default=1, help="how many changes are tested at a time")
    parser.add_argument("pytest", nargs="*", help="more arguments for pytest, after --")
    options = parser.parse_args()
    chosen = drawn(options.seed, options.count)
    places = [f"{change.path}:{change.line}: {change.kind}: {change.text}" for change in chosen]
    if options.list:
        print("\n".join(places))
        return 0
    found = 0
    with ThreadPoolExecutor(options.jobs) as pool:
        running = {
            pool.submit(noticed_by, change, options.pytest): place
            for change, place in zip(chosen, places, strict=True)
        }
        for done in as_completed(running):
            by = done.result()
            found += by is not None
            print(f"noticed {running[done]} ({by})" if by else f"MISSED  {running[done]}", flush=True)
    print(f"{found} of {options.count} noticed")
    least = options.least if options.least is not None else -(-options.count * 95 // 100)
    return int(found < least)


if __name__ == "__main__":
    sys.exit(main())
