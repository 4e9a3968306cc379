"""The committed stub says what the compiled module has."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

import gradcomp

_native = pytest.importorskip("gradcomp._native")

STUB = Path(gradcomp.__file__).parent / "_native.pyi"


def _parameters(definition: str) -> tuple[list[str], list[str]]:
    (function,) = ast.parse(definition).body
    assert isinstance(function, ast.FunctionDef)
    return [a.arg for a in function.args.args], [a.arg for a in function.args.kwonlyargs]


def _stubbed(body: list[ast.stmt], prefix: str = "") -> dict[str, tuple[list[str], list[str]]]:
    found = {}
    for node in body:
        if isinstance(node, ast.FunctionDef):
            node.decorator_list = []
            found[prefix + node.name] = _parameters(ast.unparse(node))
        elif isinstance(node, ast.ClassDef):
            found |= _stubbed(node.body, f"{node.name}.")
    return found


def _compiled(owner: Any, prefix: str = "") -> dict[str, tuple[list[str], list[str]]]:
    found = {}
    for name in dir(owner):
        member = getattr(owner, name)
        if name.startswith("_"):
            continue
        if isinstance(member, type):
            found |= _compiled(member, f"{name}.")
            continue
        signature = member.__nb_signature__[0][0]
        # The arrays' shapes and the module's own types are no Python, nor are the numbers that stand for defaults.
        signature = re.sub(r"numpy\.ndarray\[.*?\]", "object", signature)
        signature = re.sub(r"-> gradcomp\S*", "", signature)
        found[prefix + name] = _parameters(re.sub(r"= \\\d+", "= None", signature) + ": ...")
    return found


def test_stub_matches_the_module() -> None:
    assert _stubbed(ast.parse(STUB.read_text()).body) == _compiled(_native)
