"""What is a GPU's own in selections and sparse means: one round trip per call, tiles, and arrays on the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cuda_on_cpu.driver import CpuDriver
from kernels.groups import AlignedArray
from kernels.layers import Layer, Layers
from kernels.standin import FOLDER

from gradcomp.kernels import dispatch, segments
from gradcomp.kernels.cuda.backend import CudaKernels

reference = dispatch.named("reference")


class DeviceArray(np.ndarray):
    """An array that a kernel finds by its address, as those of a GPU's frameworks are."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "data": (self.ctypes.data, not self.flags.writeable),
            "shape": self.shape,
            "strides": None if self.flags.c_contiguous else self.strides,
            "typestr": self.dtype.str,
            "version": 3,
        }


def on_device(array: Any) -> Any:
    return array.view(DeviceArray)


@pytest.fixture
def driver() -> CpuDriver:
    return CpuDriver(FOLDER, 2)


@pytest.fixture
def backend(driver: CpuDriver) -> CudaKernels:
    return CudaKernels(driver)


@pytest.mark.parametrize("count", [300, *(pytest.param(n, marks=pytest.mark.full) for n in (1, 2, 515, 600))])
def test_ties_at_the_borders_of_tiles(backend: CudaKernels, count: int) -> None:
    """More tiles than a block scans at once; the last key's elements lie in several of them."""
    length = 260 * 16384 + 5
    c = np.zeros(length, np.float32)
    c[16383::16384] = 1
    c[16384::16384] = -1
    c[257 * 16384 + 7] = 2
    result, expected = (
        [
            Layers([Layer(c), Layer(c[:20_000])]).select_top(each, [count, 2], zeros=zeros)[:3]
            for zeros in (True, False)
        ]
        for each in (backend, reference)
    )
    assert result == expected


def selection() -> tuple[Layers, Any, Any, Any, Any]:
    rng = np.random.default_rng(7)
    gradient = rng.normal(size=5000).astype(np.float32)
    layers = Layers([Layer(gradient), Layer(gradient[:100])], [gradient, gradient[:100]])
    return (layers, *layers.space([500, 10]))


def test_selections_that_lie_on_the_device(backend: CudaKernels) -> None:
    expected, (layers, counts, offsets, indices, values) = selection(), selection()
    places = on_device(indices), on_device(values)
    for each, flat, run in ((expected[0], expected[3:], reference), (layers, places, backend)):
        lists = counts, offsets, *flat, counts
        run.select_top(each.table, each.flags, each.factors, *lists, decay=1.0, zeros=False)
    assert (indices == expected[3]).all()
    assert values.tobytes() == expected[4].tobytes()
    for other in (expected[4], values):
        other[offsets[0] : offsets[0] + 500] += 1
    reference.put(expected[0].table, offsets, counts, *expected[3:])
    backend.put(layers.table, offsets, counts, *places)
    assert layers.next_residual_bytes() == expected[0].next_residual_bytes()
    taken = on_device(np.zeros_like(values))
    backend.take(layers.table, offsets, counts, places[0], taken)
    place = slice(offsets[0], offsets[0] + 500)
    assert (np.asarray(taken)[place] == values[place]).all()


def test_bad_lists_on_the_device_are_refused(backend: CudaKernels) -> None:
    layers, counts, offsets, indices, values = selection()
    indices[offsets[0] : offsets[0] + 500] = np.arange(500)
    indices[offsets[1] : offsets[1] + 10] = np.arange(10)
    indices[offsets[1] + 3] = 100
    before = layers.next_residual_bytes(), values.tobytes()
    places = on_device(indices), on_device(values)
    for kernel in (backend.take, backend.put):
        with pytest.raises(ValueError, match="row's length"):
            kernel(layers.table, offsets, counts, *places)
    layers.table["output"] = layers.table["next_residual"]
    columns = (np.zeros(2, np.uint8), offsets[None], counts[None], *places)
    for wrong, complaint in ((100, "row 1: indices are not ascending"), (4, "row 1: .* ascending")):
        indices[offsets[1] + 3] = wrong
        with pytest.raises(ValueError, match=complaint):
            backend.scatter_mean(layers.table, *columns, divisor=1.0, scale=1.0)
    indices[offsets[1] : offsets[1] + 10] = np.arange(91, 101)
    with pytest.raises(ValueError, match="row 1: an index is not below the length of 100"):
        backend.scatter_mean(layers.table, *columns, divisor=1.0, scale=1.0)
    assert (layers.next_residual_bytes(), values.tobytes()) == before


def test_arrays_of_the_device_are_checked(backend: CudaKernels) -> None:
    layers, counts, offsets, indices, values = selection()
    frozen = values.copy()
    frozen.flags.writeable = False
    shifted = np.zeros(values.nbytes + 1, np.uint8)[1:].view(np.float32)
    for wrong in (values.view(np.int32), values[::2], values[None], frozen, shifted):
        with pytest.raises(TypeError):
            backend.take(layers.table, offsets, counts, on_device(indices), on_device(wrong))
    with pytest.raises(ValueError, match="lie inside"):
        backend.take(layers.table, offsets, counts, on_device(indices), on_device(values[:20]))


@pytest.mark.parametrize("size", [2, 40, 3000])
def test_of_a_repeated_index_the_last_value_stays(backend: CudaKernels, size: int) -> None:
    rng = np.random.default_rng(size)
    next_residuals = []
    for each in (reference, backend):
        layers = Layers([Layer(np.zeros(size, np.float32))] * 2, [np.zeros(size, np.float32)] * 2)
        counts, offsets, indices, values = layers.space([5000, size])
        rng = np.random.default_rng(size)
        indices[offsets[0] : offsets[0] + 5000] = rng.integers(0, size, 5000)
        indices[offsets[1] : offsets[1] + size] = np.arange(size)
        # Also values that look like the numbers of items.
        values[:] = np.arange(1, len(values) + 1, dtype=np.uint32).view(np.float32)
        each.put(layers.table, offsets, counts, indices, values)
        next_residuals.append(layers.next_residual_bytes())
    assert next_residuals[0] == next_residuals[1]


def test_more_ranks_than_are_looked_up_together(backend: CudaKernels) -> None:
    rng = np.random.default_rng(8)
    ranks, length = 131, 2100
    lists = [np.sort(rng.choice(length, rng.integers(0, 600), replace=False)) for _ in range(ranks)]
    counts = np.array([[len(each)] for each in lists])
    offsets = np.cumsum(counts)[:, None] - counts
    indices = np.concatenate(lists).astype(np.uint32)
    values = rng.normal(size=len(indices)).astype(np.float32)
    outputs = []
    for each in (reference, backend):
        output = np.full(length, np.nan, np.float32)
        table = np.zeros(1, segments.SEGMENT)
        table["length"], table["output"] = length, output.ctypes.data
        flags = np.zeros(1, np.uint8)
        each.scatter_mean(table, flags, offsets, counts, indices, values, divisor=131.0, scale=0.5)
        outputs.append((flags.tolist(), output.tobytes()))
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("dtype", [segments.FLOAT32, segments.FLOAT16, segments.BFLOAT16])
def test_next_residuals_that_vectors_fit_into(backend: CudaKernels, dtype: int) -> None:
    rng = np.random.default_rng(5)
    layers = []
    for length in (127, 128, 135, 2048, 2176, 9000):
        gradient = rng.normal(size=length + 4).astype(segments.DTYPES[dtype])
        residual = rng.normal(size=length + 4).astype(np.float32)
        for gradient_at, residual_at in ((0, None), (0, 0), (0, 1), (4, 4), (1, 0), (2, 0), (None, 0)):
            layers.append(
                Layer(
                    None if gradient_at is None else gradient[gradient_at:][:length],
                    None if residual_at is None else residual[residual_at:][:length],
                    dtype=dtype,
                    factor=0.3,
                    length=length,
                )
            )
    wanted = [layer.length // 10 for layer in layers]
    results = []
    for each in (reference, backend):
        own = Layers(layers, memory=AlignedArray)
        results.append(
            [
                own.contribute(each, 0.9),
                own.select_top(each, wanted, 0.9),
                own.select_top(each, wanted, 0.9, zeros=False),
                own.select_above(each, [1.0] * len(layers), wanted),
                own.sample_thresholds(each, wanted, 3, 1),
                own.tail(each, [1.0] * len(layers)),
                own.squares(each),
            ]
        )
    assert results[0] == results[1]
