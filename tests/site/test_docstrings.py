"""What users can call is described; no docstring says less than a sentence."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

import gradcomp

ROOT = Path(gradcomp.__file__).parent
MODULES = ["gradcomp", "gradcomp.torch", "gradcomp.tf", "gradcomp.testing"]

#: Values without a docstring of their own.
VALUES = (str, bool, int, float)

#: A docstring that begins with one of these is half a sentence.
HALVES = ("What", "Whether", "Of", "Who", "Yes")


def members(kind: type) -> Iterator[tuple[str, object]]:
    """Public methods and properties that the package itself defines."""
    for name in dir(kind):
        found = inspect.getattr_static(kind, name)
        of = (
            getattr(getattr(found, "fget", None) or getattr(found, "__func__", found), "__module__", "") or ""
        )
        described = isinstance(found, property) or callable(getattr(kind, name))
        if described and not name.startswith("_") and of.startswith("gradcomp"):
            yield name, getattr(kind, name)


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_and_each_of_its_methods_is_described(module: str):
    public = importlib.import_module(module)
    missing = []
    for name in public.__all__:
        found = getattr(public, name)
        if isinstance(found, VALUES) or not (inspect.isclass(found) or callable(found)):
            continue
        if not inspect.getdoc(found):
            missing.append(name)
        if inspect.isclass(found):
            missing += [f"{name}.{method}" for method, each in members(found) if not inspect.getdoc(each)]
    assert not missing


def begins_in_the_middle(path: Path) -> list[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = ((node, ast.get_docstring(node)) for node in ast.walk(tree) if isinstance(node, kinds))
    return [
        f"{path}:{getattr(node, 'lineno', 1)}"
        for node, text in texts
        if text and text.split()[0].rstrip(":,.") in HALVES
    ]


def test_no_docstring_begins_in_the_middle_of_a_sentence():
    files = sorted(ROOT.rglob("*.py"))
    assert files
    assert not [place for path in files for place in begins_in_the_middle(path)]
