"""``compression=`` of a collective on torch tensors."""

from __future__ import annotations

from typing import Any

import torch

from gradcomp.compress.quantise.cast import CODERS, Coder
from gradcomp.job import coding

_HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def coder_of(compression: Any) -> tuple[Coder, str | None]:
    """Return the coder of a ``compression=`` argument, see :func:`gradcomp.job.coding.coder_of`.

    float32 and float64 tensors travel in the half precision that it names.
    """
    return coding.coder_of(compression, _to, (_keep, _restore))


def _keep(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
    return tensor, None


def _restore(tensor: torch.Tensor, dtype: Any) -> torch.Tensor:
    return tensor if dtype is None else tensor.to(dtype)


def _to(half: str) -> Coder:
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        if isinstance(tensor, torch.Tensor) and tensor.dtype in (torch.float32, torch.float64):
            return tensor.to(_HALVES.get(half, torch.float32)), tensor.dtype
        return tensor, None

    return compress, _restore


CODERS["torch"] = _to
