"""The API reference has every public name, pages the arguments of compressors, the index of decisions every record."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import runpy
from pathlib import Path

import pytest

import gradcomp
import gradcomp.torch

DOCS = Path(__file__).resolve().parents[2] / "docs"

#: Names without a docstring of their own: operations, the set of all ranks, another name of GradcompError, the version,
#: modules.
WITHOUT = {
    *("Average", "Sum", "Min", "Max", "Product", "Adasum"),
    *("global_process_set", "HorovodInternalError", "__version__", "callbacks", "elastic"),
}


def completed(page: str) -> str:
    """The text of a page with what the site adds from the registry."""
    hook = runpy.run_path(str(DOCS / "_hooks/compressors.py"))
    return str(hook["on_page_markdown"]((DOCS / page).read_text(encoding="utf-8")))


def documented(*pages: str) -> set[str]:
    texts = [completed(f"api/{page}") for page in pages]
    return {name for text in texts for name in re.findall(r"^::: [\w.]+\.(\w+)$", text, re.MULTILINE)}


@pytest.mark.parametrize("module", ["gradcomp", "gradcomp.torch", "gradcomp.tf"])
def test_every_public_name_is_in_the_reference(module: str):
    there = documented("torch.md", "compressors.md", "controllers.md", "errors.md")
    assert all(hasattr(gradcomp.torch, name) or hasattr(gradcomp.torch.elastic, name) for name in there)
    assert set(gradcomp.torch.elastic.__all__) <= there
    if module == "gradcomp.tf":
        there |= documented("tensorflow.md")
    assert set(importlib.import_module(module).__all__) - WITHOUT <= there


def signatures() -> list[tuple[str, str]]:
    """Class and arguments of each signature on the compressors' pages: alone on its line, or in a table of wrappers."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in sorted((DOCS / "compressors").glob("*.md")))
    return re.findall(r"^`([A-Z]\w+)\(([^`]*)\)`$", text, re.M) + re.findall(
        r"^\| `(\w+)\((inner.*?)\)`", text, re.M
    )


@pytest.mark.parametrize(("name", "arguments"), signatures())
def test_signatures_on_the_pages_are_those_of_the_classes(name: str, arguments: str):
    exec(f"def written({arguments}): ...", found := {})
    own = inspect.signature(getattr(gradcomp, name)).parameters
    for argument in inspect.signature(found["written"]).parameters.values():
        assert (argument.default, argument.kind) == (own[argument.name].default, own[argument.name].kind)


def test_the_index_has_every_decision_with_its_title():
    records = sorted((DOCS / "decisions").glob("[0-9]*.md"))
    titles = [(path.name, path.read_text(encoding="utf-8").splitlines()[0]) for path in records]
    rows = [f"{int(name[:4])}. [{title.split('. ', 1)[1]}]({name})" for name, title in titles]
    index = (DOCS / "decisions/index.md").read_text(encoding="utf-8").splitlines()
    assert [line for line in index if re.match(r"\d", line)] == rows


def test_the_table_of_compressors_has_each_public_one():
    found = re.findall(
        r"^\| \[`(\w+)`\]\(\S+\) \| `(\w+)` \| (?:`(\w+)`)? *\| \S.* \|$",
        completed("compressors/index.md"),
        re.M,
    )
    public = [getattr(gradcomp, name) for name in sorted(gradcomp.__all__)]
    kinds = [kind for kind in public if isinstance(kind, type) and issubclass(kind, gradcomp.Compressor)]
    kinds.remove(gradcomp.Compressor)
    assert found == [(kind.__name__, kind.name, kind.level_field or "") for kind in kinds]


def names_for_type_checkers(module: str) -> list[str]:
    """They read ``__all__`` as it is written, and follow ``__all__ += other.__all__``."""
    folder = Path(gradcomp.__file__).parent / module.removeprefix("gradcomp").strip(".").replace(".", "/")
    file = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    found = []
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            found += ast.literal_eval(node.value)
        elif isinstance(node, ast.AugAssign) and ast.unparse(node.target) == "__all__":
            added = ast.unparse(node.value)
            if added.endswith(".__all__"):
                other = getattr(importlib.import_module(module), added.removesuffix(".__all__"))
                found += names_for_type_checkers(other.__name__)
    return found


@pytest.mark.parametrize("module", ["gradcomp", "gradcomp.torch", "gradcomp.tf"])
def test_type_checkers_see_every_public_name_once(module: str):
    written = names_for_type_checkers(module)
    assert sorted(written) == sorted(set(importlib.import_module(module).__all__))
