"""Docstrings name things by roles, such as :func:`init`; the site shows the name alone."""

from __future__ import annotations

import re
from typing import Any

_ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):(<code>)~?")


def on_page_content(html: str, **_: Any) -> str:
    """Called by mkdocs with each page."""
    return _ROLE.sub(r"\1", html)
