"""Half-precision (or plain float32) on the wire, float32 in every sum."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from gradcomp.compress.base import Coded, Traits
from gradcomp.compress.bounds import Distortion
from gradcomp.compress.identity import CAST_BLOCK
from gradcomp.compress.registry import abbreviate, register
from gradcomp.core.errors import ConfigError
from gradcomp.core.layers import LayerSpec
from gradcomp.core.plan import Level
from gradcomp.kernels.codec import Codec, Table
from gradcomp.kernels.segments import BF16, FP16, FP32

_KINDS = {"float32": FP32, "float16": FP16, "bfloat16": BF16}

#: Elements that share one power-of-two scale in the float16 codec.
FP16_BLOCK = 512

#: From a tensor to what travels and a context, and back.
Coder = tuple[Callable[[Any], tuple[Any, Any]], Callable[[Any, Any], Any]]

#: By the package of a framework, what its frontend does with tensors that travel in "float16" or "bfloat16".
CODERS: dict[str, Callable[[str], Coder]] = {}


@register("cast")
@dataclass(frozen=True)
class Cast(Coded):
    """Round every value to ``dtype``: float16, bfloat16, or float32 (exact: how excluded layers travel).

    Means are added in float32 and rounded once more for the way back. Float16 values are scaled per block of 512 by a
    power of two (4 bytes a block), so that neither a large loss scale overflows nor a small gradient vanishes.
    Wire, per element and direction: 2 bytes (+ 4/512 for float16), or 4. Two rounds under scatter-reduce-allgather.
    State: a residual with ``feedback`` (off by default: rounding to nearest has no systematic direction).
    """

    dtype: str = "bfloat16"
    feedback: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in _KINDS:
            raise ConfigError(f"cast dtype must be one of {', '.join(_KINDS)}, got {self.dtype!r}")
        if not isinstance(self.feedback, bool):
            raise ConfigError(f"feedback must be true or false, got {self.feedback!r}")

    def compress(self, tensor: Any) -> tuple[Any, Any]:
        """Horovod's: a tensor of PyTorch or TensorFlow as a collective sends it, and what :meth:`decompress` needs."""
        return self._coder(tensor)[0](tensor)

    def decompress(self, tensor: Any, context: Any) -> Any:
        """Horovod's: the tensor in the dtype that it had."""
        return self._coder(tensor)[1](tensor, context)

    def _coder(self, tensor: Any) -> Coder:
        for kind in type(tensor).__mro__:
            if (package := kind.__module__.partition(".")[0]) in CODERS:
                return CODERS[package](self.dtype)
        raise ConfigError(f"not a tensor of {' or '.join(CODERS) or 'a framework'}: {type(tensor).__name__}")

    @cached_property
    def traits(self) -> Traits:
        """A residual with ``feedback``, unless nothing is lost."""
        return Traits(
            keeps_residual=self.feedback and self.dtype != "float32",
            reduces=True,
            exact=self.dtype == "float32",
        )

    def distortion(self, layer: LayerSpec) -> Distortion:
        """By the digits of the dtype."""
        relative = {"float32": 0.0, "float16": 2.0**-10, "bfloat16": 2.0**-8}[self.dtype]
        return Distortion(relative**2, self.traits.exact, relative)

    def codec_for(self, table: Table) -> Codec:
        """The codec of the wire dtype."""
        return Codec(_KINDS[self.dtype])

    def fill(self, table: Table, level: Level) -> None:
        """No level; float16 has scaling blocks."""
        table["level"] = 0
        table["bucket_size"] = FP16_BLOCK if self.dtype == "float16" else CAST_BLOCK

    def cut_elements(self, layer: LayerSpec) -> int:
        """A scaling block for float16, else one cache line."""
        return FP16_BLOCK if self.dtype == "float16" else CAST_BLOCK


abbreviate("fp16", Cast("float16"))
abbreviate("bf16", Cast("bfloat16"))
