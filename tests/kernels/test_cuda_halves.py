"""Half precision has instructions on a GPU, and kernels use them."""

from __future__ import annotations

import re

import pytest
from kernels import nvrtc

from gradcomp.kernels.cuda.modules import Module, holding

SCALED_HALF = {"GRADCOMP_CLASS": "ScaledHalf"}


@pytest.mark.parametrize(
    ("module", "instructions"),
    [
        (holding("encode.cu", "encode_nearest", SCALED_HALF), ("cvt.rn.f16.f32", "cvt.f32.f16")),
        (holding("decode.cu", "decode", SCALED_HALF), ("cvt.rn.f16.f32", "cvt.f32.f16", "cvt.rn.bf16.f32")),
        (holding("sums.cu", "squares", {}), ("cvt.f32.f16",)),
    ],
    ids=str,
)
def test_half_precision_is_converted_by_an_instruction(module: Module, instructions: tuple[str, ...]) -> None:
    assert set(instructions) <= set(re.findall(r"\bcvt[.\w]+", nvrtc.ptx(module, 80)))


def test_bfloat16_is_rounded_by_integers_where_there_is_no_instruction() -> None:
    module = holding("encode.cu", "encode_nearest", {"GRADCOMP_CLASS": "Bfloat16"})
    assert "bf16" not in nvrtc.ptx(module, 75)
