"""The exchange of gradients under TensorFlow, in eager mode and inside tf.function.

Where there are two ranks they have one thread for ops: a collect that ran before a submit would never return.
"""

# ruff: noqa: E402

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import preloaded
import pytest
from batch import on_ranks
from launching import run_ranks

tf = pytest.importorskip("tensorflow", reason="needs TensorFlow: pip install gradcomp[tf-cpu]")
keras = pytest.importorskip("keras")
if not preloaded.HAS_TORCH:
    pytest.skip("needs torch: pip install gradcomp[torch]", allow_module_level=True)

from keras_checks import ENV, MODES, ONE_THREAD, world_of_one
from keras_checks import exchange as Exchange

from gradcomp import LGC, PowerSGD, Quantize, TopK
from gradcomp.core.errors import ConfigError, PlanMismatchError, StateError, TransportError, WireFormatError
from gradcomp.exchange.driver import mean_of_rows
from gradcomp.exchange.preemption import Preemption
from gradcomp.job import runtime
from gradcomp.job.reduce_op import Sum
from gradcomp.tf import bridge
from gradcomp.tf.groups import groups_of
from gradcomp.tf.layers import specs
from gradcomp.tf.memory import HostMemory

SHAPES = [(300, 40), (40,), (), (0, 3), (3, 3, 8, 16), (5000,)]


def variables(shapes=SHAPES, dtype="float32") -> list[Any]:
    return [tf.Variable(tf.zeros(shape, dtype), name=f"layer{i}") for i, shape in enumerate(shapes)]


def draw(rank: int, step: int = 0, shapes=SHAPES, dtype="float32") -> list[np.ndarray]:
    generator = np.random.default_rng([rank, step])
    return [np.asarray(generator.standard_normal(shape)).astype(dtype) for shape in shapes]


def tensors(arrays) -> list[Any]:
    return [tf.constant(array) for array in arrays]


def sums(step: int = 0, shapes=SHAPES) -> list[np.ndarray]:
    ranks = [draw(rank, step, shapes) for rank in range(runtime.size())]
    return [functools.reduce(np.add, arrays) for arrays in zip(*ranks, strict=True)]


def means(step: int = 0, shapes=SHAPES) -> list[np.ndarray]:
    return [total / runtime.size() for total in sums(step, shapes)]


def own(step: int = 0, shapes=SHAPES) -> list[Any]:
    """This rank's gradients."""
    return tensors(draw(runtime.rank(), step, shapes))


def four_bits(shapes=((64, 64),)) -> Exchange:
    return Exchange(variables(shapes), Quantize(bits=4, rounding="nearest"))


def close(ours, expected, tolerance: float = 1e-6) -> None:
    for one, other in zip(ours, expected, strict=True):
        np.testing.assert_allclose(np.asarray(one), other, rtol=tolerance, atol=tolerance)


def assert_same_on_all_ranks(exchange: Exchange, values) -> None:
    mine = b"".join(np.asarray(value).tobytes() for value in values)
    assert set(exchange.exchanger.allgather_bytes(mine)) == {mine}


# ------------------------------------------------------------------------- means


def check_means(mode: str) -> None:
    exchange = Exchange(variables())
    average = MODES[mode](lambda *gradients: exchange.exchange(gradients))
    for step in range(3):
        found = average(*own(step))
        close(found, means(step))
        assert [tuple(mean.shape) for mean in found] == SHAPES
        assert_same_on_all_ranks(exchange, found)


@pytest.mark.parametrize("mode", MODES)
@on_ranks(2, env=ONE_THREAD)
def test_means_are_numpys(mode: str) -> None:
    check_means(mode)


@on_ranks(3, env=ENV)
def test_means_of_three_ranks() -> None:
    check_means("graph")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@on_ranks(2, env=ONE_THREAD)
def test_other_dtypes(dtype: str) -> None:
    shapes = [(20, 30), (7,)]
    kind = tf.as_dtype(dtype).as_numpy_dtype
    exchange = Exchange(variables(shapes, dtype))
    gradients = tensors(draw(runtime.rank(), 0, shapes, kind))
    for mode in MODES.values():
        found = mode(lambda *given: exchange.exchange(given))(*gradients)
        assert [mean.dtype.name for mean in found] == [dtype] * 2
        close([tf.cast(mean, tf.float64) for mean in found], means(0, shapes), 2e-2)


@on_ranks(2, env=ONE_THREAD)
def test_a_loss_scale_leaves_residuals_in_the_units_of_gradients() -> None:
    shapes = [(64, 64)]
    plain, scaled = four_bits(), four_bits()

    @tf.function
    def exchange_scaled(gradient, scale):
        return scaled.exchange([gradient * scale], scale)

    for step in range(4):
        (gradient,) = own(step, shapes)
        scale = 2.0 ** (10 - step)
        (mean,) = plain.exchange([gradient])
        (scaled_mean,) = exchange_scaled(gradient, tf.constant(scale))
        np.testing.assert_array_equal(scaled_mean / scale, mean)


@on_ranks(2, env=ONE_THREAD)
def test_a_value_that_is_not_finite_reaches_all_ranks_and_no_residual() -> None:
    shapes = [(64, 64)]
    exchange = four_bits()
    exchange.exchange(own(0, shapes))
    before = exchange.checkpoint_manager.snapshot().first["layer0"].copy()
    bad = draw(runtime.rank(), 1, shapes)
    if runtime.rank() == 1:
        bad[0][3, 3] = np.nan
    (mean,) = exchange.exchange(tensors(bad))
    assert np.isnan(mean).all()
    np.testing.assert_array_equal(exchange.checkpoint_manager.snapshot().first["layer0"], before)
    (mean,) = exchange.exchange(own(2, shapes))
    assert np.isfinite(mean).all()


# ------------------------------------------------------------------------- in graphs


@on_ranks(2, env=ONE_THREAD)
def test_a_function_is_traced_once_and_every_step_exchanges() -> None:
    assert tf.config.threading.get_inter_op_parallelism_threads() == 1
    shapes = [(64, 128), (128,), (128, 32), (32,)]
    weights = [tf.Variable(array, name=f"w{i}") for i, array in enumerate(draw(9, 0, shapes))]
    exchange = Exchange(weights, Quantize(bits=4))
    traces = []

    @tf.function
    def step(gradients):
        traces.append(1)
        for weight, mean in zip(weights, exchange.exchange(gradients), strict=True):
            weight.assign_sub(0.1 * mean)

    for number in range(50):
        step(tensors(draw(runtime.rank(), number, shapes)))
    assert len(traces) == 1
    assert exchange.exchanger.pipeline.step == 50
    assert_same_on_all_ranks(exchange, weights)


def check_loop() -> None:
    """Gradients of ``free`` do not depend on variables: an iteration could begin before the last one has ended."""
    weight, free = tf.Variable(tf.ones([50, 40])), tf.Variable(tf.ones([2000]))
    exchange = Exchange([weight, free])
    slope = tf.constant(float(runtime.rank()))

    @tf.function
    def train():
        for _ in tf.range(50):
            means = exchange.exchange([weight * slope, tf.fill([2000], slope)])
            weight.assign_sub(0.01 * means[0])
            free.assign_sub(0.01 * means[1])

    train()
    assert exchange.exchanger.pipeline.step == 50
    mean = (runtime.size() - 1) / 2
    np.testing.assert_allclose(free, 1 - 50 * 0.01 * mean, rtol=1e-4)
    np.testing.assert_allclose(weight, (1 - 0.01 * mean) ** 50, rtol=1e-4)
    assert_same_on_all_ranks(exchange, [weight, free])


@on_ranks(2, env=ONE_THREAD)
def test_fifty_steps_in_a_loop_of_the_graph() -> None:
    check_loop()


@on_ranks(3, env=ENV)
def test_fifty_steps_in_a_loop_with_many_threads() -> None:
    check_loop()


@on_ranks(2, env=ONE_THREAD)
def test_in_a_branch_that_all_ranks_take() -> None:
    exchange = Exchange(variables())

    @tf.function
    def sometimes(go, *gradients):
        return tf.cond(go, lambda: exchange.exchange(gradients), lambda: list(gradients))

    close(sometimes(tf.constant(False), *own()), own())
    close(sometimes(tf.constant(True), *own()), means())


@on_ranks(2, env=ONE_THREAD)
def test_two_exchanges_in_one_function_take_turns() -> None:
    first, second = Exchange(variables()), Exchange(variables())

    @tf.function
    def both(gradients, others):
        inner = tf.function(lambda *given: second.exchange(given))
        return first.exchange(gradients), inner(*others), first.exchange(others)

    for found, step in zip(both(own(0), own(1)), (0, 1, 1), strict=True):
        close(found, means(step))


@on_ranks(2, env=ONE_THREAD)
def test_large_layers_are_submitted_one_by_one() -> None:
    shapes, rows = [(1 << 10, 1 << 10)] * 3, [(1, 1 << 10)] * 3
    exchange = four_bits(shapes)
    function = tf.function(lambda *given: exchange.exchange([2.0 * one for one in given]))
    mine = [tf.ones([1 << 10, 1]) * row for row in draw(runtime.rank(), 0, rows)]
    graph = function.get_concrete_function(*mine).graph
    calls = [operation for operation in graph.get_operations() if operation.type == "PyFunc"]
    assert len(calls) == 3 + 3 + 1  # submits, collects, the end
    submits, collects = calls[:3], calls[3:6]
    assert all(set(submits) <= set(collect.control_inputs) for collect in collects)
    found = function(*mine)
    close(found, [np.broadcast_to(row, (1 << 10, 1 << 10)) for row in sums(0, rows)], 1.0)
    assert_same_on_all_ranks(exchange, found)


@on_ranks(2, env=ONE_THREAD)
def test_a_variable_that_was_assigned_a_mean_keeps_it() -> None:
    """TensorFlow may let a variable live in the engine's array, which must then not be written again."""
    weight = tf.Variable(tf.zeros([40, 50]))
    exchange = Exchange([weight])
    function = tf.function(lambda gradient: weight.assign(exchange.exchange([gradient])[0]))
    for step in range(6):
        function(tf.fill([40, 50], float(step)))
        kept = weight.numpy().copy()
        held = exchange.exchange([tf.fill([40, 50], -1.0)])
        np.testing.assert_array_equal(weight, kept)
        exchange.exchange([tf.fill([40, 50], -2.0)])
        np.testing.assert_array_equal(held[0], -1.0)


# ------------------------------------------------------------------------- sparse and absent


def slices(rank: int, rows: int, size: int, wide: int) -> Any:
    """Rows with repetitions."""
    generator = np.random.default_rng(rank)
    index = generator.integers(0, rows, size)
    values = generator.standard_normal((size, wide)).astype(np.float32)
    return tf.IndexedSlices(tf.constant(values), tf.constant(index), tf.constant([rows, wide]))


#: By name: the number of rows, arguments, and the number of layers, of which the first is sparse.
SPARSE: dict[str, tuple[int, dict[str, Any], int]] = {
    "few rows": (6, {}, 2),
    "many rows": (200, {}, 2),
    "dense": (6, {"sparse_as_dense": True}, 2),
    "alone": (6, {"op": Sum}, 1),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", SPARSE)
@on_ranks(3, env=ENV)
def test_indexed_slices(name: str, mode: str) -> None:
    size, arguments, layers = SPARSE[name]
    exchange = Exchange(variables([(100, 4), (10,)][:layers]), **arguments)
    given = [slices(runtime.rank(), 100, size, 4), tf.ones([10])][:layers]
    function = MODES[mode](lambda *given: exchange.exchange(given))
    total = sum(tf.convert_to_tensor(slices(rank, 100, size, 4)).numpy() for rank in range(3))
    expected = [total if "op" in arguments else total / 3, np.ones(10)][:layers]
    for _ in range(3):
        found = function(*given)
        close(map(tf.convert_to_tensor, found), expected, 1e-5)
        assert isinstance(found[0], tf.IndexedSlices) == ("sparse_as_dense" not in arguments)
        if isinstance(found[0], tf.IndexedSlices):
            assert_same_on_all_ranks(exchange, [found[0].values, found[0].indices])
            assert len(set(found[0].indices.numpy())) == len(found[0].indices)


@on_ranks(2, env=ONE_THREAD)
def test_a_layer_is_sparse_or_dense() -> None:
    rows, dense = slices(0, 100, 6, 4), tf.zeros([100, 4])
    with pytest.raises(StateError, match=r"layer0.*sparse gradient on one rank and a dense one on another"):
        Exchange(variables([(100, 4)])).exchange([dense if runtime.rank() else rows])
    exchange = Exchange(variables([(100, 4)]))
    exchange.exchange([rows])
    with pytest.raises(StateError, match=r"layer0.*had sparse gradients before"):
        exchange.exchange([dense])
    with pytest.raises(StateError, match="row numbers outside of the layer"):
        Exchange(variables([(50, 4)])).exchange([tf.IndexedSlices(tf.ones([1, 4]), tf.constant([50]))])


class Hostile:
    """An exchanger whose peers send these bytes, one after the other."""

    pipeline = SimpleNamespace(preemption=Preemption())

    def __init__(self, *replies: bytes) -> None:
        self._replies = list(replies)

    def allgather_bytes(self, payload: bytes) -> list[bytes]:
        return [self._replies.pop(0)]


def message(*index: int) -> bytes:
    return np.array(index, dtype="<i8").tobytes() + np.zeros((len(index), 4), dtype="<f4").tobytes()


@pytest.mark.parametrize(
    "replies",
    [
        (b"what",),
        (b"[1]",),
        (b"[1, true]", message(100)),
        (b"[1, true]", message(-1)),
        (b"[2, true]", message(5, 5)),
        (b"[2, true]", message(5, 4)),
        (b"[1, true]", message(5)[:-1]),
    ],
)
def test_rows_from_the_network_are_not_trusted(replies: tuple[bytes, ...]) -> None:
    with pytest.raises(WireFormatError):
        mean_of_rows(Hostile(*replies), "layer", (100, 4), np.dtype(np.float32), None, 1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", MODES)
@on_ranks(2, env=ONE_THREAD)
def test_a_gradient_that_no_rank_has_is_none(mode: str) -> None:
    shapes = [(30, 20), (20,), (20, 10)]
    exchange = Exchange(variables(shapes), Quantize(bits=4))
    function = MODES[mode](lambda first, last: exchange.exchange([first, None, last]))
    for step in range(5):
        first, _, last = own(step, shapes)
        assert [mean is None for mean in function(first, last)] == [False, True, False]


def again_and_again(function: Callable[[], Any]) -> None:
    """What another rank has told us is heard within seconds."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        function()


@pytest.mark.parametrize("mode", MODES)
@on_ranks(2, env=ONE_THREAD)
def test_a_gradient_that_only_another_rank_has_is_named(mode: str) -> None:
    exchange = Exchange(variables())
    gradients = own()
    if runtime.rank() == 0:
        gradients[1] = None
    function = MODES[mode](lambda: exchange.exchange(gradients))
    if runtime.rank() == 0:
        with pytest.raises(StateError, match="layer1"), bridge.typed_errors():
            function()
        with pytest.raises(StateError, match="layer1"):  # the next call says it too
            exchange.exchange(gradients)
    else:
        with pytest.raises(TransportError), bridge.typed_errors():
            again_and_again(function)


# ------------------------------------------------------------------------- bad input


@on_ranks(2, env=ONE_THREAD)
def test_variables_that_differ_between_ranks() -> None:
    shapes = [(30, 20), (20 + runtime.rank(),)]
    with pytest.raises(PlanMismatchError, match="layer1"):
        Exchange(variables(shapes))


@on_ranks(2, env=ONE_THREAD)
def test_a_gradient_of_another_dtype_or_shape() -> None:
    shapes = [(30, 20)]
    with pytest.raises(StateError, match=r"layer0.*float64"):
        Exchange(variables(shapes)).exchange([tf.zeros([30, 20], tf.float64)])
    with pytest.raises(StateError, match=r"layer0.*\(20, 30\)"):
        Exchange(variables(shapes)).exchange([tf.zeros([20, 30])])
    with pytest.raises(StateError, match="2 gradients for 1 variables"):
        Exchange(variables(shapes)).exchange([tf.zeros([30, 20])] * 2)


@on_ranks(2, env=ONE_THREAD)
def test_after_a_step_that_was_interrupted_there_is_no_other() -> None:
    exchange = Exchange(variables())
    gradients = own()

    def interrupt(layers: Any) -> None:
        raise KeyboardInterrupt

    if runtime.rank() == 0:
        exchange.listener.wait = interrupt
        with pytest.raises(KeyboardInterrupt):
            exchange.exchange(gradients)
        with pytest.raises(StateError, match="the last exchange did not end"):
            exchange.exchange(gradients)
    else:
        with pytest.raises(TransportError):
            again_and_again(lambda: exchange.exchange(gradients))


# ------------------------------------------------------------------------- what else an exchange has


@on_ranks(2, env=ONE_THREAD)
def test_a_controller_changes_levels_inside_a_graph() -> None:
    shapes = [(64, 64), (256, 64)]
    for form in ("linear:every_steps=5,alpha=none", "lgreco:every_steps=5,blocks=4"):
        exchange = Exchange(variables(shapes), Quantize(4, 64), controller=form)
        function = tf.function(lambda *given, exchange=exchange: exchange.exchange(given))
        sizes = [
            np.repeat([[1.0], [99.0]], shape[0] // 2, axis=0) * (1 + 99 * i) for i, shape in enumerate(shapes)
        ]
        for step in range(20):
            drawn = draw(runtime.rank(), step, shapes)
            scaled = [(size * g).astype("float32") for size, g in zip(sizes, drawn, strict=True)]
            assert_same_on_all_ranks(exchange, function(*tensors(scaled)))
        plan = exchange.exchanger.pipeline.plan
        assert plan.version > 0
        assert any(isinstance(a.level, tuple) for a in plan.assignments) == form.startswith("lgreco")


@on_ranks(2, env=ONE_THREAD)
def test_another_compression_inside_a_graph_sends_what_was_held_back() -> None:
    shapes = [(64, 64), (256, 64)]
    exchange = Exchange(variables(shapes), TopK(density=0.01))
    function = tf.function(lambda *given: exchange.exchange(given))
    missing = [np.zeros(shape) for shape in shapes]
    for step in range(6):
        if step == 3:
            exchange.set_compression("none")
        drawn = [draw(rank, step, shapes) for rank in range(2)]
        for layer, mean in enumerate(function(*tensors(drawn[runtime.rank()]))):
            missing[layer] += (drawn[0][layer] + drawn[1][layer]) / 2.0 - mean.numpy()
        if step == 3:
            assert max(np.abs(layer).max() for layer in missing) > 0.5
    for layer in missing:
        np.testing.assert_allclose(layer, 0, atol=1e-5)
    assert {a.compressor for a in exchange.exchanger.pipeline.plan.assignments} == {"none"}


# ------------------------------------------------------------------------- as the other frontend

SIZES = [20, 64, 48, 10]
RATE = 0.125
COMPRESSIONS = {
    "4 bits": Quantize(bits=4, rounding="nearest"),
    "topk": TopK(density=0.05),
    "powersgd": PowerSGD(rank=2),
    "lgc": LGC(density=0.01, warmup_steps=10, train_steps=20, least_parameters=0, train_share=1.0),
}


@pytest.mark.parametrize(
    "name", ["4 bits", *(pytest.param(n, marks=pytest.mark.full) for n in ("topk", "powersgd", "lgc"))]
)
@on_ranks(2, env=ONE_THREAD)
def test_fifty_steps_end_where_those_of_the_torch_frontend_do(name: str) -> None:
    """Where the frameworks differ in a last bit, a quantiser makes a whole level of it for a value between two levels.

    So gradients are computed in float64, and the rate is a power of two: one of them fuses the product with the sum.
    """
    import torch

    import gradcomp.torch as gc

    generator = np.random.default_rng(0)
    start: dict[str, np.ndarray] = {}
    for i, (into, out) in enumerate(itertools.pairwise(SIZES)):
        start[f"kernel{i}"] = (generator.standard_normal((into, out)) / into**0.5).astype(np.float32)
        start[f"bias{i}"] = np.zeros(out, dtype=np.float32)
    data = [
        (own.standard_normal((16, SIZES[0])), own.integers(0, SIZES[-1], 16))
        for own in (np.random.default_rng([runtime.rank(), step]) for step in range(50))
    ]

    weights = {key: tf.Variable(value, name=key) for key, value in start.items()}
    exchange = Exchange(list(weights.values()), COMPRESSIONS[name])

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            used = {key: tf.cast(weight, tf.float64) for key, weight in weights.items()}
            for i in range(3):
                x = x @ used[f"kernel{i}"] + used[f"bias{i}"]
                x = x if i == 2 else tf.tanh(x)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, x))
        found = exchange.exchange(tape.gradient(loss, list(weights.values())))
        for weight, mean in zip(weights.values(), found, strict=True):
            weight.assign_sub(RATE * mean)

    for x, y in data:
        step(tf.constant(x), tf.constant(y))

    theirs = {key: torch.nn.Parameter(torch.from_numpy(value.copy())) for key, value in start.items()}
    optimizer = gc.DistributedOptimizer(
        torch.optim.SGD(theirs.values(), lr=RATE), theirs.items(), compression=COMPRESSIONS[name]
    )
    for x, y in data:
        given = torch.from_numpy(x)
        for i in range(3):
            given = given @ theirs[f"kernel{i}"].double() + theirs[f"bias{i}"].double()
            given = given if i == 2 else torch.tanh(given)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(given, torch.from_numpy(y)).backward()
        optimizer.step()

    worst = 0.0
    for key, weight in weights.items():
        expected = theirs[key].detach().numpy()
        worst = max(worst, np.linalg.norm(weight.numpy() - expected) / np.linalg.norm(expected))
    assert worst <= 1e-5
    assert_same_on_all_ranks(exchange, weights.values())


# ------------------------------------------------------------------------- when a rank dies

A_RANK_DIES = """
import os, time
import tensorflow as tf
import gradcomp.tf as gc
from keras_checks import exchange as Exchange

gc.init(log_level="error", timeout_seconds=20.0)
weight = tf.Variable(tf.ones([300, 200]))
exchange = Exchange([weight], "quantize:bits=4")

@tf.function
def step():
    weight.assign_sub(0.1 * exchange.exchange([weight * gc.rank()])[0])

for number in range(10):
    if gc.rank() == 1 and number == 5:
        os._exit(3)
    begin = time.monotonic()
    try:
        with gc.typed_errors():
            step()
    except gc.TransportError as error:
        print(f"a rank has died, seen after {time.monotonic() - begin:.1f} s: {error}", flush=True)
        os._exit(0)
"""


@pytest.mark.alone
def test_a_rank_that_dies_is_an_error_on_the_others_within_seconds() -> None:
    (survivor, dead) = run_ranks(A_RANK_DIES, 2, env=ENV, timeout=60, imported=preloaded.TENSORFLOW)
    assert dead.returncode == 3
    assert survivor.returncode == 0, survivor.stderr
    assert "a rank has died" in survivor.stdout, survivor.stderr
    seconds = float(survivor.stdout.partition("seen after ")[2].partition(" s")[0])
    assert seconds < 10


# ------------------------------------------------------------------------- without other ranks


def test_a_world_of_one_returns_gradients_as_they_are() -> None:
    with world_of_one():
        exchange = Exchange(variables(), Quantize(bits=4))
        given = tensors(draw(0))
        assert exchange.exchanger is None
        assert all(one is other for one, other in zip(exchange.exchange(given), given, strict=True))


def test_layers_of_variables() -> None:
    keras.utils.clear_session()
    convolution, norm = keras.layers.Conv2D(16, 3, name="conv"), keras.layers.BatchNormalization(name="batch")
    rest = [keras.layers.Flatten(), keras.layers.Dense(10, name="dense")]
    model = keras.Sequential([keras.Input((8, 8, 3)), convolution, norm, *rest], name="model")
    layers = {layer.name.removeprefix("model/"): layer for layer in specs(model.trainable_variables)}
    assert {name: layer.kind for name, layer in layers.items()} == {
        "conv/kernel": "weight", "conv/bias": "bias", "batch/gamma": "norm", "batch/beta": "norm",
        "dense/kernel": "weight", "dense/bias": "bias",
    }  # fmt: skip
    assert layers["conv/kernel"].shape == (27, 16)
    same = [tf.Variable(tf.zeros([2, 3, 4]), name="same") for _ in range(3)]
    assert [(layer.name, layer.shape) for layer in specs(same)] == [
        ("same", (6, 4)), ("same_1", (6, 4)), ("same_2", (6, 4)),
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="complex"):
        specs([tf.Variable(tf.zeros([2], tf.complex64))])
    with pytest.raises(ConfigError, match="expected variables"):
        specs([tf.zeros([2])])


def test_groups_follow_the_order_of_production() -> None:
    found: list[Any] = []

    @tf.function
    def trace(x):
        late = [x + 1.0, x + 2.0, x + 3.0]
        given = [late[1], None, late[0], late[2], x]
        found.append(groups_of(given, [(4,)] * 5, group_elements=8))
        return late

    trace(tf.zeros([4]))
    assert found == [[[4, 2], [0, 3]]]
    assert groups_of([None, None], [(4,)] * 2, 8) == [[]]


def test_arrays_are_taken_over_and_used_again() -> None:
    memory = HostMemory([(300, 200)], [tf.float32])
    array = memory.allocate(0)
    array[:] = 1.0
    address = array.ctypes.data
    tensor = memory.tensor(array)
    assert bridge.lent(tensor).ctypes.data == address
    del array
    other = memory.allocate(0)
    assert other.ctypes.data != address
    del tensor, other
    assert memory.allocate(0).ctypes.data == address


def test_errors_of_ops_become_typed_again() -> None:
    def fail():
        raise StateError("no such thing")

    function = tf.function(lambda: bridge.op(fail, [], [tf.float32]))
    with pytest.raises(StateError, match="no such thing"), bridge.typed_errors():
        function()
    with pytest.raises(tf.errors.InvalidArgumentError), bridge.typed_errors():
        tf.reshape(tf.zeros([3]), [2])
