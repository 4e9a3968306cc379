"""The code of pages, which tests of the documentation and of integrations run and check."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from launching import Finished, run_ranks

ROOT = Path(__file__).resolve().parents[1]
RECIPES = ROOT / "docs/recipes.md"
README = ROOT / "README.md"
INTEGRATIONS = ROOT / "docs/integrations.md"


def blocks(page: Path, language: str = "python") -> list[tuple[str, str]]:
    """Heading and code of each block of a language, in order."""
    text = page.read_text(encoding="utf-8")
    sections = re.split(r"^##? ", text, flags=re.MULTILINE)
    found = [
        (section.splitlines()[0], code)
        for section in sections
        if section
        for code in re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)
    ]
    assert len(found) == text.count(f"```{language}\n")
    return found


# ------------------------------------------------------------------------------------------ integrations

#: With residuals, so that a resume without the saved state gives other weights.
COMPRESSION = "topk:density=0.1"

EPILOGUE = """
import hashlib, json
import gradcomp.torch as gc
flat = torch.cat([p.detach().flatten() for p in model.parameters()])
print("result", json.dumps([hashlib.sha256(flat.numpy().tobytes()).hexdigest(), metrics]))
gc.shutdown()
"""


def needs(module: str, extra: str = "") -> pytest.MarkDecorator:
    """Skip where a library is not installed. It is not imported here: that takes seconds."""
    missing = importlib.util.find_spec(module) is None
    return pytest.mark.skipif(missing, reason=f"needs {module}: pip install gradcomp[{extra or module}]")


class Result(NamedTuple):
    """What a rank holds in the end."""

    weights: str
    metrics: dict[str, Any]


def block(heading: str, number: int = 0) -> str:
    """The code of a section of the page of integrations, at a compression that keeps residuals."""
    code = [code for title, code in blocks(INTEGRATIONS) if title == heading][number]
    code, replaced = re.subn(r"quantize:bits=[48]", COMPRESSION, code)
    assert replaced
    return code


def results(ended: list[Finished]) -> list[Result]:
    """What the ranks printed: equal weights, and gradients that were sent in compressed form."""
    for rank in ended:
        assert rank.returncode == 0, rank.stdout + rank.stderr
    found = [
        Result(*json.loads(line.removeprefix("result ")))
        for rank in ended
        for line in rank.stdout.splitlines()
        if line.startswith("result ")
    ]
    assert len(found) == len(ended), [rank.stdout for rank in ended]
    assert len({result.weights for result in found}) == 1
    for result in found:
        assert result.metrics["gradcomp/ratio"] > 3
        assert result.metrics["gradcomp/sent_mb"] > 0
    return found


def train(
    directory: Path, prologue: str, code: str, imported: tuple[str, ...], **options: Any
) -> list[Finished]:
    """Two ranks run a script in this directory; what they printed is unchecked."""
    source = f"import os; os.chdir({str(directory)!r})\n{prologue}\n{code}\n{EPILOGUE}"
    return run_ranks(source, 2, imported=("batch", "torch._dynamo", *imported), timeout=150, **options)
