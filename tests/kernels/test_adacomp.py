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


SPOILED = {
    "length": {"table": {"length": -1}},
    "no next residual": {"table": {"next_residual": 0}},
    "float64": {"table": {"dtype": segments.FLOAT64}},
    "offset": {"offsets": np.array([3], np.int64)},
    "offset wraps": {"offsets": np.array([2**63 - 1], np.int64)},
    "limit": {"limits": np.array([-1], np.int64)},
    "limit beyond": {"limits": np.array([7], np.int64)},
    "bin": {"bin_size": 0},
    "negative bin": {"bin_size": -5},
    "found": {"found": np.zeros(2, np.int64)},
    "factors": {"factors": np.zeros(0, np.float32)},
}
MISTYPED = {
    "found": np.zeros(1, np.int32),
    "factors": np.zeros(1),
    "indices": np.zeros(6, np.int64),
    "values": np.zeros(6),
    "limits": np.zeros(1, np.int32),
}


def spoiled(backend: str, **changes: Any) -> list[bytes]:
    c = np.ones(8, np.float32)
    table = np.zeros(1, segments.SEGMENT)
    table["length"], table["next_residual"], table["gradient"] = 8, c.ctypes.data, c.ctypes.data
    for column, value in changes.pop("table", {}).items():
        table[column] = value
    arguments = {
        "factors": np.ones(1, np.float32),
        "limits": np.full(1, 4, np.int64),
        "offsets": np.full(1, 2, np.int64),
        "indices": np.full(6, 7, np.uint32),
        "values": np.full(6, 7, np.float32),
        "found": np.full(1, 7, np.int64),
        "bin_size": 4,
    } | changes
    *positional, bin_size = arguments.values()
    try:
        BACKENDS[backend].select_adacomp(table, *positional, bin_size=bin_size)
    finally:
        written = (arguments[name] for name in ("indices", "values", "found"))
        assert changes == {} or all((array == array.flat[0]).all() for array in written)
    return [arguments[name].tolist() for name in ("indices", "found")]


@pytest.mark.parametrize("backend", BACKENDS)
def test_plain_arguments_are_accepted(backend: str) -> None:
    assert spoiled(backend) == [[7, 7, 0, 1, 2, 3], [4]]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("changes", SPOILED.values(), ids=SPOILED)
def test_malformed_calls_are_refused_before_anything_is_written(
    backend: str, changes: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=r"."):
        spoiled(backend, **changes)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", MISTYPED)
def test_arrays_of_another_type_are_refused(backend: str, name: str) -> None:
    with pytest.raises(TypeError):
        spoiled(backend, **{name: MISTYPED[name]})
