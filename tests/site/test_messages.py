"""The texts of errors and of log lines that the pages quote are those of the code."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import gradcomp

PAGES = Path(__file__).resolve().parents[2] / "docs"
PACKAGE = Path(gradcomp.__file__).parent

#: What stands for something else in a quoted text: numbers, an example's host, what is left out, names in quotes.
ELSE = re.compile(
    r"rank \d+ \(host b\)|step \d+|\d+|\b[XYN]\b|\.\.\.|'[^']*'|[A-Z]+_\w+|\bGLOO_\w+|shutdown\(\)|allreduce, call"
)

#: Quoted in the first column of a table, but no text of gradcomp: names of settings, options, Python's own.
NAMES = re.compile(r"[\w.]+(\(.*\))?|--?[\w-]+.*|[A-Z_]+=\S*")


def spoken() -> str:
    """All strings of the package, a blank where a value is filled in."""
    found: list[str] = []
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                parts = [str(p.value) if isinstance(p, ast.Constant) else "\n" for p in node.values]
                found.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"%[-.\d]*[sdrfg]", "\n", node.value))
    return "\n".join(found)


def quoted(page: str) -> list[str]:
    """What the first column of the page's tables has in backticks, names apart."""
    rows = re.findall(r"^\|(.*?)(?<!\\)\|", (PAGES / page).read_text(encoding="utf-8"), re.MULTILINE)
    texts = [text for row in rows for text in re.findall(r"`([^`]+)`", row)]
    return [text for text in texts if not NAMES.fullmatch(text)]


TEXTS = spoken()


@pytest.mark.parametrize(
    ("page", "text"),
    [(page, text) for page in ("troubleshooting.md", "errors.md", "launchers.md") for text in quoted(page)],
)
def test_a_quoted_message_is_in_the_code(page: str, text: str):
    kinds = [name for name in re.findall(r"\b[A-Z]\w+Error\b", text) if name != "ModuleNotFoundError"]
    assert all(hasattr(gradcomp, kind) for kind in kinds)
    rest = re.sub(r"^\w+Error: ", "", text)
    fixed = [part.strip(" ,:=") for part in ELSE.split(rest)]
    missing = [part for part in fixed if len(part) > 3 and part not in TEXTS]
    assert not missing, f"{page} quotes {text!r}; the code has nothing like {missing}"


def test_pages_quote_messages():
    assert len(quoted("troubleshooting.md")) >= 8
    assert len(quoted("errors.md")) >= 5
