"""Without TensorFlow, `import gradcomp.tf` names both of its builds."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
sys.modules["keras"] = sys.modules["tensorflow"] = None
import gradcomp.tf
"""


def test_a_missing_tensorflow_is_an_error_that_names_both_builds() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "ModuleNotFoundError: gradcomp.tf needs TensorFlow 2.16 or newer with Keras 3, and keras is not installed: "
        "pip install 'tensorflow[and-cuda]' for GPUs, or tensorflow-cpu, which 'gradcomp[tf-cpu]' brings"
    )
