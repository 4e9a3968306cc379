"""What ``compression=`` of a collective may be: half precision on the wire, or the user's own pair of functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gradcomp.compress import Compressor
from gradcomp.compress.identity import Identity
from gradcomp.compress.quantise.cast import Cast
from gradcomp.compress.registry import from_string
from gradcomp.core.errors import ConfigError

Compress = Callable[[torch.Tensor], tuple[torch.Tensor, Any]]
Decompress = Callable[[torch.Tensor, Any], torch.Tensor]

_HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def coder_of(compression: Any) -> tuple[Compress, Decompress, str | None]:
    """What is done before and behind a collective, and why the argument is not one.

    ``Compression.none``, ``.fp16`` and ``.bf16``, their strings, or what has functions ``compress(tensor)``, which
    returns a tensor and a context, and ``decompress(tensor, context)``, as compressors of Horovod's users have.
    """
    try:
        chosen = from_string(compression) if isinstance(compression, str) else compression
    except ConfigError as error:
        return _keep, _restore, str(error)
    if isinstance(chosen, Identity):
        return _keep, _restore, None
    if isinstance(chosen, Cast) and chosen.dtype in _HALVES:
        return _to(_HALVES[chosen.dtype]), _restore, None
    if not isinstance(chosen, Compressor) and hasattr(chosen, "compress") and hasattr(chosen, "decompress"):
        return chosen.compress, chosen.decompress, None
    told = chosen.to_string() if isinstance(chosen, Compressor) else repr(chosen)
    return _keep, _restore, f"compression must be Compression.none, fp16 or bf16 here, got {told}"


def _keep(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
    return tensor, None


def _restore(tensor: torch.Tensor, dtype: Any) -> torch.Tensor:
    return tensor if dtype is None else tensor.to(dtype)


def _to(half: torch.dtype) -> Compress:
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        if isinstance(tensor, torch.Tensor) and tensor.dtype in (torch.float32, torch.float64):
            return tensor.to(half), tensor.dtype
        return tensor, None

    return compress
