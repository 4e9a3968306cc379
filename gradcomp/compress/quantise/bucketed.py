"""Bucketed is the base of the compressors that quantise bucket by bucket."""

from __future__ import annotations

from collections.abc import Collection

from gradcomp.compress.base import Coded
from gradcomp.core.errors import ConfigError
from gradcomp.core.layers import LayerSpec
from gradcomp.core.plan import Level
from gradcomp.kernels.codec import Table

#: This bucket size stands for a whole layer: no quantisation bucket can be larger.
WHOLE_LAYER = 2**31 - 1


class Bucketed(Coded):
    """Base of the compressors whose quantisation buckets of ``bucket_size`` consecutive values share a scale record.

    None: all values of a layer share one. A layer is cut between quantisation buckets only, so with None it travels,
    and is added up, in one piece. The level, if there is one, is the number of bits of a code; otherwise that is
    ``code_bits``.
    """

    bucket_size: int | None

    @property
    def code_bits(self) -> int:
        """Return the bits of a code, for a compressor without a level."""
        return 1

    def fill(self, table: Table, level: Level) -> None:
        table["level"] = self.code_bits if level is None else level
        table["bucket_size"] = self.bucket_size or WHOLE_LAYER

    def cut_elements(self, layer: LayerSpec) -> int:
        """Return the bucket size, so that no cut changes a scale."""
        return self.bucket_size or WHOLE_LAYER


def check_bucket_size(size: int | None, name: str = "bucket_size") -> None:
    """Raise ConfigError unless the size is a whole number from 1 on, or None."""
    if size is None:
        return
    if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= WHOLE_LAYER:
        raise ConfigError(f"{name} must be a whole number of at least 1, or none, got {size!r}")


def check_word(name: str, word: str, words: Collection[str]) -> None:
    """Raise ConfigError unless ``word`` is one of ``words``."""
    if word not in words:
        raise ConfigError(f"{name} must be one of {', '.join(words)}, got {word!r}")


def check_feedback(feedback: bool | None, *, or_none: bool = False) -> None:
    """Raise ConfigError unless ``feedback`` is a bool, or None where that is allowed."""
    if not isinstance(feedback, bool) and not (or_none and feedback is None):
        raise ConfigError(
            f"feedback must be true{', false or none' if or_none else ' or false'}, got {feedback!r}"
        )
