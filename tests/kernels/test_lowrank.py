"""The low-rank kernels: against float64, against each other byte for byte, and their promises one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from kernels.backends import COMPILED, REFERENCE, each_of
from kernels.isas import available_isas, instruction_set
from kernels.standin import ORDERS, device

from gradcomp.kernels import dispatch, philox, random_factors, segments
from gradcomp.kernels.devices import HOST
from gradcomp.kernels.dispatch import BASELINE_RANKS
from gradcomp.kernels.segments import Factor, Shapes
from gradcomp.testing.simulation import shared

SHAPES = [(1, 1), (1, 7), (1, 100), (7, 1), (100, 1), (3, 5), (64, 65), (300, 7), (5, 16), (37, 33), (2, 48)]
LARGE = [(5, 1025), (3, 9000), (70, 1000)]  # wider than a tile, or long enough to pass the cache by
RANKS = (*range(1, 10), 32)
DTYPES = (segments.FLOAT32, segments.FLOAT16, segments.BFLOAT16)
EACH = ("reference", *COMPILED)
BACKEND = each_of(EACH)


def each_backend(names: str, cases: Sequence[tuple[Any, ...]], *, but_cuda: Sequence[tuple[Any, ...]]) -> Any:
    """Parametrise a test by backends and cases, some of which are not for a GPU, which reads aligned floats only."""
    every = [*cases, *but_cuda]
    params = [(name, *case) for name in EACH for case in (cases if name in ORDERS else every)]
    taken = ("backend", *names.split())

    def decorate(test: Any) -> Any:
        return pytest.mark.factors(*taken)(pytest.mark.parametrize(taken, params, indirect=["backend"])(test))

    return decorate


def shapes_for(rank: int) -> list[tuple[int, int]]:
    """Matrices of all kinds; large ones only for some ranks, which take each way through the kernels."""
    return SHAPES + (LARGE if rank in (1, 4, 9) else [])


class Layers:
    """Matrices with everything that a call needs, deterministic, between guards that nobody may touch.

    `shift`: bytes by which addresses miss their alignment, beyond that of a guard element.
    """

    GUARDS = 1  # between two factors

    def __init__(
        self, shapes: Sequence[tuple[int, int]], rank: int, dtype: int = segments.FLOAT32, shift: int = 0
    ) -> None:
        rng = np.random.default_rng(rank)
        self.rng, self.shapes, self.shift = rng, shapes, shift
        self.rows = np.array([n for n, _ in shapes], np.int64)
        self.columns = np.array([m for _, m in shapes], np.int64)
        self.ranks = np.full(len(shapes), rank, np.int64)
        self.table = np.zeros(len(shapes), segments.SEGMENT)
        self.table["length"] = self.rows * self.columns
        self.table["dtype"] = dtype
        self.flags = np.zeros(len(shapes), np.uint8)
        self.factors = rng.uniform(0.5, 2, len(shapes)).astype(np.float32)
        self.gradients = self._column("gradient", segments.DTYPES[dtype])
        self.residuals = self._column("residual", np.dtype(np.float32))
        self.next_residuals = self._column("next_residual", np.dtype(np.float32))
        self.outputs = self._column("output", segments.DTYPES[dtype])
        self.p, self.p_at, self.P = self._factor(self.rows)
        self.q, self.q_at, self.Q = self._factor(self.columns)
        self.guards = [(flat, np.isnan(flat)) for flat in (self.p, self.q)]

    def _unaligned(self, length: int, dtype: Any) -> Any:
        memory = np.zeros(self.shift + length * dtype.itemsize, np.uint8)
        return memory[self.shift :].view(dtype)

    def _column(self, name: str, dtype: np.dtype[Any]) -> list[Any]:
        arrays = []
        for i, (n, m) in enumerate(self.shapes):
            memory = self._unaligned(n * m + 2, dtype)
            memory[:] = np.nan
            memory[1:-1] = self.rng.standard_normal(n * m)
            self.table[name][i] = memory[1:].ctypes.data
            arrays.append(memory)
        return arrays

    def _factor(self, lengths: Any) -> tuple[Any, Any, list[Any]]:
        """The flat array, with a guard before and behind each factor, the places, and views of the factors."""
        sizes = lengths * self.ranks
        at = 1 + np.cumsum(sizes + self.GUARDS) - (sizes + self.GUARDS)
        flat = self._unaligned(int((sizes + self.GUARDS).sum()) + 1, np.dtype(np.float32))
        flat[:] = np.nan
        views = [
            flat[a : a + s].reshape(-1 if s else 0, n) for a, s, n in zip(at, sizes, lengths, strict=True)
        ]
        for view in views:
            view[:] = self.rng.standard_normal(view.shape)
        return flat, at, views

    def matrix(self, arrays: list[Any], i: int) -> Any:
        return arrays[i][1:-1].reshape(self.shapes[i])

    def contribution(self, i: int, decay: float) -> Any:
        """M in float32, as the kernels have to compute it."""
        c = self.factors[i] * self.matrix(self.gradients, i).astype(np.float32)
        return c + np.float32(decay) * self.matrix(self.residuals, i)

    def check_guards(self) -> None:
        for arrays in (self.gradients, self.residuals, self.next_residuals, self.outputs):
            for array in arrays:
                assert np.isnan(array[[0, -1]].astype(np.float32)).all(), "written beyond an array"
        for flat, guards in self.guards:
            assert np.isnan(flat[guards]).all(), "written beyond a factor"

    def bytes(self) -> list[bytes]:
        """What calls have written; one NaN is as good as another."""
        arrays = [*self.next_residuals, *self.outputs, self.p, self.q]
        same_nan = [np.where(np.isnan(a), np.array(np.nan, a.dtype), a).tobytes() for a in arrays]
        return [*same_nan, self.flags.tobytes()]

    @property
    def arguments(self) -> tuple[Shapes, Factor, Factor]:
        shapes = Shapes(self.rows, self.columns, self.ranks)
        return shapes, Factor(self.p, self.p_at), Factor(self.q, self.q_at)

    def project(self, backend: Any, decay: float = 0.9) -> None:
        shapes, p, q = self.arguments
        backend.project(self.table, self.flags, self.factors, shapes, q, p, decay=decay)

    def back_project(self, backend: Any) -> None:
        backend.back_project(self.table, *self.arguments)

    def orthogonalise(self, backend: Any) -> None:
        backend.orthogonalise(self.rows, self.ranks, Factor(self.p, self.p_at))

    def expand(self, backend: Any, divisor: float = 1.0, scale: float = 1.0) -> None:
        backend.expand(self.table, self.flags, *self.arguments, divisor=divisor, scale=scale)

    def subtract(self, backend: Any) -> None:
        backend.subtract(self.table, *self.arguments)


def assert_close(found: Any, left: Any, right: Any) -> None:
    """That found is left @ right but for rounding; the bound grows with what is added up."""
    left, right = left.astype(np.float64), right.astype(np.float64)
    bound = 1e-6 * (np.abs(left) @ np.abs(right)) + 1e-30
    assert (np.abs(found - left @ right) <= bound).all()


# --- what is computed ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", RANKS)
@each_backend(
    "dtype shift", [(dtype, 0) for dtype in DTYPES], but_cuda=[(segments.FLOAT32, 1), (segments.BFLOAT16, 1)]
)
def test_project(backend: Any, rank: int, dtype: int, shift: int) -> None:
    layers = Layers(shapes_for(rank), rank, dtype, shift)
    layers.project(backend)
    for i in range(len(layers.shapes)):
        c = layers.contribution(i, 0.9)
        assert layers.matrix(layers.next_residuals, i).tobytes() == c.tobytes()
        assert_close(layers.P[i].T, c, layers.Q[i].T)
    assert not layers.flags.any()
    layers.check_guards()


@BACKEND
@pytest.mark.parametrize("rank", [2, 9])
def test_project_without_residual_or_gradient(backend: Any, rank: int) -> None:
    layers = Layers(SHAPES * 2, rank)
    half = len(SHAPES)
    layers.table["residual"][:half] = 0
    layers.table["gradient"][half:] = 0
    layers.project(backend)
    for i in range(half):
        c = layers.factors[i] * layers.matrix(layers.gradients, i)
        assert layers.matrix(layers.next_residuals, i).tobytes() == c.tobytes()
        assert_close(layers.P[i].T, c, layers.Q[i].T)
        residual = np.float32(0.9) * layers.matrix(layers.residuals, half + i)
        np.testing.assert_array_equal(layers.matrix(layers.next_residuals, half + i), residual)
        assert_close(layers.P[half + i].T, residual, layers.Q[half + i].T)


@BACKEND
@pytest.mark.parametrize("rank", [1, 4, 9])
def test_project_onto_the_residual_itself(backend: Any, rank: int) -> None:
    layers = Layers(shapes_for(rank), rank)
    layers.table["residual"] = layers.table["next_residual"]
    expected = [
        layers.factors[i] * layers.matrix(layers.gradients, i)
        + np.float32(0.9) * layers.matrix(layers.next_residuals, i)
        for i in range(len(layers.shapes))
    ]
    layers.project(backend)
    for i, c in enumerate(expected):
        np.testing.assert_array_equal(layers.matrix(layers.next_residuals, i), c)


@pytest.mark.parametrize("rank", RANKS)
@each_backend("shift", [(0,)], but_cuda=[(1,)])
def test_back_project(backend: Any, rank: int, shift: int) -> None:
    layers = Layers(shapes_for(rank), rank, shift=shift)
    layers.back_project(backend)
    for i in range(len(layers.shapes)):
        assert_close(layers.Q[i], layers.P[i], layers.matrix(layers.next_residuals, i))
    layers.check_guards()


@BACKEND
@pytest.mark.parametrize("rank", RANKS)
def test_expand(backend: Any, rank: int) -> None:
    layers = Layers(shapes_for(rank), rank)
    layers.expand(backend, divisor=4.0, scale=0.5)
    for i in range(len(layers.shapes)):
        assert_close(layers.matrix(layers.outputs, i), 0.125 * layers.P[i].T, layers.Q[i])
    assert not layers.flags.any()


@BACKEND
def test_products_are_summed_in_the_order_of_columns(backend: Any) -> None:
    layers = Layers([(1, 1)], 3)
    layers.Q[0][:] = 1
    for terms, total in (([2.0**25, 1, -(2.0**25)], 0), ([2.0**25, -(2.0**25), 1], 1)):
        layers.P[0][:, 0] = terms
        layers.expand(backend)
        assert layers.matrix(layers.outputs, 0) == total


@BACKEND
@pytest.mark.parametrize("rank", RANKS)
def test_subtract(backend: Any, rank: int) -> None:
    layers = Layers(shapes_for(rank), rank)
    before = [layers.matrix(layers.next_residuals, i).copy() for i in range(len(layers.shapes))]
    layers.subtract(backend)
    for i, m in enumerate(before):
        difference = m - layers.matrix(layers.next_residuals, i)
        bound = 1e-6 * (np.abs(layers.P[i].T) @ np.abs(layers.Q[i]) + np.abs(m))
        assert (np.abs(difference - layers.P[i].T.astype(np.float64) @ layers.Q[i]) <= bound).all()


PARITY = [
    (isa, dtype, shift, rank)
    for isa in available_isas()
    for dtype in DTYPES
    for shift in (0, 1)
    for rank in (0, *RANKS)
]
PARITY += [(name, segments.FLOAT32, 0, rank) for name in ORDERS for rank in (0, *RANKS)]
PARITY += [(name, dtype, 0, 4) for name in ORDERS for dtype in DTYPES[1:]]


@pytest.mark.factors("backend", "dtype", "shift", "rank")
@pytest.mark.parametrize(("backend", "dtype", "shift", "rank"), PARITY, indirect=["backend"])
def test_backends_give_the_bytes_of_the_reference(backend: Any, rank: int, dtype: int, shift: int) -> None:
    results = []
    for each in (REFERENCE, backend):
        layers = Layers([*shapes_for(rank), (0, 5), (5, 0), (0, 0)], rank, dtype, shift)
        layers.subtract(each)
        layers.expand(each)
        layers.orthogonalise(each)
        layers.subtract(each)
        first = layers.bytes()
        layers.expand(each, divisor=3.0, scale=0.7)
        layers.check_guards()
        results.append((first, layers.bytes()))
    assert results[0] == results[1]


@BACKEND
def test_matrices_without_elements(backend: Any) -> None:
    layers = Layers([(0, 5), (5, 0), (0, 0)], 3)
    layers.project(backend)
    assert layers.P[1].tolist() == [[0] * 5] * 3
    layers.back_project(backend)
    assert layers.Q[0].tolist() == [[0] * 5] * 3
    layers.check_guards()


# --- orthogonalise ------------------------------------------------------------------------------------------


def orthonormal(backend: Any, columns: Any) -> Any:
    """The columns of a matrix, given as rows, after orthogonalisation."""
    p = np.array(columns, np.float32)
    count, n = p.shape
    backend.orthogonalise(np.array([n]), np.array([count]), Factor(p.reshape(-1), np.array([0])))
    return p


def deviation(p: Any) -> float:
    """|P^T P - I|, without the columns that are zero."""
    kept = p[p.any(axis=1)].astype(np.float64)
    return float(np.abs(kept @ kept.T - np.eye(len(kept))).max())


@BACKEND
@pytest.mark.parametrize(("n", "rank"), [(1, 1), (5, 5), (16, 4), (100, 9), (3000, 32)])
@pytest.mark.parametrize("magnitude", [1e-38, 1e-30, 1, 1e30])
def test_columns_become_orthonormal(backend: Any, n: int, rank: int, magnitude: float) -> None:
    columns = np.random.default_rng(n).standard_normal((rank, n)).astype(np.float32)
    p = orthonormal(backend, columns * np.float32(magnitude))
    assert p.any(axis=1).all()
    assert deviation(p) < 1e-6
    # Column k is made of the columns up to k.
    expected = np.linalg.qr(columns.T.astype(np.float64))[0].T
    agreement = np.abs((p * expected).sum(axis=1))
    np.testing.assert_allclose(agreement, 1, atol=1e-3 if magnitude < 1e-37 else 1e-5)


def columns_of_all_kinds() -> dict[str, tuple[Any, list[bool]]]:
    """Columns, and which of them do not depend on those before them."""
    rng = np.random.default_rng(1)
    direction = rng.standard_normal(1000)
    kinds = {
        f"nearly dependent, {distance}": (direction + distance * rng.standard_normal((6, 1000)), [True] * 6)
        for distance in (1e-2, 1e-4, 1e-5)
    }
    a, b = rng.standard_normal((2, 500)).astype(np.float32)
    kinds["dependent"] = [a, a, b, -4 * a, np.zeros(500), a], [True, False, True, False, False, False]
    magnitudes = np.array([1e30, 1e-30, 1, 1e-38], np.float32)[:, None]
    kinds["of any magnitude"] = rng.standard_normal((4, 100)).astype(np.float32) * magnitudes, [True] * 4
    for n in (1, 2, 3):
        kinds[f"more than {n} rows"] = rng.standard_normal((7, n)), [True] * n + [False] * (7 - n)
    return kinds


@BACKEND
@pytest.mark.parametrize(("columns", "kept"), columns_of_all_kinds().values(), ids=columns_of_all_kinds())
def test_columns_become_orthonormal_or_zero(backend: Any, columns: Any, kept: list[bool]) -> None:
    p = orthonormal(backend, columns)
    assert p.any(axis=1).tolist() == kept
    assert deviation(p) < 1e-6


@BACKEND
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_not_finite_columns(backend: Any, value: float) -> None:
    columns = np.ones((3, 20))
    columns[1, 19] = value
    assert np.isnan(orthonormal(backend, columns)).all()


@BACKEND
def test_zeros(backend: Any) -> None:
    layers = Layers([(40, 30)], 4)
    layers.gradients[0][:] = 0
    layers.residuals[0][:] = 0
    for kernel in (layers.project, layers.orthogonalise, layers.back_project, layers.expand):
        kernel(backend)
    assert not layers.matrix(layers.outputs, 0).any()
    assert not layers.flags.any()


@BACKEND
@pytest.mark.parametrize("rank", [1, 2, 4, 9])
@pytest.mark.parametrize("spare", [0, 3])
def test_a_matrix_of_that_rank_is_its_own_projection(backend: Any, rank: int, spare: int) -> None:
    layers = Layers([(64, 65), (300, 40), (20, 2000)], rank + spare)
    for i, (n, m) in enumerate(layers.shapes):
        exact = layers.rng.standard_normal((n, rank)) @ layers.rng.standard_normal((rank, m))
        layers.matrix(layers.gradients, i)[:] = exact
    layers.table["residual"] = 0
    for kernel in (layers.project, layers.orthogonalise, layers.back_project, layers.expand, layers.subtract):
        kernel(backend)
    for i in range(len(layers.shapes)):
        m = layers.factors[i] * layers.matrix(layers.gradients, i)
        error = np.linalg.norm(layers.matrix(layers.outputs, i) - m)
        assert error < 1e-5 * np.linalg.norm(m)
        assert np.linalg.norm(layers.matrix(layers.next_residuals, i)) < 1e-5 * np.linalg.norm(m)


# --- flags --------------------------------------------------------------------------------------------------


@BACKEND
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", [1, 4, 9])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_not_finite_contributions(backend: Any, dtype: int, rank: int, value: float) -> None:
    shape = (7, 33)
    for place in range(0, 7 * 33, 10):
        layers = Layers([shape, shape, shape], rank, dtype)
        layers.gradients[1][1 + place] = value
        layers.project(backend)
        assert layers.flags.tolist() == [0, 1, 0]
        assert np.isnan(layers.P[1]).all()
        assert np.isfinite(layers.P[0]).all()
        assert np.isfinite(layers.P[2]).all()


@BACKEND
@pytest.mark.parametrize("dtype", DTYPES)
def test_flagged_layers_become_nan(backend: Any, dtype: int) -> None:
    layers = Layers([(7, 33), (7, 33)], 2, dtype)
    layers.flags[0] = 1
    layers.expand(backend)
    assert np.isnan(layers.outputs[0].astype(np.float32)).all()
    assert np.isfinite(layers.matrix(layers.outputs, 1).astype(np.float32)).all()
    assert layers.flags.tolist() == [1, 0]


@BACKEND
@pytest.mark.parametrize(("dtype", "scale"), list(zip(DTYPES, [1e39, 1e6, 1e39], strict=True)))
def test_outputs_that_overflow_are_flagged(backend: Any, dtype: int, scale: float) -> None:
    layers = Layers([(7, 33)], 2, dtype)
    layers.P[0][:], layers.Q[0][:] = 0, 0
    layers.P[0][0, 6], layers.Q[0][0, 32] = 1, scale / 1e10
    layers.expand(backend, scale=1e10)
    assert layers.flags.tolist() == [1]


@BACKEND
def test_layers_without_output_are_skipped(backend: Any) -> None:
    layers = Layers([(7, 33), (7, 33)], 2)
    layers.table["output"][0] = 0
    layers.rows[0] = -5
    layers.expand(backend)
    assert np.isnan(layers.outputs[0][0])
    assert_close(layers.matrix(layers.outputs, 1), layers.P[1].T, layers.Q[1])


# --- random factors -----------------------------------------------------------------------------------------

WHERE = {"seed": 0x123456789ABCDEF, "layer": 77}


def test_random_factors_are_standard_normal() -> None:
    z = random_factors.random_q(20000, 8, **WHERE, step=5).astype(np.float64)
    assert z.shape == (8, 20000)
    count = z.size
    assert abs(z.mean()) < 4 / np.sqrt(count)
    assert abs(z.var() - 1) < 4 * np.sqrt(2 / count)
    assert abs((z**3).mean()) < 4 * np.sqrt(15 / count)
    assert abs((z**4).mean() - 3) < 4 * np.sqrt(96 / count)
    assert abs((np.abs(z) > 1.959964).mean() - 0.05) < 4 * np.sqrt(0.0475 / count)
    correlation = np.corrcoef(z)
    assert np.abs(correlation - np.eye(8)).max() < 5 / np.sqrt(20000)
    neighbours = (z[:, 1:] * z[:, :-1]).mean()
    assert abs(neighbours) < 4 / np.sqrt(count)


def test_numbers_follow_box_and_muller() -> None:
    counter = np.array([[0xFFFFFFFF - i, 77, 5, segments.OWNER_RANK] for i in range(8)], np.uint32)
    words = philox.philox4x32(counter, (0x89ABCDEF, 0x1234567)).reshape(-1, 2)
    u, v = ((words + 0.5) / 2**32).T
    expected = np.sqrt(-2 * np.log(u)) * np.cos(2 * np.pi * v)
    np.testing.assert_allclose(
        random_factors.random_q(16, 1, **WHERE, step=5)[0], expected, rtol=1e-6, atol=1e-7
    )


def test_elementary_functions_at_their_limits() -> None:
    ends = np.array([0.5, 1.5, 2.0**31, 2.0**32 - 0.5]) * 2.0**-32
    grid = np.concatenate((ends, np.linspace(1e-3, 1 - 1e-3, 997)))
    np.testing.assert_allclose(random_factors._log(grid), np.log(grid), rtol=1e-9)
    np.testing.assert_allclose(random_factors._cos_turns(grid), np.cos(2 * np.pi * grid), atol=1e-8)


def test_numbers_are_the_same_everywhere() -> None:
    # Bytes of a release: another machine, or another rewriting of the polynomials, must not change them.
    assert (
        random_factors.random_q(3, 2, **WHERE, step=5).tobytes().hex()
        == "eb99c53e95de94bfab598abf7929a73d5cc3dcbfee665e3f"
    )


def test_a_larger_rank_only_adds_columns() -> None:
    small, large = (random_factors.initial_q(37, rank, **WHERE) for rank in (3, 5))
    np.testing.assert_array_equal(small, large[:3])
    assert random_factors.initial_q(37, 0, **WHERE).shape == (0, 37)


@pytest.mark.parametrize("other", [{"seed": 1}, {"layer": 78}, {"step": 6}])
def test_factors_differ(other: dict[str, int]) -> None:
    base = {**WHERE, "step": 5}
    assert (
        random_factors.random_q(50, 2, **base) != random_factors.random_q(50, 2, **(base | other))
    ).mean() > 0.9
    assert (random_factors.random_q(50, 2, **base) != random_factors.initial_q(50, 2, **WHERE)).mean() > 0.9


@pytest.mark.parametrize("host", ["baseline", "reference"])
def test_on_a_device_numpy_multiplies_nothing(host: str) -> None:
    n, m, r = 6, 9, BASELINE_RANKS + 1
    isa = instruction_set("baseline") if host == "baseline" else dispatch.use("reference")
    with isa, device() as (place, called):
        table = np.zeros(1, segments.SEGMENT)
        gradient, next_residual = shared(place.driver, n * m), shared(place.driver, n * m)
        gradient[:] = np.arange(n * m)
        table["gradient"], table["next_residual"] = gradient.ctypes.data, next_residual.ctypes.data
        table["length"], table["dtype"] = n * m, segments.FLOAT32
        shapes, begin = Shapes(np.array([n]), np.array([m]), np.array([r])), np.zeros(1, np.int64)
        p, q = Factor(np.zeros(n * r, np.float32), begin), Factor(np.ones(m * r, np.float32), begin)
        flags, ones = np.zeros(1, np.uint8), np.ones(1, np.float32)
        place.kernels.project(table, flags, ones, shapes, q, p, decay=1.0)
        place.kernels.back_project(table, shapes, p, q)
        assert {"project", "back_project"} <= called.called
    np.testing.assert_array_equal(
        p.values.reshape(r, n), np.tile(np.arange(n * m).reshape(n, m).sum(1), (r, 1))
    )


def test_numpy_multiplies_where_it_is_faster() -> None:
    results = []
    with instruction_set("baseline"):
        for backend in (HOST.kernels, REFERENCE):
            layers = Layers([(64, 650)], BASELINE_RANKS + 1)
            layers.project(backend)
            layers.back_project(backend)
            results.append(layers.bytes())
    assert results[0] == results[1]
