"""The committed stub says what the compiled module has."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import gradcomp
from gradcomp import _native

STUB = Path(gradcomp.__file__).parent / "_native.pyi"


def _parameters(definition: str) -> tuple[list[str], list[str]]:
    (function,) = ast.parse(definition).body
    assert isinstance(function, ast.FunctionDef)
    return [a.arg for a in function.args.args], [a.arg for a in function.args.kwonlyargs]


def test_stub_matches_the_module() -> None:
    stub = {
        node.name: _parameters(ast.unparse(node))
        for node in ast.parse(STUB.read_text()).body
        if isinstance(node, ast.FunctionDef)
    }
    compiled = {}
    for name in dir(_native):
        if not name.startswith("_"):
            signature = getattr(_native, name).__nb_signature__[0][0]
            # The arrays' shapes are no Python, nor are the numbers that stand for defaults.
            signature = re.sub(r"numpy\.ndarray\[.*?\]", "object", signature)
            compiled[name] = _parameters(re.sub(r"= \\\d+", "= None", signature) + ": ...")
    assert stub == compiled
