"""How gradcomp's lines reach a log: on the logger ``gradcomp``, each with its rank."""

from __future__ import annotations

import logging

logger = logging.getLogger("gradcomp")

FORMAT = "gradcomp %(levelname)s rank %(rank)s: %(message)s"


class Ranked(logging.Filter):
    """Give every record of the logger an attribute ``rank``, which formats may name; "?" before ranks have met."""

    def __init__(self) -> None:
        super().__init__()
        self.rank: int | str = "?"

    def filter(self, record: logging.LogRecord) -> bool:
        """Nothing is held back."""
        record.rank = self.rank
        return True

    def level(self, name: str) -> None:
        """The level of the logger, where the program has not set one."""
        if logger.level == logging.NOTSET:
            logger.setLevel(name.upper())


def start_logging() -> Ranked:
    """Be heard: a program that has configured logging keeps its configuration, others get lines on standard error."""
    ranked = next((one for one in logger.filters if isinstance(one, Ranked)), None)
    if ranked is None:
        ranked = Ranked()
        logger.addFilter(ranked)
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(FORMAT))
        logger.addHandler(handler)
    return ranked
