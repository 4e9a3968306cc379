"""AdaComp's selection: the reference is its definition spelled out, and the compiled one gives the same bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from kernels.isas import NATIVE
from kernels.layers import Layer, Layers
from kernels.standin import ORDERS, cuda_backend
from tiers import examples

from gradcomp.kernels import dispatch, segments

BACKENDS: dict[str, Any] = {"reference": dispatch.named("reference"), "native": NATIVE}
BACKENDS |= {name: cuda_backend(order) for name, order in ORDERS.items()}
OTHERS = [name for name in BACKENDS if name != "reference"]
EXACT = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, -3.0, 1e-45, 3e38, np.inf, np.nan]) | st.floats(width=32)


def select(
    backend: str, layers: list[Layer], contributions: list[Any], limits: list[int], bin_size: int
) -> Any:
    memory = Layers(layers, contributions)
    numbers, offsets, indices, values = memory.space(limits)
    found = np.full(len(layers), -1, np.int64)
    BACKENDS[backend].select_adacomp(
        memory.table, memory.factors, numbers, offsets, indices, values, found, bin_size=bin_size
    )
    return memory.selections(offsets, found, indices, values), values.tobytes()


def spelled_out(c: Any, step: Any, bin_size: int, limit: int) -> list[int]:
    chosen = []
    for begin in range(0, len(c), bin_size):
        places = range(begin, min(begin + bin_size, len(c)))
        largest = max((abs(c[i]) for i in places if not np.isnan(c[i])), default=0)
        chosen += [i for i in places if largest > 0 and abs(c[i] + step[i]) >= largest]
    return sorted(sorted(chosen, key=lambda i: (-abs(c[i]), i))[:limit])


@examples(300)
@given(st.integers(0, 30), st.integers(1, 12), st.data())
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_definition(size: int, bin_size: int, data: Any) -> None:
    arrays = hnp.arrays(np.float32, size, elements=EXACT, fill=st.nothing())
    gradient, c = data.draw(arrays), data.draw(arrays)
    limit = data.draw(st.integers(0, size + 2))
    layer = Layer(gradient, factor=0.5)
    (chosen,), _ = select("reference", [layer], [c], [limit], bin_size)
    assert chosen == spelled_out(c, np.float32(0.5) * gradient, bin_size, limit)
    expected = select("reference", [layer], [c], [limit], bin_size)
    for backend in OTHERS:
        assert select(backend, [layer], [c], [limit], bin_size) == expected


@pytest.mark.parametrize("bin_size", [1, 2, 50, 500, 10**6, 2**62])
def test_backends_give_the_same_bytes(bin_size: int) -> None:
    rng = np.random.default_rng(0)
    layers, contributions, limits = [], [], []
    for length in (0, 1, 2, 49, 50, 51, 500, 3001):
        for dtype in (segments.FLOAT32, segments.FLOAT16, segments.BFLOAT16):
            for absent in (False, True):
                gradient = (rng.standard_normal(length) * 10.0 ** rng.integers(-8, 4, length)).astype(
                    segments.DTYPES[dtype]
                )
                layers.append(
                    Layer(None if absent else gradient, dtype=dtype, factor=0.3 + length, length=length)
                )
                contributions.append(rng.standard_normal(length).astype(np.float32))
                limits.append(min(length, 40))
    expected = select("reference", layers, contributions, limits, bin_size)
    for backend in OTHERS:
        assert select(backend, layers, contributions, limits, bin_size) == expected


@pytest.mark.parametrize("dtype", [segments.FLOAT16, segments.BFLOAT16])
def test_every_half_precision_number_is_read(dtype: int) -> None:
    gradient = np.arange(1 << 16, dtype=np.uint16).view(segments.DTYPES[dtype])
    # An element qualifies when its gradient is at least that of its neighbour: all magnitudes are compared.
    c = np.where(np.arange(1 << 16) % 2, np.float32(0), np.abs(np.roll(gradient, -1).astype(np.float32)))
    layers = [Layer(gradient, dtype=dtype)]
    with np.errstate(all="ignore"):
        results = [select(backend, layers, [c], [1 << 16], 2) for backend in BACKENDS]
    assert all(result == results[0] for result in results)
    assert len(results[0][0][0]) > 30_000
