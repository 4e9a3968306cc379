"""The memory limit of a measurement."""

from __future__ import annotations

from dataclasses import dataclass

from gradcomp.core.errors import ConfigError


@dataclass(frozen=True)
class Budget:
    """A memory limit of ``nbytes`` besides the measured values; None for no limit. Messages begin with ``what``."""

    nbytes: int | None
    what: str

    def allows(self, nbytes: int) -> bool:
        """Returns true if ``nbytes`` are within the limit."""
        return self.nbytes is None or nbytes <= self.nbytes

    def less(self, nbytes: int) -> Budget:
        """Returns the budget that is left after ``nbytes`` were used."""
        return self if self.nbytes is None else Budget(self.nbytes - nbytes, self.what)

    def require(self, nbytes: int) -> None:
        """Raises ConfigError, with the bytes that are needed, if ``nbytes`` are not within the limit."""
        if not self.allows(nbytes):
            raise ConfigError(
                f"{self.what} takes {nbytes:,} bytes beside the values, memory_bytes allows {self.nbytes:,}; "
                "allow more, or leave these choices out"
            )
