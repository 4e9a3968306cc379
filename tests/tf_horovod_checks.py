"""More of what every rank checks about TensorFlow's collectives: groups, errors, gradients, statistics, Keras."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from collective_adapters import Collectives, close
from tf_collectives import calling, check, equal

import gradcomp.tf as gc
from gradcomp.tf.bridge import typed_errors


def gradients(
    c: Collectives, function: Callable[[list[Any]], Sequence[Any]], tensors: Sequence[Any]
) -> list[Any]:
    """Of rank + 1 times the sum of all that the function returns."""
    with tf.GradientTape() as tape:
        tape.watch(tensors)
        loss = tf.add_n([tf.cast(tf.reduce_sum(each), tf.float32) for each in function(list(tensors))])
        loss = loss * (c.rank + 1.0)
    return tape.gradient(loss, tensors)


# ---------------------------------------------------------------------------------------------- reductions


@check()
def groups_may_hold_slices(c: Collectives) -> None:
    def reduce(dense: Any, rows: Any, index: Any) -> Any:
        slices = tf.IndexedSlices(rows, index, tf.constant([5, 2]))
        return gc.grouped_allreduce([dense, slices, dense], op=gc.Average, name="mixed")

    first, slices, last = c.mode(reduce)(
        tf.fill([3], float(c.rank)), tf.ones([c.rank + 1, 2]), tf.range(c.rank + 1)
    )
    mean = np.full(3, sum(range(c.world)) / c.world, np.float32)
    close(c.array(first), mean)
    close(c.array(last), mean)
    expected = np.zeros([5, 2], np.float32)
    for r in range(c.world):
        expected[: r + 1] += 1 / c.world
    np.testing.assert_allclose(tf.convert_to_tensor(slices), expected, rtol=1e-6)


@check()
def groups_are_refused_for_one_member(c: Collectives) -> None:
    with c.raises(gc.ConfigError, "tensor 1: ", "string"):
        c.mode(calling(gc.grouped_allreduce, [tf.ones(1), tf.constant("text")]))()
    with c.raises(gc.ConfigError, "not a list of tensors"):
        gc.grouped_allreduce(tf.ones(2))
    with c.raises(gc.PlanMismatchError, "[3]", "[2]"):
        c.mode(lambda: gc.grouped_allreduce([tf.ones(1), tf.ones(3 if c.rank else 2)]))()
    assert gc.grouped_allreduce([]) == gc.grouped_allgather([]) == gc.grouped_reducescatter([]) == []


# --------------------------------------------------------------------------------------------------- moves


@check()
def variables_are_broadcast_under_a_name(c: Collectives) -> None:
    ours = [tf.Variable([float(c.rank)] * 2, name="a"), tf.Variable(c.rank, name="b")]
    for name in ("first", "first", None):
        values = c.mode(lambda n=name: gc.broadcast_(ours, c.world - 1, name=n))()
        equal(values[0], tf.fill([2], c.world - 1.0))
        equal(values[1], tf.constant(c.world - 1))
        equal(ours[1].read_value(), tf.constant(c.world - 1))
        ours[0].assign([float(c.rank)] * 2)
    gc.broadcast_variables(ours, 0, None, True)
    equal(ours[0].read_value(), tf.zeros(2))


@check("eager")
def objects_are_gathered(c: Collectives) -> None:
    mine = {"rank": c.rank, "rows": [np.full(c.rank, c.rank)], "text": "x" * c.rank}
    for number, got in enumerate(gc.allgather_object(mine, name="states")):
        assert got["rank"] == number
        assert got["text"] == "x" * number
        np.testing.assert_array_equal(got["rows"][0], np.full(number, number))
    with c.raises(gc.ConfigError, f"rank {c.world - 1}", "object"):
        gc.allgather_object(object() if c.rank == c.world - 1 else 1)
    with c.raises(gc.ConfigError, "session"):
        gc.allgather_object(1, session="tf1")
    assert gc.broadcast_object_fn(1)(c.rank) == 1


@check()
def questions_are_answered_when_they_run(c: Collectives) -> None:
    def ask() -> Any:
        some = gc.ProcessSet([0])
        return (
            gc.size_op(), gc.rank_op(), gc.local_rank_op(), gc.local_size_op(), gc.size_op(some),
            gc.process_set_included_op(some), gc.process_set_included_op(),
        )  # fmt: skip

    answers = c.mode(ask)()
    assert all(answer.dtype == tf.int32 and answer.shape == [] for answer in answers)
    assert [int(answer) for answer in answers] == [c.world, c.rank, c.rank, c.world, 1, int(c.rank == 0), 1]
    with c.raises(gc.ConfigError, "process_set_id"):
        gc.size_op(3)


@check("graph")
def a_question_is_not_answered_while_a_function_is_traced(c: Collectives) -> None:
    some = gc.ProcessSet([0])
    ask = tf.function(lambda: gc.process_set_included_op(some))
    ask.get_concrete_function()
    some._ranks = (0, 1)  # what a change of the job would do
    assert int(ask()) == int(c.rank < 2)


# -------------------------------------------------------------------------------------------------- errors


@check("eager")
def errors_are_those_that_scripts_for_horovod_catch(c: Collectives) -> None:
    """The classes of TensorFlow's that Horovod raises, and gradcomp's own, under one traceback."""
    odd = tf.ones([c.world * (2 + min(c.rank, 1)), 2])
    for call in (
        lambda: gc.allreduce(odd),
        lambda: gc.reducescatter(odd),
        lambda: gc.allgather(tf.transpose(odd)),
        lambda: gc.alltoall(tf.cast(odd, tf.float32 if c.rank else tf.int32)),
        lambda: gc.broadcast(odd, 0),
        lambda: gc.broadcast_variables([tf.Variable(odd)]),
        lambda: gc.grouped_allreduce([odd, tf.ones(1)]),
    ):
        with pytest.raises(tf.errors.FailedPreconditionError, match="do not call the same") as caught:
            call()
        assert isinstance(caught.value, gc.PlanMismatchError)
        assert caught.value.__suppress_context__
    for call in (
        lambda: gc.alltoall(tf.ones([c.world + 1])),
        lambda: gc.alltoall(tf.ones([c.world]), splits=[2] * c.world),
        lambda: gc.broadcast(tf.ones(1), c.world),
        lambda: gc.allreduce(tf.constant([True])),
    ):
        with pytest.raises(tf.errors.InvalidArgumentError) as invalid:
            call()
        assert isinstance(invalid.value, gc.ConfigError)
        assert isinstance(invalid.value, ValueError)
    again = pickle.loads(pickle.dumps(invalid.value))
    assert (type(again), str(again)) == (type(invalid.value), str(invalid.value))
    with pytest.raises(tf.errors.FailedPreconditionError, match="do not call the same"), typed_errors():
        tf.function(gc.allreduce)(odd)
    layer = keras.layers.Lambda(gc.allreduce)  # Keras makes errors of layers anew
    with pytest.raises(gc.PlanMismatchError, match="do not call the same"):
        layer(odd)
    slices = tf.IndexedSlices(tf.ones([1, 3]), tf.constant([c.rank]))
    for asked in ({"op": gc.Min}, {"op": gc.Sum, "prescale_factor": 0.5}, {"op": gc.Adasum}):
        for group in ([slices], [tf.ones(1), slices]):
            with pytest.raises(NotImplementedError, match="take Average and Sum") as unsupported:
                gc.grouped_allreduce(group, **asked)
            assert isinstance(unsupported.value, gc.ConfigError)
    with pytest.raises(RuntimeError, match="broadcast_variables") as caught:
        gc.broadcast_global_variables(0)
    assert isinstance(caught.value, gc.ConfigError)


@check()
def named_compressions_code_tensors(c: Collectives) -> None:
    for dtype in (tf.float16, tf.float32, tf.float64, tf.int32, tf.bool):
        tensor = tf.cast(tf.ones([3]), dtype)
        for named, half in ((gc.Compression.fp16, tf.float16), (gc.Compression.bf16, tf.bfloat16)):

            def there_and_back(x: Any, named: Any = named) -> Any:
                coded, context = named.compress(x)
                return coded, named.decompress(coded, context)

            coded, again = c.mode(there_and_back)(tensor)
            assert coded.dtype == (half if dtype in (tf.float32, tf.float64) else dtype), dtype
            equal(again, tensor)
        assert gc.Compression.none.compress(tensor) == (tensor, None)


@check("eager")
def sessions_of_tensorflow_1_are_refused(c: Collectives) -> None:
    weight = tf.Variable(tf.ones([2]))
    for call in (
        gc.allreduce,
        lambda x: gc.grouped_allgather([x]),
        lambda x: gc.broadcast(x, 0),
        gc.reducescatter,
        gc.alltoall,
        lambda x: gc.broadcast_variables([weight]),
        lambda x: tf.cond(tf.reduce_sum(x) > 0.0, lambda: gc.allreduce(x), lambda: x),
        lambda _: gc.barrier(),
        lambda _: gc.join(),
    ):
        with (
            tf.Graph().as_default(),
            pytest.raises(gc.ConfigError, match=r"sessions of TensorFlow 1.*eager mode.*tf\.function"),
        ):
            call(tf.ones([c.world]))
    gc.barrier()
    with tf.compat.v1.Session(graph=tf.Graph()) as session, session.graph.as_default():
        assert session.run(gc.size_op()) == c.world  # asks nobody
        own = tf.Variable(tf.ones([2]))
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(own * own)
        with pytest.raises(gc.ConfigError, match="sessions of TensorFlow 1"):
            gc.DistributedGradientTape(tape).gradient(loss, [own])


# ----------------------------------------------------------------------------------------------- gradients


@check()
def gradients_of_reductions_are_the_same_reduction(c: Collectives) -> None:
    factors = [float(r + 1) for r in range(c.world)]
    expected = {
        gc.Average: np.mean(factors) * 6, gc.Sum: sum(factors) * 6, gc.Min: 6.0, gc.Max: c.world * 6.0,
        gc.Product: np.prod([3 * each for each in factors]) * 2,
    }  # fmt: skip
    for op, value in expected.items():

        def reduce(given: Any, op: Any = op) -> Any:
            return gc.grouped_allreduce(given, op=op, prescale_factor=3.0, postscale_factor=2.0)

        found = c.mode(lambda a, b, f=reduce: gradients(c, f, [a, b]))(tf.ones([2]), tf.ones([1, 3]))
        for gradient, shape in zip(found, ([2], [1, 3]), strict=True):
            np.testing.assert_allclose(gradient, np.full(shape, value, np.float32), rtol=1e-6)


@check()
def gradients_of_groups_of_many_dtypes(c: Collectives) -> None:
    """Integers have none; an output that nothing depends on has zeros; halves stay halves."""

    def use(given: Any) -> Any:
        parts = gc.grouped_allgather([*given, tf.ones([2], tf.int32)], name="group")
        return [parts[0], parts[2]]  # of float64 and bfloat16, not of the float32 in between

    given = [tf.ones([c.rank + 1], tf.float64), tf.ones([2, 2]), tf.ones([1], tf.bfloat16)]
    found = c.mode(lambda *g: gradients(c, use, g))(*given)
    mean = np.mean(range(1, c.world + 1))
    for gradient, tensor, value in zip(found, given, (mean, 0.0, mean), strict=True):
        close(c.array(gradient), np.full(tensor.shape, value).astype(tensor.dtype.as_numpy_dtype))


@check()
def complex_parts_have_gradients(c: Collectives) -> None:
    def use(given: Any) -> Any:
        return [tf.math.imag(gc.allgather(*given)) + tf.math.real(gc.broadcast(*given, 0)[:1])]

    mine = tf.complex(tf.ones([2]), tf.ones([2]))
    (found,) = c.mode(lambda x: gradients(c, use, [x]))(mine)
    assert found.dtype == tf.complex64
    mean = np.mean(range(1, c.world + 1))
    np.testing.assert_allclose(tf.math.imag(found), [mean] * 2, rtol=1e-6)
    rows = 2.0 * c.world  # of the allgather, to each of which the root's first number is added
    np.testing.assert_allclose(tf.math.real(found), [mean * rows if c.rank == 0 else 0.0, 0.0], rtol=1e-6)


# ---------------------------------------------------------------------------------------- local gradients


def built(layer: Any, *shape: int) -> Any:
    layer.build((None, *shape))
    return layer


@check()
def a_tape_reduces_by_any_operation(c: Collectives) -> None:
    weight, rows = tf.Variable([1.0, 2.0]), tf.Variable(tf.ones([4, 1]))

    def gradient(**arguments: Any) -> Callable[[], Any]:
        def step() -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(weight * tf.constant([c.rank + 1.0, -c.rank]))
                loss += tf.reduce_sum(tf.gather(rows, [c.rank, c.rank]))
            return gc.DistributedGradientTape(tape, **arguments).gradient(loss, [weight, rows])

        return step

    dense, as_dense = c.mode(gradient(op=gc.Max, sparse_as_dense=True))()
    np.testing.assert_array_equal(dense, [c.world, 0.0])
    np.testing.assert_array_equal(as_dense[:, 0], [2.0] * c.world + [0.0] * (4 - c.world))
    with c.raises(gc.ConfigError, "tf.IndexedSlices take Average and Sum"):
        c.mode(gradient(op=gc.Max))()
    if c.world == 2:
        dense, _ = c.mode(gradient(op=gc.Adasum, sparse_as_dense=True, compression="fp16"))()
        a, b = np.array([1.0, 0.0]), np.array([2.0, -1.0])
        expected = (1 - a @ b / (2 * a @ a)) * a + (1 - a @ b / (2 * b @ b)) * b
        np.testing.assert_allclose(dense, expected, rtol=1e-3)


@check()
def gradients_of_local_layers_stay(c: Collectives) -> None:
    ours, shared = (
        built(keras.layers.Dense(1, use_bias=False, kernel_initializer="ones", name=name), 2)
        for name in ("own", "shared")
    )
    extra = tf.Variable(1.0)
    sources = [ours.kernel, shared.kernel.value, extra]

    def step(scales: bool, both: bool) -> Any:
        with tf.GradientTape() as tape:
            x = tf.fill([1, 2], c.rank + 1.0)
            loss = tf.reduce_sum(ours(x) + shared(x)) + extra * (c.rank + 1.0)
        tape = gc.PartialDistributedGradientTape(tape, local_layers=[ours], scale_local_gradients=scales)
        tape.register_local_source(extra)
        if both:
            local, other = tape.get_local_and_global_gradients(loss, sources)
            assert [pair[0] is source for pair, source in zip(local, [sources[0], extra], strict=True)]
            return local[0][1], other[0][1], local[1][1]
        return tape.gradient(loss, sources, None, True)

    mean = np.mean(range(1, c.world + 1))
    for scales, own in ((True, (c.rank + 1) / c.world), (False, c.rank + 1)):
        found = c.mode(lambda s=scales: step(s, both=s))()
        for gradient, shape, value in zip(found, ([2, 1], [2, 1], []), (own, mean, own), strict=True):
            np.testing.assert_allclose(c.array(gradient), np.full(shape, value), rtol=1e-6)
    with c.raises(gc.ConfigError, "local_layers must be layers"):
        gc.PartialDistributedGradientTape(tf.GradientTape(), local_layers=[extra])


# ------------------------------------------------------------------------------------ batch normalisation


@check()
def statistics_are_those_of_all_batches(c: Collectives) -> None:
    sizes, generator = [3, 0, 2][: c.world], np.random.default_rng(3)
    x, w = (generator.standard_normal((sum(sizes), 5, 3)).astype(np.float32) + 100 for _ in range(2))
    mask = generator.integers(0, 2, (sum(sizes), 5)).astype(bool)
    mine = slice(sum(sizes[: c.rank]), sum(sizes[: c.rank + 1]))
    for given in (None, mask):
        layer, plain = (
            built(gc.SyncBatchNormalization(), 5, 3),
            built(keras.layers.BatchNormalization(), 5, 3),
        )

        def train(one: Any, x: Any, w: Any, mask: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = one(x, training=True, mask=mask)
                loss = tf.reduce_sum(y * (w - 100.0))
            return y, *tape.gradient(loss, [x, one.gamma.value, one.beta.value])

        own = None if given is None else tf.constant(given[mine])
        ours = c.mode(lambda x, w, o=own, f=train, i=layer: f(i, x, w, o))(
            tf.constant(x[mine]), tf.constant(w[mine])
        )
        theirs = train(plain, tf.constant(x), tf.constant(w), None if given is None else tf.constant(given))
        for found, expected in zip(ours[:2], theirs[:2], strict=True):
            np.testing.assert_allclose(c.array(found), expected[mine], rtol=1e-3, atol=1e-4)
        for found, expected in zip(ours[2:], theirs[2:], strict=True):
            np.testing.assert_allclose(gc.allreduce(found, op=gc.Sum), expected, rtol=1e-3, atol=1e-3)
        for found, expected in zip(layer.non_trainable_variables, plain.non_trainable_variables, strict=True):
            np.testing.assert_allclose(c.array(found), expected, rtol=1e-4)
            everyone = gc.allgather(tf.convert_to_tensor(found)[tf.newaxis])
            for each in everyone:
                equal(each, everyone[0])
        if c.rank == 0:  # alone: nothing is exchanged
            np.testing.assert_allclose(layer(x[:1]), plain(x[:1]), rtol=1e-4, atol=1e-4)


@check()
def empty_batches_alone_have_no_statistics(c: Collectives) -> None:
    layer = built(gc.SyncBatchNormalization(), 5, 3)
    with pytest.raises(tf.errors.InvalidArgumentError, match="no rank has a value"):
        c.mode(lambda x: layer(x, training=True))(tf.zeros([0, 5, 3]))
    gc.barrier()
    with c.raises(gc.ConfigError, "fused"):
        gc.SyncBatchNormalization(fused=True)
    again = keras.layers.deserialize(keras.layers.serialize(gc.SyncBatchNormalization(momentum=0.5)))
    assert type(again) is gc.SyncBatchNormalization
    assert again.momentum == 0.5


# ---------------------------------------------------------------------------------------- horovod.keras


@check("eager")
def values_are_exchanged_under_horovods_keras_names(c: Collectives) -> None:
    import gradcomp.tf.keras as hvd

    total = float(sum(range(c.world)))
    np.testing.assert_allclose(hvd.allreduce(float(c.rank), "value"), total / c.world, rtol=1e-6)
    np.testing.assert_allclose(hvd.allreduce([float(c.rank)], None, False), [total])
    np.testing.assert_allclose(hvd.allreduce([1.0], op=hvd.Sum, postscale_factor=2.0), [2.0 * c.world])
    np.testing.assert_allclose(hvd.allreduce([c.rank], op=hvd.Max, compression="none"), [c.world - 1])
    np.testing.assert_array_equal(hvd.allgather([c.rank]), range(c.world))
    np.testing.assert_array_equal(hvd.broadcast([c.rank], 1), [1])
    np.testing.assert_array_equal(hvd.reducescatter(np.ones([c.world, 2]), op=hvd.Sum), [[c.world] * 2])
