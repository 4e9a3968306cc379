"""Names and arguments of a kernel stand in its definition: the compiled module and a device's kernels have the same."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradcomp
from gradcomp.kernels import dispatch
from gradcomp.kernels.cuda import backend as cuda_backend
from gradcomp.kernels.devices import HOST
from gradcomp.kernels.segments import Shapes

STUB = Path(gradcomp.__file__).parent / "_native.pyi"

#: What a type of a definition is to the compiled module: the dtype of an array, or what is no array.
COMPILED_TYPES = {
    **dict.fromkeys(("SegmentTable", "Bytes"), "uint8"),
    **dict.fromkeys(("Codings", "Steps"), "int32"),
    **dict.fromkeys(("Floats", "Magnitudes"), "float32"),
    "Sizes": "int64",
    "Doubles": "float64",
    "Indices": "uint32",
    "Words": "uint32",
}

#: What the compiled module takes for a record that has a name: names and types.
RECORDS = {
    "Draw | None": [("stochastic", "bool"), ("seed", "int"), ("step", "int"), ("rank", "int")],
    "Factor": [("{}", "float32"), ("{}_at", "int64")],
    "Shapes": [("rows", "int64"), ("columns", "int64"), ("ranks", "int64")],
}

LISTED = {
    name: each.__func__ for name, each in vars(dispatch.Kernels).items() if isinstance(each, staticmethod)
}
"""The kernels that `Kernels` lists, by their definitions."""

DEFINED: dict[str, Callable[..., Any]] = {
    name: member
    for module in {import_module(each.__module__) for each in LISTED.values()}
    for name, member in vars(module).items()
    if inspect.isfunction(member) and member.__module__ == module.__name__
}
"""The functions of the modules that define kernels: what another backend has of them is a kernel."""

DEVICE_DEFINED = DEFINED | {
    name: each for name, each in vars(dispatch.Kernels).items() if inspect.isfunction(each)
}
"""And the methods that are one kernel of a device where the host calls several."""

CUDA = {
    name: getattr(part, name)
    for part in cuda_backend.PARTS
    for name in vars(part)
    if name in DEVICE_DEFINED and not name.startswith("_")
}


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


def _signature(function: Any) -> str:
    """As the compiled module states it, with types that Python can read."""
    signature, _, defaults = function.__nb_signature__[0]
    signature = re.sub(r"numpy\.ndarray\[(?:dtype=)?(\w+).*?\]", r"\1", signature)
    signature = re.sub(r"-> gradcomp\S*", "", signature).replace("collections.abc.", "")
    return re.sub(r"\\(\d+)", lambda place: repr(defaults[int(place[1])]), signature) + ": ..."


def _compiled(owner: Any, prefix: str = "") -> dict[str, Any]:
    """The functions and methods of the module, by name."""
    found: dict[str, Any] = {}
    for name in dir(owner):
        member = getattr(owner, name)
        if not name.startswith("_"):
            more = _compiled(member, f"{name}.") if isinstance(member, type) else {prefix + name: member}
            found |= more
    return found


def _flat(definition: Callable[..., Any]) -> Iterator[tuple[str, bool, str]]:
    """Name, whether it goes by its name alone, and compiled type of every argument; records member by member."""
    for name, each in inspect.signature(definition).parameters.items():
        named = each.kind is each.KEYWORD_ONLY
        if each.annotation in RECORDS:
            yield from ((member.format(name), named, kind) for member, kind in RECORDS[each.annotation])
        else:
            words = re.sub(r"npt\.NDArray\[np\.(\w+)\]", r"\1", each.annotation)
            yield name, named, re.sub(r"\w+", lambda word: COMPILED_TYPES.get(word[0], word[0]), words)


COMPILED = (
    {}
    if importlib.util.find_spec("gradcomp._native") is None
    else _compiled(import_module("gradcomp._native"))
)


@pytest.mark.skipif(not COMPILED, reason="needs the compiled module")
def test_the_stub_has_what_is_no_kernel() -> None:
    others = {name: each for name, each in COMPILED.items() if name not in DEFINED}
    stated = {name: _parameters(_signature(each)) for name, each in others.items()}
    assert _stubbed(ast.parse(STUB.read_text()).body) == stated


@pytest.mark.parametrize("name", sorted(DEFINED.keys() & COMPILED))
def test_the_compiled_kernel_has_the_arguments_of_its_definition(name: str) -> None:
    (function,) = ast.parse(_signature(COMPILED[name])).body
    assert isinstance(function, ast.FunctionDef)
    by_place, by_name = (
        [(each.arg, ast.unparse(each.annotation or each)) for each in arguments]
        for arguments in (function.args.args, function.args.kwonlyargs)
    )
    wanted = list(_flat(DEFINED[name]))
    assert by_place == [(name, kind) for name, named, kind in wanted if not named]
    assert sorted(by_name) == sorted((name, kind) for name, named, kind in wanted if named)


@pytest.mark.parametrize("name", sorted(CUDA))
def test_the_device_kernel_has_the_arguments_of_its_definition(name: str) -> None:
    wanted = list(inspect.signature(DEVICE_DEFINED[name]).parameters.values())
    if name not in DEFINED:
        del wanted[0]  # the backend that runs the parts
    found = list(inspect.signature(CUDA[name]).parameters.values())[1:]
    assert [each.replace(annotation=None) for each in found] == [
        each.replace(annotation=None) for each in wanted
    ]


@pytest.mark.skipif(not COMPILED, reason="needs the compiled module")
def test_every_kernel_is_listed_and_compiled_or_a_device_alone_gains_by_it() -> None:
    assert {name: DEFINED[name] for name in DEFINED.keys() & (COMPILED.keys() | CUDA.keys())} == LISTED
    assert LISTED.keys() - COMPILED.keys() == {"keep"}


def test_a_device_lacks_only_kernels_of_headers_of_packing_and_of_choosing_levels() -> None:
    assert LISTED.keys() - CUDA.keys() == {
        "crc32c",
        "write_headers",
        "read_headers",
        "compact",
        "restore",
        "cheapest",
    }


@pytest.mark.parametrize("name", sorted(LISTED))
def test_the_host_runs_a_kernel_by_the_backend_in_use(name: str) -> None:
    given = (Shapes(*np.zeros((3, 0), np.int64)),) if name in ("project", "back_project") else ()
    with dispatch.use(dispatch.backend()), pytest.MonkeyPatch.context() as patch:
        for backend in ("reference", "native"):
            fake = dispatch.Kernels()
            setattr(fake, name, lambda *_, of=backend: of)
            patch.setitem(dispatch._backends, backend, fake)
        patch.setattr(dispatch, "numpy_multiplies", lambda rank: dispatch.backend() == "reference")
        for backend in ("reference", "native"):
            with dispatch.use(backend):
                assert getattr(HOST.kernels, name)(*given) == backend
