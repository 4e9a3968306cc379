"""Cast sends half-precision (or plain float32) values, and adds them in float32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from gradcomp.compress.base import Coded, Traits
from gradcomp.compress.bounds import Distortion
from gradcomp.compress.checks import check_flag, check_word
from gradcomp.compress.identity import CAST_BLOCK
from gradcomp.compress.registry import abbreviate, register
from gradcomp.core.errors import ConfigError
from gradcomp.core.layers import LayerSpec
from gradcomp.core.plan import Level
from gradcomp.kernels.codec import Codec, Table
from gradcomp.kernels.segments import BF16, FP16, FP32

_KINDS = {"float32": FP32, "float16": FP16, "bfloat16": BF16}

#: The number of elements that share one power-of-two scale in the float16 codec.
FP16_BLOCK = 512

#: The two functions of a coder: from a tensor to what is sent and a context, and back.
Coder = tuple[Callable[[Any], tuple[Any, Any]], Callable[[Any, Any], Any]]

#: A frontend adds its coder for tensors that travel in "float16" or "bfloat16", by the framework's package.
CODERS: dict[str, Callable[[str], Coder]] = {}


@register("cast")
@dataclass(frozen=True)
class Cast(Coded):
    """Round every value to ``dtype``: float16, bfloat16, or float32 (exact: how excluded layers travel).

    Sums are float32, and the mean is rounded once more before it is sent back. Float16 values are scaled per block of
    512 by a power of two, so that neither a large loss scale overflows nor a small gradient vanishes.
    Wire, per element and direction: 2 bytes (+ 4/512 for float16), or 4. Two rounds under scatter-reduce-allgather.
    State: a residual per layer with ``feedback`` (off by default: rounding to nearest has no systematic direction).
    Errors: ConfigError for another dtype, and for a feedback that is neither true nor false.
    """

    dtype: str = "bfloat16"
    feedback: bool = False

    def __post_init__(self) -> None:
        check_word("cast dtype", self.dtype, _KINDS)
        check_flag("feedback", self.feedback)

    def compress(self, tensor: Any) -> tuple[Any, Any]:
        """Return a PyTorch or TensorFlow tensor as collectives send it, and the context of :meth:`decompress`."""
        return self._coder(tensor)[0](tensor)

    def decompress(self, tensor: Any, context: Any) -> Any:
        """Return the tensor in the dtype that it had before :meth:`compress`."""
        return self._coder(tensor)[1](tensor, context)

    def _coder(self, tensor: Any) -> Coder:
        for kind in type(tensor).__mro__:
            if (package := kind.__module__.partition(".")[0]) in CODERS:
                return CODERS[package](self.dtype)
        raise ConfigError(f"not a tensor of {' or '.join(CODERS) or 'a framework'}: {type(tensor).__name__}")

    @cached_property
    def traits(self) -> Traits:
        """Return a residual with ``feedback``, unless nothing is lost."""
        exact = self.dtype == "float32"
        return Traits(keeps_residual=self.feedback and not exact, reduces=True, exact=exact)

    def distortion(self, layer: LayerSpec) -> Distortion:
        relative = {"float32": 0.0, "float16": 2.0**-10, "bfloat16": 2.0**-8}[self.dtype]
        return Distortion(relative**2, self.traits.exact, relative)

    def codec_for(self, table: Table) -> Codec:
        return Codec(_KINDS[self.dtype])

    def fill(self, table: Table, level: Level) -> None:
        table["level"] = 0
        table["bucket_size"] = FP16_BLOCK if self.dtype == "float16" else CAST_BLOCK

    def cut_elements(self, layer: LayerSpec) -> int:
        """Return the size of a scaling block for float16, else that of a cache line."""
        return FP16_BLOCK if self.dtype == "float16" else CAST_BLOCK


abbreviate("fp16", Cast("float16"))
abbreviate("bf16", Cast("bfloat16"))
