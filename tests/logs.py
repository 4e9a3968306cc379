"""What the gradcomp logger says meanwhile."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def logged(level: int = logging.INFO, *, only: bool = False) -> Iterator[list[str]]:
    """The texts of its records from ``level`` on; ``only``: of that level."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno == level or (not only and record.levelno > level):
                lines.append(record.getMessage())

    logger, handler = logging.getLogger("gradcomp"), Keep()
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(min(level, logger.getEffectiveLevel()))
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
