"""How much memory a measurement may take."""

from __future__ import annotations

from dataclasses import dataclass

from gradcomp.core.errors import ConfigError


@dataclass(frozen=True)
class Budget:
    """``nbytes`` beside what is measured; None: no limit. ``what``: what the memory is for, for messages."""

    nbytes: int | None
    what: str

    def allows(self, nbytes: int) -> bool:
        """Whether that is within the limit."""
        return self.nbytes is None or nbytes <= self.nbytes

    def less(self, nbytes: int) -> Budget:
        """What is left beside so many bytes."""
        return self if self.nbytes is None else Budget(self.nbytes - nbytes, self.what)

    def require(self, nbytes: int) -> None:
        """ConfigError that says how much is needed if it is not within the limit."""
        if not self.allows(nbytes):
            raise ConfigError(
                f"{self.what} takes {nbytes:,} bytes beside the values, {self.nbytes:,} are allowed; "
                "allow more, or leave these choices out"
            )
