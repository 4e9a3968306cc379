"""Interprets ``compression=`` of a collective: half precision on the wire, or the user's own pair of functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gradcomp.compress import Compressor
from gradcomp.compress.identity import Identity
from gradcomp.compress.quantise.cast import Cast, Coder
from gradcomp.compress.registry import from_string
from gradcomp.core.errors import ConfigError

_HALVES = ("float16", "bfloat16")


def coder_of(compression: Any, half: Callable[[str], Coder], none: Coder) -> tuple[Coder, str | None]:
    """Return what is applied before and after a collective, and an error text if the argument is invalid.

    ``compression`` is ``Compression.none``, ``.fp16`` or ``.bf16``, a string for one of them, or an object like
    Horovod's compressors: ``compress(tensor)`` returns a tensor and a context, and ``decompress(tensor, context)``
    undoes it. ``half`` returns the framework's coder for "float16" or "bfloat16"; ``none`` is the coder that does
    nothing.
    """
    try:
        chosen = from_string(compression) if isinstance(compression, str) else compression
    except ConfigError as error:
        return none, str(error)
    if isinstance(chosen, Identity):
        return none, None
    if isinstance(chosen, Cast) and chosen.dtype in _HALVES:
        return half(chosen.dtype), None
    if not isinstance(chosen, Compressor) and hasattr(chosen, "compress") and hasattr(chosen, "decompress"):
        return (chosen.compress, chosen.decompress), None
    told = chosen.to_string() if isinstance(chosen, Compressor) else repr(chosen)
    return none, f"compression must be Compression.none, fp16 or bf16 here, got {told}"
