"""Half precision has instructions on a GPU, and kernels use them."""

from __future__ import annotations

import re

import pytest
from kernels import nvrtc


@pytest.mark.parametrize(
    ("name", "instructions"),
    [
        ("encode.cu", {"cvt.rn.f16.f32", "cvt.f32.f16"}),
        ("decode.cu", {"cvt.rn.f16.f32", "cvt.f32.f16", "cvt.rn.bf16.f32"}),
        ("sums.cu", {"cvt.f32.f16"}),
    ],
)
def test_half_precision_is_converted_by_an_instruction(name: str, instructions: set[str]) -> None:
    text = nvrtc.ptx(name, {} if name == "sums.cu" else {"GRADCOMP_CLASS": "ScaledHalf"}, 80)
    assert instructions <= set(re.findall(r"\bcvt[.\w]+", text))


def test_bfloat16_is_rounded_by_integers_where_there_is_no_instruction() -> None:
    assert "bf16" not in nvrtc.ptx("encode.cu", {"GRADCOMP_CLASS": "Bfloat16"}, 75)
