"""A frontend without its framework, and an integration without its library, say which extra to install."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import gradcomp
from gradcomp.core.errors import need


@pytest.mark.parametrize(
    ("frontend", "missing", "told"),
    [
        ("torch", "torch", "torch, which is not installed: pip install 'gradcomp[torch]'"),
        (
            "tf",
            "tensorflow",
            "TensorFlow 2.16 or newer with Keras 3, and tensorflow is not installed: pip install ",
        ),
        ("tf", "keras", "TensorFlow 2.16 or newer with Keras 3, and keras is not installed: pip install "),
    ],
)
def test_the_import_names_what_is_missing_and_the_extra(frontend: str, missing: str, told: str):
    source = f"import sys; sys.modules[{missing!r}] = None; import gradcomp.{frontend}"
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"ModuleNotFoundError: gradcomp.{frontend} needs {told}")
    assert f"gradcomp[{frontend}" in last


@pytest.mark.parametrize("library", ["accelerate", "lightning", "ray", "transformers"])
def test_an_integration_names_its_extra(library: str):
    source = f"import sys; sys.modules[{library!r}] = None; import gradcomp.integrations.{library}"
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=False
    )
    last = done.stderr.splitlines()[-1]
    told = f"gradcomp.integrations.{library} needs {library}, which is not installed: pip install 'gradcomp[{library}]'"
    assert last == f"ModuleNotFoundError: {told}"


def test_what_is_there_is_not_complained_about():
    need("gradcomp", "core", "sys", "numpy")
    with pytest.raises(ModuleNotFoundError) as caught:
        need("gradcomp", "core", "numpy", "no_such_module")
    assert caught.value.name == "no_such_module"


def names_of(frontend: str) -> set[str]:
    tree = ast.parse((Path(gradcomp.__file__).parent / frontend / "__init__.py").read_text())
    (names,) = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets) == "__all__"
    ]
    return set(names) - set(gradcomp.__all__)


@pytest.mark.parametrize("frontend", ["torch", "tf"])
def test_a_frontends_name_that_is_asked_of_the_core_leads_to_the_frontends(frontend: str):
    for name in names_of(frontend):
        with pytest.raises(AttributeError, match=r"gradcomp\.torch as gc.*gradcomp\.tf as gc"):
            getattr(gradcomp, name)
    assert not hasattr(gradcomp, "__wrapped__")


def test_a_script_that_imports_the_core_only_is_told_what_to_import():
    for name in ("init()", "torch.init()"):
        done = subprocess.run(
            [sys.executable, "-c", f"import gradcomp; gradcomp.{name}"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.stderr.splitlines()[-1].endswith(
            "`import gradcomp.torch as gc` or `import gradcomp.tf as gc`"
        )
