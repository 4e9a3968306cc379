"""Writes gradcomp's log lines, each with its rank, to the logger ``gradcomp``."""

from __future__ import annotations

import logging

logger = logging.getLogger("gradcomp")

FORMAT = "gradcomp %(levelname)s rank %(rank)s: %(message)s"


class Ranked(logging.Filter):
    """Gives every record of the logger an attribute ``rank`` for formats; it is "?" before the ranks have met."""

    def __init__(self) -> None:
        super().__init__()
        self.rank: int | str = "?"

    def filter(self, record: logging.LogRecord) -> bool:
        record.rank = self.rank
        return True

    def level(self, name: str) -> None:
        """Set the logger's level, unless the program has set one."""
        if logger.level == logging.NOTSET:
            logger.setLevel(name.upper())


def start_logging() -> Ranked:
    """Prepare the logger: handlers of the program stay; where there are none, lines go to standard error."""
    ranked = next((one for one in logger.filters if isinstance(one, Ranked)), None)
    if ranked is None:
        ranked = Ranked()
        logger.addFilter(ranked)
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(FORMAT))
        logger.addHandler(handler)
    return ranked
