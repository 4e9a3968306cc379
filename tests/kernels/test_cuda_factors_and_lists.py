"""What only a GPU's low-rank and index kernels have: tiles, parts that are summed later, arrays on the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cuda_on_cpu.driver import CpuDriver
from kernels.backends import ALL as ALL_BACKENDS
from kernels.calls import ANY_LENGTH, LISTS, MEMORY, WRITTEN, names_for, well_formed
from kernels.calls import call as invoke
from kernels.standin import FOLDER, cuda_backend
from kernels.test_lowrank import DTYPES, Layers, assert_close

from gradcomp.kernels import dispatch, reference_indices
from gradcomp.kernels.cuda.backend import CudaKernels
from gradcomp.kernels.cuda.call import described
from gradcomp.kernels.reference_indices import BITMAP, PACKED, RAW, index_bytes

CALLS = ("project", "back_project", "orthogonalise", "expand", "subtract")


class OnDevice:
    """An array as a framework hands it over: with an address, and no way to look into it."""

    def __init__(self, array: Any) -> None:
        self.__cuda_array_interface__ = array.__array_interface__
        self.nbytes, self.itemsize, self._length, self._array = (
            array.nbytes,
            array.itemsize,
            len(array),
            array,
        )

    def __len__(self) -> int:
        return self._length


class Aligned(Layers):
    """Matrices that lie on boundaries of sixteen bytes, as do their rows and factors: read as vectors."""

    GUARDS = 4

    def _unaligned(self, length: int, dtype: Any) -> Any:
        memory = np.zeros(16 + length * dtype.itemsize, np.uint8)
        begin = -(memory.ctypes.data + dtype.itemsize) % 16
        return memory[begin:][: length * dtype.itemsize].view(dtype)


@pytest.mark.parametrize("rank", [1, 4, 7, 12, 20, 36])
@pytest.mark.parametrize("dtype", DTYPES)
def test_matrices_of_whole_vectors(rank: int, dtype: int) -> None:
    shapes = [(8, 4), (64, 64), (300, 8), (36, 132), (4, 1028), (1028, 16)]
    layers = Aligned(shapes, rank, dtype)
    assert not (layers.table["gradient"] % 16).any()
    assert not (layers.p_at % 4 != 1).any()
    layers.project(cuda_backend())
    for i in range(len(shapes)):
        c = layers.contribution(i, 0.9)
        assert layers.matrix(layers.next_residuals, i).tobytes() == c.tobytes()
        assert_close(layers.P[i].T, c, layers.Q[i].T)
    layers.back_project(cuda_backend())
    for i in range(len(shapes)):
        assert_close(layers.Q[i], layers.P[i], layers.matrix(layers.next_residuals, i))
    layers.check_guards()


@pytest.mark.parametrize("rank", [1, 7, 36])
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_of_whole_vectors(rank: int, dtype: int) -> None:
    results = []
    for backend in (dispatch.named("reference"), cuda_backend()):
        layers = Aligned([(8, 4), (64, 64), (300, 8), (36, 132), (4, 1028)], rank, dtype)
        layers.expand(backend, divisor=3.0, scale=0.7)
        layers.subtract(backend)
        layers.check_guards()
        results.append(layers.bytes())
    assert results[0] == results[1]


ON_DEVICE = [kernel for kernel in WRITTEN if names_for(kernel) is ALL_BACKENDS]


def launched(kernel: str, rows: list[int], **changes: Any) -> list[str]:
    """What a call of these rows of the well-formed one launches; it waits once if that is anything."""
    given = well_formed(kernel) | changes
    for name, each in given.items():
        if isinstance(each, np.ndarray) and name not in ANY_LENGTH:
            given[name] = np.ascontiguousarray(each[..., rows])
    driver = CpuDriver(FOLDER, 2)
    invoke(CudaKernels(driver), kernel, given)
    MEMORY[:] = 1
    assert driver.synchronized == bool(driver.launched)
    return [name for name, _ in driver.launched]


@pytest.mark.parametrize(
    ("kernel", "changes"), [*((kernel, {}) for kernel in ON_DEVICE), ("select_top", {"zeros": True})]
)
def test_launches_do_not_grow_with_the_rows(kernel: str, changes: dict[str, Any]) -> None:
    one, two, many = (
        launched(kernel, [0, 1][:count] * (1 if count < 3 else 20), **changes) for count in (1, 2, 3)
    )
    assert one
    assert one == two == many
    assert len(one) <= 2 or kernel not in CALLS


@pytest.mark.parametrize("kernel", ON_DEVICE)
def test_nothing_is_launched_for_no_rows(kernel: str) -> None:
    assert launched(kernel, []) == []


@pytest.mark.parametrize("kernel", [*LISTS, "draw_indices"])
def test_nothing_is_left_to_do_for_empty_lists(kernel: str) -> None:
    assert set(launched(kernel, [0, 1], counts=np.zeros(2, np.int64))) <= {"add_counts"}


@pytest.mark.parametrize("rank", [33, 70])
def test_more_columns_than_fit_at_a_time(rank: int) -> None:
    layers = Layers([(37, 33), (70, 129)], rank)
    layers.project(cuda_backend())
    for i in range(2):
        assert_close(layers.P[i].T, layers.contribution(i, 0.9), layers.Q[i].T)
    layers.back_project(cuda_backend())
    for i in range(2):
        assert_close(layers.Q[i], layers.P[i], layers.matrix(layers.next_residuals, i))
    layers.check_guards()


def test_columns_are_orthogonalised_the_same_in_any_order_of_threads() -> None:
    shapes = [(1, 3), (900, 3), (3000, 3), (15, 3)]
    expected = Layers(shapes, 5)
    expected.orthogonalise(dispatch.named("reference"))
    for order in range(3):
        layers = Layers(shapes, 5)
        layers.orthogonalise(cuda_backend(order))
        assert layers.bytes() == expected.bytes()


@pytest.mark.parametrize("shape", [(1, 70 * 1024), (70 * 256, 1)])
def test_sums_of_many_parts(shape: tuple[int, int]) -> None:
    layers = Layers([(3, 5), shape], 1)
    layers.project(cuda_backend())
    assert_close(layers.P[1].T, layers.contribution(1, 0.9), layers.Q[1].T)
    layers.back_project(cuda_backend())
    assert_close(layers.Q[1], layers.P[1], layers.matrix(layers.next_residuals, 1))
    layers.check_guards()


def test_layers_of_several_ranks_in_a_call() -> None:
    results = []
    for backend in (dispatch.named("reference"), cuda_backend()):
        layers = Layers([(20, 30)] * 5, 12)
        layers.ranks[:] = (1, 4, 12, 0, 7)
        layers.project(backend)
        for i in range(5):
            r = layers.ranks[i]
            assert_close(layers.P[i][:r].T, layers.contribution(i, 0.9), layers.Q[i][:r].T)
            layers.P[i][:] = np.round(layers.P[i])  # where the backends agree
        for kernel in (layers.orthogonalise, layers.subtract, layers.expand):
            kernel(backend)
        results.append(layers.bytes())
    assert results[0] == results[1]


def test_whole_numbers_are_factors_too() -> None:
    results = []
    for backend, (decay, divisor, scale) in (
        (dispatch.named("reference"), (1.0, 3.0, 2.0)),
        (cuda_backend(), (1, 3, 2)),
    ):
        layers = Layers([(20, 30)], 3)
        layers.expand(backend, divisor, scale)
        layers.project(backend, decay)
        results.append([layers.next_residuals[0].tobytes(), layers.outputs[0].tobytes()])
    assert results[0] == results[1]


def test_factors_on_the_device() -> None:
    results = []
    for wrap in (lambda array: array, OnDevice):
        layers = Layers([(20, 30), (7, 33)], 3)
        p, q = layers.p, layers.q
        layers.p, layers.q = wrap(p), wrap(q)
        for call in CALLS:
            getattr(layers, call)(cuda_backend())
        layers.p, layers.q = p, q
        results.append(layers.bytes())
        layers.check_guards()
    assert results[0] == results[1]


def test_arrays_on_the_device_are_checked_by_what_they_say() -> None:
    array = np.zeros(10, np.float32)
    assert described(OnDevice(array)).ctypes.data == array.ctypes.data
    layers = Layers([(7, 33)], 2)
    for wrong in (np.zeros(80, np.float64), np.zeros((80, 1), np.float32), np.zeros(160, np.float32)[::2]):
        layers.p = OnDevice(wrong)
        with pytest.raises(TypeError):
            layers.project(cuda_backend())
    frozen = np.zeros(80, np.float32)
    frozen.flags.writeable = False
    layers.p = OnDevice(frozen)
    with pytest.raises(TypeError):
        layers.project(cuda_backend())
    layers.p = OnDevice(np.zeros(3, np.float32))
    with pytest.raises(ValueError, match="P does not lie inside"):
        layers.project(cuda_backend())


def test_lists_on_the_device() -> None:
    rng = np.random.default_rng(1)
    counts, lengths = np.array([30, 40, 0]), np.array([1000, 90, 7])
    layers, offsets = np.array([1, 2, 3], np.uint32), np.array([5, 35, 2])
    drawn, decoded = np.full(80, 7, np.uint32), np.full(80, 7, np.uint32)
    cuda_backend().draw_indices(lengths, counts, layers, offsets, OnDevice(drawn), seed=1, step=2, rank=3)
    codings = np.array([PACKED, BITMAP, RAW], np.int32)
    sizes = index_bytes(codings, lengths, counts)
    places, payload = np.array([3, 100, 0]), rng.integers(0, 256, 120).astype(np.uint8)
    expected = payload.copy()
    rows = (codings, lengths, counts, offsets)
    cuda_backend().encode_indices(*rows, OnDevice(drawn), places, OnDevice(payload))
    reference_indices.encode_indices(*rows, drawn, places, expected)
    assert payload.tobytes() == expected.tobytes()
    assert sizes.sum() < 100
    cuda_backend().decode_indices(*rows, OnDevice(decoded), places, OnDevice(payload))
    np.testing.assert_array_equal(decoded, drawn)


def test_what_is_wrong_with_a_list_is_said() -> None:
    """The first row, and of it what the reference would say."""
    rows = (np.array([RAW, PACKED], np.int32), np.array([9, 10]), np.array([2, 2]), np.array([0, 2]))
    for byte, complaint in ((0xFF, "padding"), (0x00, "number of bits")):
        payload = np.full(20, byte, np.uint8)
        payload[:8] = (1, 0, 0, 0, 2, 0, 0, 0)
        with pytest.raises(ValueError, match=f"row 1: .*{complaint}"):
            cuda_backend().decode_indices(*rows, np.zeros(4, np.uint32), np.array([0, 8]), payload)
    for listed, complaint in (([2, 1], "ascending"), ([2, 9], "not below")):
        with pytest.raises(ValueError, match=f"row 0: .*{complaint}"):
            cuda_backend().encode_indices(
                *rows, np.array([*listed, 5, 4], np.uint32), np.array([0, 8]), np.zeros(20, np.uint8)
            )
