"""A warning tells users whose steps apply no means: error feedback keeps nothing then, step after step."""

from __future__ import annotations

import logging

logger = logging.getLogger("gradcomp")

#: This many discarded exchanges in a row are no accident.
LIMIT = 3


class Discards:
    """Counts finished exchanges that were discarded in a row, and warns once."""

    def __init__(self) -> None:
        self._in_a_row = 0
        self._warned = False

    def count(self, *, speaks: bool) -> None:
        """Count a finite exchange with compression state that was discarded; warn if this rank ``speaks``."""
        self._in_a_row += 1
        if self._in_a_row < LIMIT or self._warned:
            return
        self._warned = True
        if speaks:
            logger.warning(
                "the means of the last %d exchanges were never applied by step(), so their residuals and momentum were "
                "not kept: without error feedback, what compression leaves out is lost. Update parameters with the "
                "optimizer's step(), not by hand, or compress without feedback",
                LIMIT,
            )

    def accepted(self) -> None:
        """Begin to count anew, since an exchange was committed."""
        self._in_a_row = 0
