"""The code of pages: what tests of the documentation run and check."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECIPES = ROOT / "docs/recipes.md"
README = ROOT / "README.md"


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


def patched(diff: str) -> str:
    """What a diff makes of a script."""
    assert all(line[:1] in ("", " ", "+") for line in diff.splitlines()), "it only adds"
    return "".join(line[1:] + "\n" for line in diff.splitlines())
