"""A frontend without its framework, and an integration without its library, say which extra to install."""

from __future__ import annotations

import subprocess
import sys

import pytest

from gradcomp.core.requires import need


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
