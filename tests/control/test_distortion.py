"""What layers lose under every compressor: against brute force, in every way of measuring, with little memory."""

from __future__ import annotations

import gc
import re
import threading
import tracemalloc

import numpy as np
import pytest
from compress.selecting import samples
from configurations import ROWS
from simple_compressors import Everyone, Rounds, Turns

from gradcomp import (
    DGC,
    NUQSGD,
    BestRank,
    Cast,
    CLTk,
    Codebook,
    ConfigError,
    DensitySchedule,
    ErrorFeedback,
    Flat,
    GlobalTopK,
    Identity,
    LayerSpec,
    LocalClip,
    MomentumCorrection,
    OneBit,
    PowerSGD,
    Quantize,
    RandomK,
    RedSync,
    SpectralAtomo,
    TernGrad,
    TopK,
    Warmup,
)
from gradcomp.compress.base import Traits
from gradcomp.compress.lowrank.base import matrix_shape
from gradcomp.compress.registry import registered
from gradcomp.compress.sparse.base import elements_at
from gradcomp.compress.wrappers.base import Wrapper
from gradcomp.control.distortion import Budget, code_errors, magnitudes, spectra
from gradcomp.control.distortion.errors import errors
from gradcomp.control.distortion.round_trip import round_trip
from gradcomp.core.state import Fields
from gradcomp.kernels import dispatch
from gradcomp.kernels.codec import Draw
from gradcomp.kernels.devices import HOST
from gradcomp.kernels.segments import ALLOCATED, FLOAT32, SEGMENT
from gradcomp.testing.simulation import Simulation

SEED = 7
FREE = Budget(None, "a test")
LAYERS = {
    "convolution": LayerSpec("conv", (24, 10, 3, 3)),
    "matrix": LayerSpec("fc", (60, 130)),
    "tall": LayerSpec("embedding", (300, 20)),
    "vector": LayerSpec("bias", (77,)),
    "small": LayerSpec("head", (2, 3)),
    "one": LayerSpec("scale", (1,)),
}
MATRIX = LAYERS["matrix"]
RANKS = list(range(2, 17))


def gradient(layer: LayerSpec, seed: int = 0, decay: float = 0.8) -> np.ndarray:
    """Singular values that fall by about ``decay`` from one to the next."""
    rng = np.random.default_rng(seed)
    n, m = matrix_shape(layer.shape)
    k = min(n, m)
    left, right = rng.standard_normal((n, k)), rng.standard_normal((k, m))
    return (left * decay ** np.arange(k) @ right).astype(np.float32).reshape(layer.shape)


def norm(values: np.ndarray) -> float:
    return float(np.linalg.norm(values.astype(np.float64)))


def lost(layer: LayerSpec, values: np.ndarray, *choices, **settings) -> np.ndarray:
    return errors(choices, layer, values, SEED, **settings)


# --- every compressor ---------------------------------------------------------------------------------------


def one_of_each():
    for kind in registered().values():
        if issubclass(kind, Wrapper):
            yield kind(Quantize() if kind is Flat else TopK(0.1))
        else:
            yield Codebook((0.25, 1)) if kind is Codebook else kind()


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_every_compressor_has_a_finite_error(layer):
    found = errors(list(one_of_each()), layer, gradient(layer), SEED)
    assert found.shape == (len(registered()),)
    assert found.dtype == np.float64
    assert np.isfinite(found).all()
    assert (found >= 0).all()


def codes(row) -> bool:
    bare = row.compressor.bare()
    return (
        bare.traits.reduces and not bare.traits.fakes and not isinstance(bare, Flat)
    )  # codes no single layer


def approximate(row) -> bool:
    """What is not measured by what one rank gets in its first step, or where that is not what is measured."""
    bare = row.compressor.bare()
    clipped = row.compressor.traits.clip_norm is not None or not row.steady
    return codes(row) or clipped or isinstance(bare, PowerSGD | DGC)


@pytest.mark.parametrize("layer", [LAYERS["convolution"], MATRIX, LAYERS["vector"]], ids=str)
@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if not approximate(row)])
def test_an_error_is_that_of_one_rank_in_its_first_step(name, layer):
    values = gradient(layer)
    ranks = Simulation([layer], ROWS[name].compressor, world=1, config_seed=SEED)
    mean = ranks.step([[values.reshape(-1)]]).mean(0)
    exact = ROWS[name].compressor.traits.exact
    brute = 0.0 if exact else norm(values.reshape(-1).astype(np.float64) - mean)
    # A draw within a draw is measured by another draw of as many elements.
    rel = 0.1 if name == "two-level-random" else 1e-4
    assert lost(layer, values, ROWS[name].compressor)[0] == pytest.approx(
        brute, rel=rel, abs=1e-6 * norm(values)
    )


@pytest.mark.parametrize("piece", [64, 5000])
@pytest.mark.parametrize(
    "name", [name for name, row in ROWS.items() if codes(row) and not isinstance(row.compressor.level, tuple)]
)
def test_the_error_of_a_code_is_that_of_coding_the_whole_layer(name, piece, monkeypatch):
    monkeypatch.setattr(code_errors, "_PIECE", piece)
    compressor, values = ROWS[name].compressor.bare(), gradient(MATRIX)
    table, decoded = np.zeros(1, SEGMENT), np.empty(MATRIX.size, np.float32)
    table["length"], table["layer"], table["dtype"] = MATRIX.size, MATRIX.hash, FLOAT32
    table["gradient"], table["output"] = values.ctypes.data, decoded.ctypes.data
    compressor.fill(table, compressor.level)
    codec = compressor.codec_for(table)
    payload, flags = np.empty(codec.wire_bytes(table)[0], np.uint8), np.zeros(1, np.uint8)
    codec.encode(HOST, table, payload, flags, Draw(SEED, 0, 0))
    codec.decode(HOST, table, payload, flags)
    brute = 0.0 if compressor.traits.exact else norm(values.reshape(-1).astype(np.float64) - decoded)
    # Bits by bucket are measured as the same bits for all buckets, whose expected error is theirs.
    rel = 0.05 if codec.kind in ALLOCATED else 1e-5
    assert lost(MATRIX, values, ROWS[name].compressor)[0] == pytest.approx(brute, rel=rel)


def test_choices_of_one_code_and_of_several_keep_their_order():
    values = gradient(MATRIX)
    choices = [
        Quantize(8), NUQSGD(4), TopK(0.5), Quantize(2, 128), PowerSGD(3), Quantize(4), Identity(), RedSync(0.1),
        NUQSGD(3), BestRank(2), TopK(0.01), Cast("float16"), Quantize(4, rounding="nearest"), OneBit(None),
    ]  # fmt: skip
    alone = [lost(MATRIX, values, choice)[0] for choice in choices]
    # PowerSGD's depends on the others.
    np.testing.assert_allclose(lost(MATRIX, values, *choices), alone, rtol=2e-2)
    np.testing.assert_allclose(lost(MATRIX, values, *choices[::-1])[::-1], alone, rtol=2e-2)
    exactly = [i for i, choice in enumerate(choices) if not isinstance(choice, PowerSGD | BestRank)]
    np.testing.assert_allclose(lost(MATRIX, values, *choices)[exactly], np.array(alone)[exactly], rtol=1e-12)


# --- selections ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("way", "few"),
    [(magnitudes._by_selecting, 0), (magnitudes._by_counting, 4096), (magnitudes._by_counting, -1)],
    ids=["selecting", "counting and sorting", "counting twice"],
)
@pytest.mark.parametrize("name", samples(1))
def test_what_is_left_of_a_selection(name, way, few, monkeypatch):
    monkeypatch.setattr(magnitudes, "_PIECE", 700)  # several of them
    monkeypatch.setattr(magnitudes, "_FEW", few)
    values = samples(3000)[name]
    ascending = np.sort(np.square(values.astype(np.float64)))
    counts = np.array([0, 1, 2, 29, 30, 31, 299, 300, 1000, 1999, 2000, 2999, 3000])
    brute = [ascending[: 3000 - k].sum() for k in counts]
    np.testing.assert_allclose(way(values, counts), brute, rtol=1e-11, atol=1e-300)


@pytest.mark.parametrize("memory", [None, 30_000_000, 130_000])
def test_topk_by_density(memory):
    layer = LayerSpec("layer", (700, 11))
    values = samples(layer.size)["laplace"]
    densities = [0.001 * i for i in range(1, 101)] + [0.5, 1.0, 0.001]
    found = lost(layer, values, *map(TopK, densities), memory_bytes=memory)
    order = np.argsort(-np.abs(values), kind="stable")
    for density, error in zip(densities, found, strict=True):
        rest = values.copy()
        rest[order[: elements_at(density, np.array([layer.size]))[0]]] = 0
        assert error == pytest.approx(norm(rest), rel=1e-9)


def test_a_large_share_of_a_large_layer_is_counted_instead_of_sorted(monkeypatch):
    monkeypatch.setattr(magnitudes, "_by_selecting", None)
    layer = LayerSpec("layer", (1_000_000,))
    values = np.random.default_rng(0).standard_normal(layer.size, np.float32)
    found = lost(layer, values, TopK(0.4), TopK(0.9))
    ascending = np.sort(np.square(values.astype(np.float64)))
    np.testing.assert_allclose(found**2, [ascending[:600_000].sum(), ascending[:100_000].sum()], rtol=1e-9)


@pytest.mark.parametrize("values", [Quantize(2), Cast("float16"), OneBit(None), NUQSGD(3, 33)], ids=str)
def test_coded_values_lose_what_a_round_trip_loses(values):
    choices = [TopK(density, values=values) for density in (0.1, 1.0, 0.003, 0.2)]
    gradients = gradient(MATRIX)
    given = [round_trip(choice, MATRIX, gradients.reshape(-1), SEED) for choice in choices]
    brute = [norm(gradients.reshape(-1) - one) for one in given]
    np.testing.assert_allclose(lost(MATRIX, gradients, *choices), brute, rtol=1e-5)


@pytest.mark.parametrize("kind", [CLTk, GlobalTopK, DGC])
def test_what_sends_the_largest_is_measured_as_topk(kind):
    values = gradient(MATRIX)
    densities = (0.01, 0.2, 1.0)
    np.testing.assert_array_equal(
        lost(MATRIX, values, *map(kind, densities)), lost(MATRIX, values, *map(TopK, densities))
    )


def test_a_sampled_threshold_loses_about_as_much():
    layer = LayerSpec("layer", (300_000,))
    values = samples(layer.size)["laplace"]
    choice = DGC(0.01, momentum_factor=0.0)
    given = round_trip(choice, layer, values, SEED)
    assert lost(layer, values, choice)[0] == pytest.approx(norm(values - given), rel=0.02)


# --- low rank -----------------------------------------------------------------------------------------------

SHAPES = [(60, 130), (130, 60), (24, 10, 3, 3), (200, 150), (150, 200), (3, 40), (64, 64)]


def optimum(layer: LayerSpec, values: np.ndarray) -> np.ndarray:
    """e_r for r = 0, 1, 2, ..."""
    sigma = np.linalg.svd(values.reshape(matrix_shape(layer.shape)).astype(np.float64), compute_uv=False)
    return np.sqrt(np.append(np.cumsum(np.square(sigma[::-1]))[::-1], 0.0))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_both_ways_of_measuring_ranks(shape):
    layer = LayerSpec("layer", shape)
    values = gradient(layer)
    matrix = values.reshape(matrix_shape(shape))
    ranks = np.arange(1, min(matrix.shape) + 1, 2)
    best = optimum(layer, values)[ranks]
    np.testing.assert_allclose(spectra.by_product(matrix, ranks), best, rtol=1e-5, atol=1e-7 * norm(values))
    steps = spectra.by_power_steps(matrix, ranks, seed=SEED, layer=layer.hash)
    np.testing.assert_allclose(steps, best, rtol=0.03, atol=1e-5 * norm(values))
    assert (steps >= best * (1 - 1e-4) - 1e-5 * norm(values)).all()


@pytest.mark.parametrize("decay", [0.5, 0.9, 0.99])
@pytest.mark.parametrize("shape", [(60, 130), (130, 60)], ids=str)
def test_one_run_of_power_steps_loses_no_more_than_a_run_for_each_rank(shape, decay):
    """Thesis, appendix B.2.2: PowerSGD itself, five times on the same matrix; and the same Q to begin with."""
    layer = LayerSpec("layer", shape)
    values = gradient(layer, decay=decay)
    ranks = np.array([2, 4, 8])
    found = spectra.by_power_steps(values, ranks, seed=SEED, layer=layer.hash)
    for rank, error in zip(ranks.tolist(), found, strict=True):
        run = PowerSGD(rank)
        fields = Fields(1)
        fields.arrange([run.fields(layer, SEED)])
        for _ in range(spectra.POWER_STEPS):
            given = round_trip(run, layer, values.reshape(-1), SEED, fields)
            fields.commit(np.ones(1, bool))
        paper = norm(values.reshape(-1) - given)
        assert error <= paper * (1 + 1e-4)
        assert error == pytest.approx(paper, rel=0.05)


def test_powersgd_and_best_rank_are_measured_alike_whichever_way_is_cheaper():
    for shape in ((60, 130), (200, 150)):
        layer = LayerSpec("layer", shape)
        values = gradient(layer)
        best = optimum(layer, values)[RANKS]
        np.testing.assert_allclose(lost(layer, values, *map(PowerSGD, RANKS)), best, rtol=0.03)
        np.testing.assert_allclose(lost(layer, values, *map(BestRank, RANKS)), best, rtol=0.03)
    assert spectra.product_is_cheaper((60, 130), 16)
    assert not spectra.product_is_cheaper((200, 150), 16)
    assert not spectra.product_is_cheaper((128, 1152), 2)


@pytest.mark.parametrize("way", ["product", "steps"])
@pytest.mark.parametrize("size", [1.0, 1e-43, 1e-30, 1e33])
def test_a_matrix_of_that_rank_loses_nothing(way, size):
    rng = np.random.default_rng(0)
    product = rng.standard_normal((140, 3)) @ rng.standard_normal((3, 160))
    matrix = (size * product).astype(np.float32)
    ranks = np.array([2, 3, 6])
    if way == "product":
        found = spectra.by_product(matrix, ranks)
    else:
        found = spectra.by_power_steps(matrix, ranks, seed=SEED, layer=1)
    noise = 0.2 if size == 1e-43 else 1e-5  # which has two digits
    assert found[0] > 0.1 * norm(matrix)
    assert (found[1:] <= noise * norm(matrix)).all()


def test_a_matrix_of_zeros_loses_nothing():
    zeros = np.zeros((140, 160), np.float32)
    layer = LayerSpec("layer", zeros.shape)
    assert not lost(layer, zeros, PowerSGD(2), BestRank(70), SpectralAtomo(3), TopK(0.1), Quantize(2)).any()


def test_a_layer_that_is_sent_whole_at_that_rank_loses_nothing():
    """r (n + m) >= n m from rank 9 on."""
    layer = LayerSpec("layer", (16, 20))
    found = lost(layer, gradient(layer), *map(PowerSGD, (4, 8, 9, 16, 99)), SpectralAtomo(9), BestRank(8))
    assert (found == 0).tolist() == [False, False, True, True, True, True, False]
    vector = LAYERS["vector"]
    assert not lost(vector, gradient(vector), PowerSGD(1), BestRank(1), SpectralAtomo(1)).any()


# --- wrappers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrapped", "inner"),
    [
        (ErrorFeedback(Quantize(4), decay=0.5), Quantize(4)),
        (MomentumCorrection(TopK(0.1)), TopK(0.1)),
        (MomentumCorrection(TopK(0.1, values=Quantize(4))), TopK(0.1, values=Quantize(4))),
        (LocalClip(Quantize(4), max_norm=1e-3), Quantize(4)),
        (Warmup(PowerSGD(2), steps=9), PowerSGD(2)),
        (DensitySchedule(TopK(0.05)), TopK(0.05)),
        (Warmup(LocalClip(MomentumCorrection(ErrorFeedback(RandomK(0.1))), 2.0)), RandomK(0.1)),
        (DGC(0.05, momentum_factor=0.5, clip=1e-3, warmup_steps=8), TopK(0.05)),
        (
            DGC(0.05, values=Cast("bfloat16"), clip=1e-3, warmup_steps=8),
            DGC(0.05, values=Cast("bfloat16"), momentum_factor=0.0),
        ),
        (ErrorFeedback(Identity()), Identity()),
    ],
    ids=str,
)
def test_a_wrapper_loses_what_is_inside_it(wrapped, inner):
    values = gradient(MATRIX)
    values.flags.writeable = False
    before = values.copy()
    found = lost(MATRIX, values, wrapped, inner)
    assert found[0] == found[1]
    assert np.array_equal(values, before)


class Masking(Everyone):
    """A compressor from elsewhere, with momentum that it masks where its gradient lies."""

    traits = Traits(momentum=0.5, masks_momentum=True)

    def exchange(self, group, context):
        flags = yield from super().exchange(group, context)
        address = int(group.inputs["gradient"][0])
        np.ctypeslib.as_array((np.ctypeslib.ctypes.c_float * MATRIX.size).from_address(address))[:] = 0
        return flags


@pytest.mark.parametrize("choice", [Everyone(), Everyone(True), Turns(), Rounds(), Masking()], ids=str)
def test_a_compressor_from_elsewhere_makes_a_round_trip(choice):
    values = gradient(MATRIX)
    before = values.copy()
    found = lost(MATRIX, values, choice, TopK(0.1))
    assert found[0] == pytest.approx(0, abs=1e-5 * norm(values))
    assert found[1] > 0
    assert np.array_equal(values, before)


class Nothing(TopK):
    """A subclass, which sends something else than its base."""

    def select(self, group, context, chosen, flags):
        super().select(group, context, chosen, flags)
        chosen.values[:] = 0


def test_a_subclass_is_not_taken_for_its_base():
    values = gradient(MATRIX)
    assert lost(MATRIX, values, Nothing(0.5))[0] == pytest.approx(norm(values))


# --- special values -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_have_no_errors(bad):
    values = gradient(MATRIX)
    values[-1, -1] = bad
    assert np.isnan(errors(list(one_of_each()), MATRIX, values, SEED)).all()


def test_a_layer_without_elements_loses_nothing():
    layer = LayerSpec("none", (0, 5))
    found = errors(list(one_of_each()), layer, np.zeros((0, 5), np.float32), SEED)
    assert found.tolist() == [0.0] * len(registered())
    assert errors([], MATRIX, gradient(MATRIX), SEED).shape == (0,)


def test_values_that_overflow_in_a_code_cannot_be_carried():
    values = np.zeros(MATRIX.shape, np.float32)
    values[0, :2] = 3.4e38, -3.4e38
    found = lost(MATRIX, values, Quantize(4), TopK(0.1), Cast("bfloat16"), PowerSGD(2), TernGrad(None))
    assert np.isinf(found).tolist() == [True, False, True, False, False]
    assert found[1] == 0
    assert found[3] <= 1e-5 * norm(values)


def test_a_float64_layer_can_only_travel_as_it_is():
    layer = LayerSpec("double", (20, 30), "float64")
    found = lost(layer, gradient(layer), Identity(), Quantize(4), TopK(1.0), Cast("float32"), PowerSGD(2))
    assert found.tolist() == [0, np.inf, np.inf, np.inf, np.inf]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_layers_are_measured_in_float32(dtype):
    values = gradient(MATRIX)
    choices = [Quantize(4), TopK(0.1), PowerSGD(2), Cast("float16"), RedSync(0.1)]
    half = LayerSpec(MATRIX.name, MATRIX.shape, dtype)
    np.testing.assert_array_equal(lost(half, values, *choices), lost(MATRIX, values, *choices))


def test_values_may_be_flat_or_strided():
    values = gradient(MATRIX)
    choices = [Quantize(4), TopK(0.1), BestRank(2), RedSync(0.1)]
    expected = lost(MATRIX, values, *choices)
    np.testing.assert_array_equal(lost(MATRIX, values.reshape(-1), *choices), expected)
    np.testing.assert_array_equal(lost(MATRIX, np.asfortranarray(values), *choices), expected)


def test_another_number_of_values_is_refused():
    with pytest.raises(ConfigError, match="'fc' has 7800 elements, got 9 values"):
        lost(MATRIX, np.zeros(9, np.float32), Quantize(4))


def test_the_seed_decides_what_is_drawn():
    values = gradient(MATRIX)
    choices = [Quantize(2), RandomK(0.1), SpectralAtomo(2), TopK(0.1)]
    first, second = (errors(choices, MATRIX, values, seed) for seed in (1, 2))
    assert (first != second).tolist() == [True, True, True, False]
    np.testing.assert_array_equal(first, errors(choices, MATRIX, values, 1))


def test_both_bodies_measure_the_same():
    values = gradient(MATRIX)
    choices = [Quantize(3), TopK(0.1), PowerSGD(3), RedSync(0.1), TopK(0.2, values=Quantize(4)), RandomK(0.1)]
    with dispatch.use("reference"):
        expected = lost(MATRIX, values, *choices)
    np.testing.assert_allclose(lost(MATRIX, values, *choices), expected, rtol=1e-4)


def test_threads_do_not_disturb_each_other():
    layers = [LayerSpec(f"layer{i}", (40 + i, 50)) for i in range(6)]
    choices = [Quantize(3), TopK(0.1), PowerSGD(2), RedSync(0.1), NUQSGD(4)]
    expected = [lost(layer, gradient(layer), *choices) for layer in layers]
    found: dict[int, np.ndarray] = {}

    def measure(i):
        found[i] = lost(layers[i], gradient(layers[i]), *choices)

    threads = [threading.Thread(target=measure, args=(i,)) for i in range(len(layers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, error in enumerate(expected):
        np.testing.assert_array_equal(found[i], error)


# --- memory -------------------------------------------------------------------------------------------------

LARGE = LayerSpec("large", (2500, 900))  # 9 MB
FAMILIES = {
    "bits": [Quantize(b) for b in range(2, 9)],
    "one scale": [NUQSGD(b, None) for b in range(2, 9)],
    "densities": [TopK(0.001 * i) for i in range(1, 101)],
    "all densities": [TopK(0.01 * i) for i in range(1, 101)],
    "coded values": [TopK(0.01 * i, values=Quantize(4)) for i in range(1, 11)],
    "ranks": [PowerSGD(r) for r in range(2, 9)],
    "round trips": [RedSync(0.1), RandomK(0.1)],
}
#: What takes memory in a way of its own; the others take it as one of these does.
WAYS = ("bits", "all densities", "ranks", "round trips")
NAMES = [pytest.param(name, marks=[] if name in WAYS else pytest.mark.full) for name in FAMILIES]


@pytest.fixture(scope="module")
def large():
    return np.random.default_rng(0).standard_normal(LARGE.shape, np.float32)


def peak_of(choices, values, memory):
    gc.collect()
    tracemalloc.start()
    found = errors(choices, LARGE, values, SEED, memory_bytes=memory)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return found, peak


def asked_for(choices, values):
    """The bytes that the refusal of a small limit asks for."""
    with pytest.raises(ConfigError, match="would lose of layer 'large' takes") as refusal:
        errors(choices, LARGE, values, SEED, memory_bytes=1000)
    return int(re.search(r"takes ([\d,]+) bytes", str(refusal.value))[1].replace(",", ""))


@pytest.mark.parametrize("name", NAMES)
def test_less_memory_is_asked_for_by_its_number(name, large):
    """As much as the refusal asks for is enough, is not exceeded, and gives the same errors."""
    expected = errors(FAMILIES[name], LARGE, large, SEED)
    bins = 40_000_000 if name == "all densities" else 0
    _, peak = peak_of(FAMILIES[name], large, None)
    assert peak <= 3 * large.nbytes + bins, "without a limit it takes little more than the layer"
    asked = asked_for(FAMILIES[name], large)
    found, peak = peak_of(FAMILIES[name], large, asked)
    np.testing.assert_allclose(found, expected, rtol=0.02)
    assert peak <= asked + 1_000_000  # objects, and the errors themselves
    with pytest.raises(ConfigError):
        errors(FAMILIES[name], LARGE, large, SEED, memory_bytes=asked - 1)


def test_power_steps_ask_for_one_copy_of_the_layer_or_two_where_numpy_multiplies(large):
    asked = asked_for(FAMILIES["ranks"], large)
    _, peak = peak_of(FAMILIES["ranks"], large, asked)
    assert 0.8 * asked <= peak
    assert asked <= (2.4 if dispatch.numpy_multiplies(8) else 1.2) * large.nbytes
