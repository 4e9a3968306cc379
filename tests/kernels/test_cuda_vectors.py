"""Where memory lies as a vector does, kernels read and write it by vectors."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from kernels import nvrtc

from gradcomp.kernels.cuda.modules import Module, holding

MINMAX = {"GRADCOMP_CLASS": "MinMax"}


def accesses(module: Module, kernel: str, operation: str) -> Counter[int]:
    """How many instructions of a kernel load ("ld") or store ("st") so many bytes of global memory."""
    text = nvrtc.ptx(module, 90)
    body = re.split(r"\.visible \.entry ", text[text.index(f".entry {kernel}(") :])[0]
    found = re.findall(rf"\b{operation}\.(?:global\.)?(?:cs\.)?(?:v(\d)\.)?[a-z](\d+)\b", body)
    return Counter(int(count or 1) * int(bits) // 8 for count, bits in found)


@pytest.mark.parametrize(
    ("module", "kernel", "wide", "elements"),
    [
        # Four rows of four elements, and of NaN: sixteen bytes of float32, eight in half precision.
        (holding("expand.cu", "expand", {}), "expand", {16: 8, 8: 8}, 32),
        (holding("expand.cu", "subtract", {}), "subtract", {16: 4}, 16),
        # Eight elements, and NaN: two stores of float32, one in half precision.
        (holding("scatter.cu", "scatter", {}), "scatter", {16: 6}, 16),
        # Four strips, and NaN: two stores where a team's strips are whole, and as above where they are not.
        (holding("decode.cu", "decode", MINMAX), "decode", {16: 25}, 40),
        (holding("decode.cu", "decode_add", MINMAX), "decode_add", {16: 16}, 32),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_stores_are_not_split(module: Module, kernel: str, wide: dict[int, int], elements: int) -> None:
    """`elements` of each dtype are stored one by one, where there is no vector: at the end, and at odd addresses."""
    found = accesses(module, kernel, "st")
    for nbytes, count in wide.items():
        assert found[nbytes] >= count
    assert found[4] <= elements
    assert found[2] <= elements


@pytest.mark.parametrize(
    ("module", "kernel", "at_once"),
    [
        (holding("encode.cu", "encode_nearest", MINMAX), "encode_nearest", 4),
        (holding("encode.cu", "encode_stochastic", MINMAX), "encode_stochastic", 4),
        (holding("select.cu", "contribute", {}), "contribute", 2),
        (holding("select.cu", "contribute_histogram", {}), "contribute_histogram", 2),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_gradients_in_half_precision_are_read_four_at_a_time(
    module: Module, kernel: str, at_once: int
) -> None:
    """Several such loads are under way at a time; those of float32 have sixteen bytes, and there are as many."""
    body = nvrtc.ptx(module, 90).split(f".entry {kernel}(")[1].split(".visible .entry")[0]
    assert body.count("ld.global.cs.v2.u32") >= at_once
    assert body.count("ld.global.cs.v4.f32") >= at_once
