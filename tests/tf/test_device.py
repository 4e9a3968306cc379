"""Gradients of TensorFlow on a device. The second of two CPUs stands for a GPU; the stand-in for CUDA works on it.

TensorFlow shares memory between the two and does not copy. What a test sees of one is where ops are placed.
"""

# ruff: noqa: E402

from __future__ import annotations

import itertools
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from batch import on_ranks
from cuda_on_cpu.driver import CpuDriver
from kernels.standin import FOLDER
from tiers import every_value

tf = pytest.importorskip("tensorflow", reason="needs TensorFlow: pip install gradcomp[tf-cpu]")
pytest.importorskip("torch", reason="needs torch: pip install gradcomp[torch]")

import keras
import keras_checks
from keras_checks import MODES, assert_alike, compiled, data, fit
from keras_checks import exchange as Exchange

import gradcomp.kernels.cuda
import gradcomp.tf as gc
from gradcomp import Filter, Policy
from gradcomp.core.errors import ConfigError, StateError, TransportError
from gradcomp.exchange.arrivals import Submission
from gradcomp.job import runtime
from gradcomp.kernels import devices as kernel_devices
from gradcomp.kernels.devices import HOST
from gradcomp.tf import bridge
from gradcomp.tf import memory as memories
from gradcomp.tf.memory import DeviceMemory, address_of, place_of

ENV = {**keras_checks.ENV, "TWO_CPUS_ONE_THREAD": "1"}
if "TWO_CPUS_ONE_THREAD" in os.environ:
    _cpu = tf.config.LogicalDeviceConfiguration()
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], [_cpu, _cpu])
    tf.config.threading.set_inter_op_parallelism_threads(1)

SHAPES = [(40, 30), (33,), (), (0, 3)]
COMPRESSIONS = ["quantize:bits=4,bucket_size=64", "topk:density=0.1", "none"]
FOUR_BITS = Policy(COMPRESSIONS[0], filter=Filter(min_elements=64))


class _Everything(CpuDriver):
    """All memory is the device's: whatever TensorFlow allocates."""

    def reaches(self, address: int) -> bool:
        return True


@contextmanager
def on_device(here: bool = True) -> Iterator[Any]:
    """Exchanges made inside take CPU:1 for a GPU, if this rank is one of those; gives the driver."""
    if not here:
        yield None
        return
    driver = _Everything(FOLDER, order=2)
    device = kernel_devices.on("cuda:0", driver)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tf.config, "list_logical_devices", lambda kind: [kind])
        patch.setattr(memories, "_is_gpu", lambda name: name.endswith("CPU:1"))
        patch.setattr(kernel_devices, "cuda_at", lambda address: device)
        yield driver


def variables(shapes: Any = SHAPES, dtype: str = "float32", where: str = "CPU:1") -> list[Any]:
    with tf.device(where):
        return [tf.Variable(tf.zeros(shape, dtype), name=f"layer{i}") for i, shape in enumerate(shapes)]


def draw(step: int, shapes: Any = SHAPES, dtype: str = "float32", where: str = "CPU:1") -> list[Any]:
    generator = np.random.default_rng([runtime.rank(), step])
    with tf.device(where):
        return [tf.cast(tf.constant(generator.standard_normal(shape)), dtype) for shape in shapes]


def seen_by(exchange: Exchange, look: Callable[[Submission], Any]) -> list[Any]:
    """What ``look`` finds in each submission from now on."""
    exchanger, seen = exchange.exchanger, []
    submit = exchanger.pipeline.arrivals.submit

    def watched(submission: Submission) -> None:
        seen.append(look(submission))
        submit(submission)

    exchanger.pipeline.arrivals.submit = watched
    return seen


def on_both(work: Callable[[], Any]) -> None:
    """The work comes to the same bytes on the host and on a device."""
    found = []
    for here in (False, True):
        with on_device(here):
            found.append(bytes_of(work()))
    assert found[0] == found[1]


def means_after(steps: int, compression: str, mode: str, dtype: str = "float32", here: bool = True) -> Any:
    """Those of each step."""
    with on_device(here) as driver:
        exchange = Exchange(variables(dtype=dtype), Policy(compression, filter=Filter(min_elements=64)))
        average = MODES[mode](lambda *gradients: exchange.exchange(gradients))
        found = [average(*draw(step, dtype=dtype)) for step in range(steps)]
        assert (exchange.exchanger.pipeline.device is HOST) is not here
        assert not here or driver.launched
    for means in found:
        assert [(mean.dtype.name, tuple(mean.shape)) for mean in means] == [
            (dtype, shape) for shape in SHAPES
        ]
    return [mean.numpy() for means in found for mean in means]


def bytes_of(arrays: Any) -> bytes:
    return b"".join(np.asarray(array).tobytes() for array in arrays)


# ------------------------------------------------------------------------- means


#: A compression and a dtype.
FORMS = [
    *((each, "float32") for each in COMPRESSIONS),
    *((COMPRESSIONS[0], each) for each in ("float16", "bfloat16", "float64")),
]


@pytest.mark.parametrize(
    ("form", "mode"),
    every_value(itertools.product(FORMS, MODES), lambda case: [case[0], (case[0][1] == "float32", case[1])]),
)
@on_ranks(2, env=ENV)
def test_a_device_gives_the_bytes_of_the_host(form: tuple[str, str], mode: str) -> None:
    alone, ours, mixed = (
        bytes_of(means_after(3, form[0], mode, form[1], here)) for here in (False, True, runtime.rank() == 1)
    )
    assert ours == mixed == alone


@on_ranks(2, env=ENV)
def test_powersgd_keeps_ranks_equal() -> None:
    ours = means_after(2, "powersgd:rank=2", "graph")
    for mine, theirs in zip(ours, means_after(2, "powersgd:rank=2", "graph", here=False), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-3)
    own = bytes_of(ours)
    assert set(Exchange(variables()).exchanger.allgather_bytes(own)) == {own}


@on_ranks(2, env=ENV)
def test_a_loss_scale_and_predivide_reach_the_device() -> None:
    def scaled() -> list[Any]:
        policy = Policy(COMPRESSIONS[1])  # keeps residuals
        exchange = Exchange(variables(), policy, gradient_predivide_factor=4.0)
        function = tf.function(lambda scale, *gradients: exchange.exchange(gradients, scale))
        return [mean for step in range(1, 4) for mean in function(tf.constant(2.0**step), *draw(step))]

    on_both(scaled)


@on_ranks(2, env=ENV)
def test_groups_in_a_loop_of_the_graph() -> None:
    """One thread for ops: a collect that ran before a submit would never return."""

    def trained() -> list[Any]:
        weights, given = variables(), draw(0)
        exchange = Exchange(weights, FOUR_BITS)
        exchange._group_elements = 100

        @tf.function
        def train():
            for _ in tf.range(5):
                gradients = [weight + one for weight, one in zip(weights, given, strict=True)]
                for weight, mean in zip(weights, exchange.exchange(gradients), strict=True):
                    weight.assign_sub(0.125 * mean)

        train()
        assert exchange.exchanger.pipeline.step == 5
        return weights

    on_both(trained)


# ------------------------------------------------------------------------- where it lies


@pytest.mark.parametrize("mode", MODES)
@on_ranks(2, env=ENV)
def test_gradients_are_read_and_means_written_where_they_lie(mode: str) -> None:
    with on_device():
        exchange = Exchange(variables(), FOUR_BITS)
        found = seen_by(exchange, lambda given: (given.layer, (given.gradient, given.output)))
        function = MODES[mode](lambda *given: exchange.exchange(given))
        given = draw(0)
        means = function(*given)
        seen = dict(found)
        for layer in range(3):
            assert seen[layer] == (address_of(given[layer]), address_of(means[layer]))
        assert all(0 not in addresses for addresses in seen.values())  # the empty layer's too
        kept = bytes_of(means)
        assert bytes_of(function(*draw(1))) != kept
        assert bytes_of(means) == kept


@on_ranks(2, env=ENV)
def test_only_what_is_the_hosts_runs_on_the_host() -> None:
    with on_device():
        exchange = Exchange(variables(), FOUR_BITS)
        exchange._group_elements = 100
        graph = tf.function(lambda *given: exchange.exchange(given)).get_concrete_function(*draw(0)).graph
        calls = [(op.type, op.device[-5:]) for op in graph.get_operations() if "PyFunc" in op.type]
        assert calls.count(("EagerPyFunc", "CPU:1")) == 2 + 2  # of each group, a submit and a collect
        assert calls.count(("PyFunc", "CPU:0")) == 2 + 1  # heads, the end
        assert len(calls) == 7


@on_ranks(2, env=ENV)
def test_gradients_that_were_computed_elsewhere_are_brought() -> None:
    with on_device():
        exchange = Exchange(variables(), FOUR_BITS)
        seen = seen_by(exchange, lambda given: given.keep.backing_device[-5:])
        means = exchange.exchange(draw(0, where="CPU:0"))
        assert seen == ["CPU:1"] * 4
        assert all(mean.backing_device.endswith("CPU:1") for mean in means)
        own = bytes_of(means)
        assert set(exchange.exchanger.allgather_bytes(own)) == {own}


@on_ranks(2, env=ENV)
def test_memory_that_the_device_does_not_reach_is_refused() -> None:
    with on_device() as driver:
        exchange = Exchange(variables(), FOUR_BITS)
        driver.reaches = lambda address: False
        with pytest.raises(StateError, match="is not in the memory of cuda:0"):
            exchange.exchange(draw(0))


# ------------------------------------------------------------------------- sparse and absent


@pytest.mark.parametrize("mode", MODES)
@on_ranks(2, env=ENV)
def test_rows_travel_beside_dense_gradients(mode: str) -> None:
    def means() -> list[Any]:
        exchange = Exchange(variables([(70,), (50, 4), (40, 30)]), FOUR_BITS)
        function = MODES[mode](lambda *given: exchange.exchange(given))
        first, rows, last = draw(0, [(70,), (5, 4), (40, 30)])
        index = tf.constant([3, 1, 7, 1, 20 + runtime.rank()])
        given = first, tf.IndexedSlices(rows, index, tf.constant([50, 4])), last
        for _ in range(2):
            first, middle, last = function(*given)
        return [first, middle.indices, middle.values, last]

    on_both(means)


@pytest.mark.parametrize("mode", MODES)
@on_ranks(2, env=ENV)
def test_rows_alone(mode: str) -> None:
    with on_device():
        exchange = Exchange(variables([(5, 3)]))
        rows = tf.IndexedSlices(tf.ones([1, 3]), tf.constant([runtime.rank()]), tf.constant([5, 3]))
        (mean,) = MODES[mode](lambda: exchange.exchange([rows]))()
        expected = np.zeros((5, 3), np.float32)
        expected[:2] = 0.5
        np.testing.assert_array_equal(tf.convert_to_tensor(mean), expected)


@pytest.mark.parametrize("mode", MODES)
@on_ranks(2, env=ENV)
def test_a_gradient_that_only_another_rank_has_is_named(mode: str) -> None:
    with on_device() as driver:
        exchange = Exchange(variables(), FOUR_BITS)
        gradients = draw(0)
        if runtime.rank() == 0:
            gradients[0] = None  # for whose mean the engine then allocates memory
        function = MODES[mode](lambda: [exchange.exchange(gradients) for _ in range(2)])
        with pytest.raises((StateError, TransportError)) as caught, bridge.typed_errors():
            function()  # the rank that has all of them hears of it in the second step
        assert driver.launched
        assert runtime.rank() == 1 or "layer0" in str(caught.value)


@on_ranks(2, env=ENV)
def test_errors_on_the_device_are_gradcomps() -> None:
    with on_device():
        exchange = Exchange(variables([(5,)]))
        function = tf.function(exchange.exchange, input_signature=[[tf.TensorSpec([None])]])
        with (
            pytest.raises((StateError, TransportError), match=r"'layer0' has shape \(5,\)"),
            bridge.typed_errors(),
        ):
            function([tf.zeros([6])])


# ------------------------------------------------------------------------- Keras


@on_ranks(2, env=ENV)
def test_fit() -> None:
    found = []
    for here in (False, True):
        with on_device(here) as driver, tf.device("CPU:1"):
            sgd = keras.optimizers.SGD(0.125, momentum=0.5)
            optimizer = gc.DistributedOptimizer(sgd, compression=keras_checks.compression())
            ours = compiled(optimizer)
            fit(ours, *data()[:2])
            assert optimizer.statistics().steps == 8
            assert not here or driver.launched
            assert_alike(ours.weights, optimizer.variables)
            found.append(bytes_of(ours.get_weights()))
    assert found[0] == found[1]


# ------------------------------------------------------------------------- which device


@on_ranks(2, env=ENV)
def test_variables_on_several_devices_are_exchanged_on_the_host() -> None:
    mixed = variables([(5,)]) + variables([(5,)], where="CPU:0")
    assert place_of(mixed) is None
    with on_device():
        assert place_of(variables([(5,)], where="CPU:0")) is None
        assert place_of(variables([(0, 5)])) is None  # nothing to exchange, and no memory
        assert place_of(variables([(5,)])) is not None
        said: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
        memories.logger.addHandler(handler)
        for _ in range(2):
            exchange = Exchange(mixed)
            assert exchange.exchanger.pipeline.device is HOST
            assert len(exchange.exchange(draw(0, [(5,), (5,)]))) == 2
        memories.logger.removeHandler(handler)
    (one,) = [text for text in said if "exchanged on the CPU" in text]
    assert "CPU:0, " in one


def test_without_cupy_and_bindings_gradients_are_exchanged_on_the_host(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("over_cupy", "over_bindings"):
        monkeypatch.setitem(sys.modules, f"gradcomp.kernels.cuda.{name}", None)
        monkeypatch.delattr(gradcomp.kernels.cuda, name, raising=False)
    with pytest.raises(ConfigError, match=r"pip install 'gradcomp\[cuda13\]'"):
        kernel_devices.cuda_at(1)
    given = variables(where="CPU:0")
    assert place_of(given) is None
    assert not caplog.messages
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: [kind])
    monkeypatch.setattr(memories, "_is_gpu", lambda name: True)
    monkeypatch.setattr(memories.logger, "propagate", True)
    memories._warn.cache_clear()
    for _ in range(2):
        assert place_of(given) is None
    (text,) = caplog.messages
    assert text.startswith(
        "gradients are exchanged on the CPU: GPUs need CuPy or cuda-bindings: pip install 'gradcomp[cuda13]'"
    )


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_addresses_are_those_of_the_memory(dtype: str) -> None:
    for shape in [(), (1,), (3, 4), (2, 1, 5)]:
        tensor = tf.fill(shape, tf.constant(1, dtype))
        assert bridge.lent(tensor).tobytes() == tensor.numpy().tobytes()
        if shape:
            assert address_of(tensor) == bridge.lent(tensor).ctypes.data
    assert address_of(tf.zeros((0, 3), dtype)) == 0


def test_every_mean_has_memory_of_its_own() -> None:
    shapes = [(), (1,), (40, 30), (0, 3)]
    dtypes = [tf.float32, tf.bfloat16, tf.float32, tf.float16]
    memory = DeviceMemory(tf.zeros(()).backing_device, HOST, shapes, dtypes)
    means = [memory.allocate(layer) for layer in range(4) for _ in range(3)]
    filled = [mean for mean in means if mean.shape.num_elements()]
    assert len({memory.address(mean) for mean in filled}) == 9
    assert [(mean.dtype, tuple(mean.shape)) for mean in means[::3]] == list(zip(dtypes, shapes, strict=True))
    assert memory.address(means[-1])
