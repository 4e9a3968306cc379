"""A frontend without its framework, and an integration without its library, say which extra to install."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import gradcomp
from gradcomp.core.errors import need


def last_line(source: str) -> str:
    """What a program that fails says at last."""
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    return done.stderr.splitlines()[-1]


TF = "TensorFlow 2.16 or newer with Keras 3, and {} is not installed: pip install "
INTEGRATIONS = ("accelerate", "lightning", "ray", "transformers")


@pytest.mark.parametrize(
    ("module", "missing", "told"),
    [
        ("torch", "torch", "torch, which is not installed: pip install 'gradcomp[torch]'"),
        ("tf", "tensorflow", TF.format("tensorflow")),
        ("tf", "keras", TF.format("keras")),
        *(
            (f"integrations.{name}", name, f"{name}, which is not installed: pip install 'gradcomp[{name}]'")
            for name in INTEGRATIONS
        ),
    ],
)
def test_the_import_names_what_is_missing_and_the_extra(module: str, missing: str, told: str):
    last = last_line(f"import sys; sys.modules[{missing!r}] = None; import gradcomp.{module}")
    assert last.startswith(f"ModuleNotFoundError: gradcomp.{module} needs {told}")
    assert f"gradcomp[{module.removeprefix('integrations.')}" in last


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
        said = "`import gradcomp.torch as gc` or `import gradcomp.tf as gc`"
        assert last_line(f"import gradcomp; gradcomp.{name}").endswith(said)
