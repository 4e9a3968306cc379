"""Where memory lies as a vector does, kernels read and write it by vectors; elsewhere they come to the same bytes."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import numpy as np
import pytest
from kernels import nvrtc
from kernels.groups import CODECS, Group, Segment
from kernels.layers import Layer, Layers
from kernels.standin import ORDERS, cuda_backend

from gradcomp.kernels import dispatch, reference, segments
from gradcomp.kernels.cuda.modules import Module, holding

MINMAX = {"GRADCOMP_CLASS": "MinMax"}
HALVES = {"float16": segments.FLOAT16, "bfloat16": segments.BFLOAT16}


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


def lying(array: Any, offset: int) -> Any:
    """A copy that begins so many elements behind a boundary of 256 bytes."""
    memory = np.zeros(array.nbytes + 512 + offset * array.itemsize, np.uint8)
    begin = -memory.ctypes.data % 256 + offset * array.itemsize
    copy = memory[begin:][: array.nbytes].view(array.dtype)
    copy[:] = array
    return copy


PLACES = [(0, 0), (8, 0), (4, 4), (1, 0), (2, 0), (0, 1)]
"""How far behind such a boundary a gradient and its residual begin: the first three are vectors."""


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("codec", ["minmax", "l2", "fp16"])
@pytest.mark.parametrize("dtype", HALVES.values(), ids=HALVES)
def test_half_precision_is_encoded_as_by_the_reference(dtype: int, codec: str, order: int) -> None:
    rng = np.random.default_rng(0)
    rows = []
    for length in (1024, 1023, 1537, 4096):  # buckets of both teams of a warp, whole and not
        for gradient_at, residual_at in PLACES:
            gradient = rng.normal(size=length).astype(segments.DTYPES[dtype])
            residual = rng.normal(size=length).astype(np.float32)
            rows.append(
                Segment(
                    lying(gradient, gradient_at),
                    lying(residual, residual_at) if len(rows) % 4 else None,
                    next_residual=True,
                    bucket_size=1024 if length == 4096 else 512,
                    dtype=dtype,
                    start=512 * len(rows),
                    layer=len(rows),
                )
            )
    group = Group(CODECS[codec], rows)
    for stochastic in (False, True):
        settings = {"stochastic": stochastic, "scale": 0.3, "decay": 0.7}
        assert group.encode(cuda_backend(order), **settings) == group.encode(reference, **settings)


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("dtype", HALVES.values(), ids=HALVES)
def test_half_precision_contributes_as_by_the_reference(dtype: int, order: int) -> None:
    rng = np.random.default_rng(0)
    layers, next_places = [], []
    for length in (128, 127, 300, 2048 + 128):
        for gradient_at, residual_at in PLACES:
            layers.append(
                Layer(
                    lying(rng.normal(size=length).astype(segments.DTYPES[dtype]), gradient_at),
                    lying(rng.normal(size=length).astype(np.float32), residual_at)
                    if len(layers) % 4
                    else None,
                    dtype=dtype,
                    factor=0.3,
                )
            )
            next_places.append(len(layers) % 3 == 2)
    found = []
    for backend in (dispatch.named("reference"), cuda_backend(order)):
        own = Layers(layers)
        nexts = [
            lying(np.zeros(layer.length, np.float32), int(odd))
            for layer, odd in zip(layers, next_places, strict=True)
        ]
        own.table["next_residual"] = [each.ctypes.data for each in nexts]
        backend.contribute(own.table, own.flags, own.factors, decay=0.7)
        found.append((own.flags.tolist(), [each.tobytes() for each in nexts]))
    assert found[0] == found[1]
