"""The public names of Horovod's modules, read from its sources: they can be there without being importable."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path


def directory() -> Path | None:
    """Where Horovod is installed, or None."""
    found = importlib.util.find_spec("horovod")
    return None if found is None or found.origin is None else Path(found.origin).parent


def names(file: Path) -> set[str]:
    """What a module defines, or imports from Horovod, under a public name; its submodules not."""
    found = set()
    for node in _statements(ast.parse(file.read_text()).body):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("horovod"):
            found.update(alias.asname or alias.name for alias in node.names)
    return {name for name in found if not name.startswith("_")}


def arguments(file: Path) -> dict[str, list[str]]:
    """The arguments of a module's functions and, without ``self``, of its classes."""
    found = {}
    for node in _statements(ast.parse(file.read_text()).body):
        if isinstance(node, ast.FunctionDef):
            found[node.name] = [each.arg for each in node.args.args]
        elif isinstance(node, ast.ClassDef):
            for each in node.body:
                if isinstance(each, ast.FunctionDef) and each.name == "__init__":
                    found[node.name] = [one.arg for one in each.args.args[1:]]
    return found


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Those at the top, and those in its conditions."""
    for node in body:
        yield node
        if isinstance(node, ast.If):
            yield from _statements([*node.body, *node.orelse])
        elif isinstance(node, ast.Try):
            yield from _statements([*node.body, *(each for one in node.handlers for each in one.body)])
