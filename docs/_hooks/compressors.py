"""Pages that list all compressors are completed from the registry, so that a new compressor is on them."""

from __future__ import annotations

from inspect import getdoc
from typing import Any

import gradcomp
from gradcomp.compress.base import Compressor
from gradcomp.compress.registry import registered


def public() -> list[type[Compressor]]:
    """Return gradcomp's own compressors in the order of their names; other packages may register more."""
    own = [kind for kind in registered().values() if getattr(gradcomp, kind.__name__, None) is kind]
    return sorted(own, key=lambda kind: kind.__name__)


def entries() -> str:
    """Return what mkdocstrings replaces by the description of each class."""
    return "\n\n".join(f"::: gradcomp.{kind.__name__}" for kind in public())


def table() -> str:
    """Return the table of all compressors: the class, its name in string forms, its level, and its first sentence."""
    lines = ["| compressor | string form | level | description |", "|---|---|---|---|"]
    for kind in public():
        link = f"[`{kind.__name__}`](../api/compressors.md#gradcomp.{kind.__name__})"
        level = f"`{kind.level_field}`" if kind.level_field else ""
        description = (getdoc(kind) or "").splitlines()[0].replace("``", "`").replace("|", r"\|")
        lines.append(f"| {link} | `{kind.name}` | {level} | {description} |")
    return "\n".join(lines)


PARTS = {"<!-- the table of all compressors -->": table, "<!-- the entries of all compressors -->": entries}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs with each page."""
    for mark, part in PARTS.items():
        if mark in markdown:
            markdown = markdown.replace(mark, part())
    return markdown
