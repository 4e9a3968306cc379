"""More of what every rank checks about TensorFlow's collectives: all of Horovod's operations, groups and gradients.

See ``tf_collective_checks``, whose ``main`` runs these too. Expected values and gradients come from NumPy.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from numpy_reductions import DTYPES, SHAPES, UFUNCS, ops_of, reduced, values
from tf_collective_checks import Mode, calling, check, gradient_of, raises, same

import gradcomp.tf as gc
from gradcomp.tf.bridge import typed_errors


def close(result: Any, expected: np.ndarray) -> None:
    """Equal but for the order of additions."""
    assert result.dtype == expected.dtype, (result.dtype, expected.dtype)
    assert result.shape == expected.shape, (result.shape, expected.shape)
    if result.dtype.is_floating:
        rtol = 1e-6 if result.dtype in (tf.float32, tf.float64) else 1e-2
        np.testing.assert_allclose(
            np.asarray(result, np.float64), np.asarray(expected, np.float64), rtol=rtol, atol=1e-6
        )
    else:
        np.testing.assert_array_equal(result, expected)


def gradients(function: Callable[[list[Any]], Sequence[Any]], tensors: Sequence[Any], rank: int) -> list[Any]:
    """Of rank + 1 times the sum of all that the function returns."""
    with tf.GradientTape() as tape:
        tape.watch(tensors)
        loss = tf.add_n([tf.cast(tf.reduce_sum(each), tf.float32) for each in function(list(tensors))])
        loss = loss * (rank + 1.0)
    return tape.gradient(loss, tensors)


# ---------------------------------------------------------------------------------------------- reductions


@check()
def every_op_of_every_dtype_and_shape(rank: int, world: int, mode: Mode) -> None:
    forms = list(itertools.product(DTYPES, SHAPES))
    ours = [[values(dtype, shape, r) for r in range(world)] for dtype, shape in forms]
    for op in UFUNCS:
        chosen = [each for (dtype, _), each in zip(forms, ours, strict=True) if op in ops_of(dtype)]
        given = [tf.constant(each[rank]) for each in chosen]
        for result, each in zip(
            mode(lambda g, o=op: gc.grouped_allreduce(g, op=o))(given), chosen, strict=True
        ):
            close(result, reduced(each, op))
    for place, dtype in enumerate(DTYPES):  # each op once: all pairs were in the groups
        op = list(ops_of(dtype))[place % len(ops_of(dtype))]
        each = [values(dtype, (3, 4), r) for r in range(world)]
        close(mode(lambda x, o=op: gc.allreduce(x, op=o))(tf.constant(each[rank])), reduced(each, op))


@check()
def every_op_scatters_its_rows(rank: int, world: int, mode: Mode) -> None:
    for op in UFUNCS:
        chosen = [
            [values(dtype, (world + 1, 2), r) for r in range(world)]
            for dtype in DTYPES
            if op in ops_of(dtype)
        ]
        given = [tf.constant(each[rank]) for each in chosen]
        results = mode(lambda g, o=op: gc.grouped_reducescatter(g, op=o))(given)
        for result, each in zip(results, chosen, strict=True):
            close(result, np.array_split(reduced(each, op), world)[rank])


@check()
def a_nan_of_any_rank_is_the_minimum_and_the_maximum(rank: int, world: int, mode: Mode) -> None:
    mine = tf.constant([float("nan") if rank == world - 1 else 1.0, float(rank)])
    for op, second in ((gc.Min, 0.0), (gc.Max, world - 1.0)):
        np.testing.assert_array_equal(mode(lambda x, o=op: gc.allreduce(x, op=o))(mine), [np.nan, second])


@check()
def factors_are_applied_before_and_after(rank: int, world: int, mode: Mode) -> None:
    mine = tf.fill([world], rank + 1.0)
    expected = 8.0 * sum((0.5 * (r + 1)) for r in range(world))
    factors = {"op": gc.Sum, "prescale_factor": 0.5, "postscale_factor": 8.0}
    np.testing.assert_allclose(mode(lambda x: gc.allreduce(x, **factors))(mine), [expected] * world)
    np.testing.assert_allclose(mode(lambda x: gc.reducescatter(x, **factors))(mine), [expected])
    product = np.prod([2.0 * (r + 1) for r in range(world)])
    scaled = mode(lambda x: gc.allreduce(x, op=gc.Product, prescale_factor=2.0))(mine)
    np.testing.assert_allclose(scaled, [product] * world)
    whole = mode(lambda x: gc.allreduce(x, op=gc.Sum, postscale_factor=0.5))(tf.constant([7 * (rank == 0)]))
    same(whole, tf.constant([3]))


@check()
def adasum_adds_what_is_orthogonal_and_averages_what_is_parallel(rank: int, world: int, mode: Mode) -> None:
    if world != 2:
        return
    for dtype in (tf.float16, tf.bfloat16, tf.float32, tf.float64):
        axis = tf.cast(tf.constant([[1.0, 0.0], [0.0, 2.0]])[rank], dtype)
        parallel = tf.cast(tf.constant([3.0, 3.0]), dtype)
        total, mean = mode(lambda a, b: gc.grouped_allreduce([a, b], op=gc.Adasum))(axis, parallel)
        close(total, np.array([1.0, 2.0]).astype(dtype.as_numpy_dtype))
        close(mean, np.array([3.0, 3.0]).astype(dtype.as_numpy_dtype))


@check()
def halves_travel_and_the_dtype_comes_back(rank: int, world: int, mode: Mode) -> None:
    third = tf.constant([1 / 3], tf.float32)
    for compression, half in ((gc.Compression.fp16, tf.float16), (gc.Compression.bf16, tf.bfloat16)):
        expected = tf.cast(tf.cast(third, half), tf.float32)
        for given in (compression, compression.to_string()):
            same(mode(lambda x, c=given: gc.allreduce(x, compression=c))(third), expected)
        rows = tf.repeat(third, world)
        same(mode(lambda x, c=compression: gc.reducescatter(x, compression=c))(rows), expected)
    same(mode(lambda x: gc.allreduce(x, compression=gc.Compression.none))(third), third)
    whole = tf.constant([rank], tf.int32)
    same(mode(lambda x: gc.allreduce(x, op=gc.Max, compression="fp16"))(whole), tf.constant([world - 1]))


class Doubling:
    """A compressor as Horovod's users write them."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return tensor * 2, tensor.dtype

    @staticmethod
    def decompress(tensor: Any, context: Any) -> Any:
        return tf.cast(tensor + 1, context)


@check()
def a_users_own_compressor_is_called(rank: int, world: int, mode: Mode) -> None:
    same(mode(lambda x: gc.allreduce(x, compression=Doubling))(tf.ones(2)), tf.fill([2], 3.0))


@check()
def groups_may_hold_slices(rank: int, world: int, mode: Mode) -> None:
    def reduce(dense: Any, rows: Any, index: Any) -> Any:
        slices = tf.IndexedSlices(rows, index, tf.constant([5, 2]))
        return gc.grouped_allreduce([dense, slices, dense], op=gc.Average, name="mixed")

    first, slices, last = mode(reduce)(tf.fill([3], float(rank)), tf.ones([rank + 1, 2]), tf.range(rank + 1))
    mean = np.full(3, sum(range(world)) / world, np.float32)
    close(first, mean)
    close(last, mean)
    expected = np.zeros([5, 2], np.float32)
    for r in range(world):
        expected[: r + 1] += 1 / world
    np.testing.assert_allclose(tf.convert_to_tensor(slices), expected, rtol=1e-6)


@check()
def groups_are_refused_for_one_member(rank: int, world: int, mode: Mode) -> None:
    with raises(gc.ConfigError, "tensor 1: ", "string"):
        mode(calling(gc.grouped_allreduce, [tf.ones(1), tf.constant("text")]))()
    with raises(gc.ConfigError, "not a list of tensors"):
        gc.grouped_allreduce(tf.ones(2))
    with raises(gc.PlanMismatchError, "[3]", "[2]"):
        mode(lambda: gc.grouped_allreduce([tf.ones(1), tf.ones(3 if rank else 2)]))()
    assert gc.grouped_allreduce([]) == gc.grouped_allgather([]) == gc.grouped_reducescatter([]) == []


# --------------------------------------------------------------------------------------------------- moves


@check()
def groups_of_ragged_parts_are_joined(rank: int, world: int, mode: Mode) -> None:
    parts = [[tf.cast(tf.fill([r + n, 2], r), dtype) for r in range(world)] for n, dtype in enumerate(
        (tf.float32, tf.bool, tf.bfloat16, tf.complex64, tf.uint8)
    )]  # fmt: skip
    for result, each in zip(mode(gc.grouped_allgather)([p[rank] for p in parts]), parts, strict=True):
        same(result, tf.concat(each, 0))


@check()
def variables_are_broadcast_under_a_name(rank: int, world: int, mode: Mode) -> None:
    ours = [tf.Variable([float(rank)] * 2, name="a"), tf.Variable(rank, name="b")]
    for name in ("first", "first", None):
        values = mode(lambda n=name: gc.broadcast_(ours, world - 1, name=n))()
        same(values[0], tf.fill([2], world - 1.0))
        same(values[1], tf.constant(world - 1))
        same(ours[1].read_value(), tf.constant(world - 1))
        ours[0].assign([float(rank)] * 2)
    gc.broadcast_variables(ours, 0, None, True)
    same(ours[0].read_value(), tf.zeros(2))


@check("eager")
def objects_are_gathered(rank: int, world: int, mode: Mode) -> None:
    mine = {"rank": rank, "rows": [np.full(rank, rank)], "text": "x" * rank}
    for number, got in enumerate(gc.allgather_object(mine, name="states")):
        assert got["rank"] == number
        assert got["text"] == "x" * number
        np.testing.assert_array_equal(got["rows"][0], np.full(number, number))
    with raises(gc.ConfigError, f"rank {world - 1}", "object"):
        gc.allgather_object(object() if rank == world - 1 else 1)
    with raises(gc.ConfigError, "session"):
        gc.allgather_object(1, session="tf1")
    assert gc.broadcast_object_fn(1)(rank) == 1


@check()
def questions_are_answered_when_they_run(rank: int, world: int, mode: Mode) -> None:
    def ask() -> Any:
        some = gc.ProcessSet([0])
        return (
            gc.size_op(), gc.rank_op(), gc.local_rank_op(), gc.local_size_op(), gc.size_op(some),
            gc.process_set_included_op(some), gc.process_set_included_op(),
        )  # fmt: skip

    answers = mode(ask)()
    assert all(answer.dtype == tf.int32 and answer.shape == [] for answer in answers)
    assert [int(answer) for answer in answers] == [world, rank, rank, world, 1, int(rank == 0), 1]
    with raises(gc.ConfigError, "process_set_id"):
        gc.size_op(3)


@check("graph")
def a_question_is_not_answered_while_a_function_is_traced(rank: int, world: int, mode: Mode) -> None:
    some = gc.ProcessSet([0])
    ask = tf.function(lambda: gc.process_set_included_op(some))
    ask.get_concrete_function()
    some._ranks = (0, 1)  # what a change of the job would do
    assert int(ask()) == int(rank < 2)


@check("eager")
def names_find_each_other_in_any_order(rank: int, world: int, mode: Mode) -> None:
    """From two threads; ``calls_with_names_in_another_order_on_each_rank`` looks at tf.function."""
    from concurrent.futures import ThreadPoolExecutor

    names = ["a", "b"] if rank == 0 else ["b", "a"]
    with ThreadPoolExecutor(2) as pool:
        jobs = [
            (name, pool.submit(gc.allreduce, tf.fill([2], float(ord(name))), name=name)) for name in names
        ]
        for name, job in jobs:
            same(job.result(), tf.fill([2], float(ord(name))))


# -------------------------------------------------------------------------------------------------- errors


@check("eager")
def errors_are_those_that_scripts_for_horovod_catch(rank: int, world: int, mode: Mode) -> None:
    """The classes of TensorFlow's that Horovod raises, and gradcomp's own, under one traceback."""
    odd = tf.ones([world * (2 + min(rank, 1)), 2])
    for call in (
        lambda: gc.allreduce(odd),
        lambda: gc.reducescatter(odd),
        lambda: gc.allgather(tf.transpose(odd)),
        lambda: gc.alltoall(tf.cast(odd, tf.float32 if rank else tf.int32)),
        lambda: gc.broadcast(odd, 0),
        lambda: gc.broadcast_variables([tf.Variable(odd)]),
        lambda: gc.grouped_allreduce([odd, tf.ones(1)]),
    ):
        with pytest.raises(tf.errors.FailedPreconditionError, match="do not call the same") as caught:
            call()
        assert isinstance(caught.value, gc.PlanMismatchError)
        assert caught.value.__suppress_context__
    for call in (
        lambda: gc.alltoall(tf.ones([world + 1])),
        lambda: gc.alltoall(tf.ones([world]), splits=[2] * world),
        lambda: gc.broadcast(tf.ones(1), world),
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
    slices = tf.IndexedSlices(tf.ones([1, 3]), tf.constant([rank]))
    for asked in ({"op": gc.Min}, {"op": gc.Sum, "prescale_factor": 0.5}, {"op": gc.Adasum}):
        for group in ([slices], [tf.ones(1), slices]):
            with pytest.raises(NotImplementedError, match="take Average and Sum") as unsupported:
                gc.grouped_allreduce(group, **asked)
            assert isinstance(unsupported.value, gc.ConfigError)
    with pytest.raises(RuntimeError, match="broadcast_variables") as caught:
        gc.broadcast_global_variables(0)
    assert isinstance(caught.value, gc.ConfigError)


@check()
def named_compressions_code_tensors(rank: int, world: int, mode: Mode) -> None:
    for dtype in (tf.float16, tf.float32, tf.float64, tf.int32, tf.bool):
        tensor = tf.cast(tf.ones([3]), dtype)
        for named, half in ((gc.Compression.fp16, tf.float16), (gc.Compression.bf16, tf.bfloat16)):

            def there_and_back(x: Any, named: Any = named) -> Any:
                coded, context = named.compress(x)
                return coded, named.decompress(coded, context)

            coded, again = mode(there_and_back)(tensor)
            assert coded.dtype == (half if dtype in (tf.float32, tf.float64) else dtype), dtype
            same(again, tensor)
        assert gc.Compression.none.compress(tensor) == (tensor, None)


@check("eager")
def sessions_of_tensorflow_1_are_refused(rank: int, world: int, mode: Mode) -> None:
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
            call(tf.ones([world]))
    gc.barrier()
    with tf.compat.v1.Session(graph=tf.Graph()) as session, session.graph.as_default():
        assert session.run(gc.size_op()) == world  # asks nobody
        own = tf.Variable(tf.ones([2]))
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(own * own)
        with pytest.raises(gc.ConfigError, match="sessions of TensorFlow 1"):
            gc.DistributedGradientTape(tape).gradient(loss, [own])


# ----------------------------------------------------------------------------------------------- gradients


@check()
def gradients_of_reductions_are_the_same_reduction(rank: int, world: int, mode: Mode) -> None:
    factors = [float(r + 1) for r in range(world)]
    expected = {
        gc.Average: np.mean(factors) * 6, gc.Sum: sum(factors) * 6, gc.Min: 6.0, gc.Max: world * 6.0,
        gc.Product: np.prod([3 * each for each in factors]) * 2,
    }  # fmt: skip
    for op, value in expected.items():

        def reduce(given: Any, op: Any = op) -> Any:
            return gc.grouped_allreduce(given, op=op, prescale_factor=3.0, postscale_factor=2.0)

        found = mode(lambda a, b, f=reduce: gradients(f, [a, b], rank))(tf.ones([2]), tf.ones([1, 3]))
        for gradient, shape in zip(found, ([2], [1, 3]), strict=True):
            np.testing.assert_allclose(gradient, np.full(shape, value, np.float32), rtol=1e-6)


@check()
def a_compressed_tensor_has_a_gradient_of_its_dtype_and_a_scattered_minimum_none(
    rank: int, world: int, mode: Mode
) -> None:
    found = mode(gradient_of(lambda x: gc.allreduce(x, compression="fp16"), rank + 1.0))(tf.ones(2))
    close(found, np.full(2, np.mean(range(1, world + 1)), np.float32))
    with raises(gc.ConfigError, "op=MIN has no gradient"):
        mode(gradient_of(lambda x: gc.reducescatter(x, op=gc.Min)))(tf.ones(world))


@check()
def gradients_of_groups_of_many_dtypes(rank: int, world: int, mode: Mode) -> None:
    """Integers have none; an output that nothing depends on has zeros; halves stay halves."""

    def use(given: Any) -> Any:
        parts = gc.grouped_allgather([*given, tf.ones([2], tf.int32)], name="group")
        return [parts[0], parts[2]]  # of float64 and bfloat16, not of the float32 in between

    given = [tf.ones([rank + 1], tf.float64), tf.ones([2, 2]), tf.ones([1], tf.bfloat16)]
    found = mode(lambda *g: gradients(use, g, rank))(*given)
    mean = np.mean(range(1, world + 1))
    for gradient, tensor, value in zip(found, given, (mean, 0.0, mean), strict=True):
        close(gradient, np.full(tensor.shape, value).astype(tensor.dtype.as_numpy_dtype))


@check()
def complex_parts_have_gradients(rank: int, world: int, mode: Mode) -> None:
    def use(given: Any) -> Any:
        return [tf.math.imag(gc.allgather(*given)) + tf.math.real(gc.broadcast(*given, 0)[:1])]

    mine = tf.complex(tf.ones([2]), tf.ones([2]))
    (found,) = mode(lambda x: gradients(use, [x], rank))(mine)
    assert found.dtype == tf.complex64
    mean = np.mean(range(1, world + 1))
    np.testing.assert_allclose(tf.math.imag(found), [mean] * 2, rtol=1e-6)
    rows = 2.0 * world  # of the allgather, to each of which the root's first number is added
    np.testing.assert_allclose(tf.math.real(found), [mean * rows if rank == 0 else 0.0, 0.0], rtol=1e-6)


# ---------------------------------------------------------------------------------------- local gradients


def built(layer: Any, *shape: int) -> Any:
    layer.build((None, *shape))
    return layer


@check()
def a_tape_reduces_by_any_operation(rank: int, world: int, mode: Mode) -> None:
    weight, rows = tf.Variable([1.0, 2.0]), tf.Variable(tf.ones([4, 1]))

    def gradient(**arguments: Any) -> Callable[[], Any]:
        def step() -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(weight * tf.constant([rank + 1.0, -rank]))
                loss += tf.reduce_sum(tf.gather(rows, [rank, rank]))
            return gc.DistributedGradientTape(tape, **arguments).gradient(loss, [weight, rows])

        return step

    dense, as_dense = mode(gradient(op=gc.Max, sparse_as_dense=True))()
    np.testing.assert_array_equal(dense, [world, 0.0])
    np.testing.assert_array_equal(as_dense[:, 0], [2.0] * world + [0.0] * (4 - world))
    with raises(gc.ConfigError, "tf.IndexedSlices take Average and Sum"):
        mode(gradient(op=gc.Max))()
    if world == 2:
        dense, _ = mode(gradient(op=gc.Adasum, sparse_as_dense=True, compression="fp16"))()
        a, b = np.array([1.0, 0.0]), np.array([2.0, -1.0])
        expected = (1 - a @ b / (2 * a @ a)) * a + (1 - a @ b / (2 * b @ b)) * b
        np.testing.assert_allclose(dense, expected, rtol=1e-3)


@check()
def gradients_of_local_layers_stay(rank: int, world: int, mode: Mode) -> None:
    ours, shared = (
        built(keras.layers.Dense(1, use_bias=False, kernel_initializer="ones", name=name), 2)
        for name in ("own", "shared")
    )
    extra = tf.Variable(1.0)
    sources = [ours.kernel, shared.kernel.value, extra]

    def step(scales: bool, both: bool) -> Any:
        with tf.GradientTape() as tape:
            x = tf.fill([1, 2], rank + 1.0)
            loss = tf.reduce_sum(ours(x) + shared(x)) + extra * (rank + 1.0)
        tape = gc.PartialDistributedGradientTape(tape, local_layers=[ours], scale_local_gradients=scales)
        tape.register_local_source(extra)
        if both:
            local, other = tape.get_local_and_global_gradients(loss, sources)
            assert [pair[0] is source for pair, source in zip(local, [sources[0], extra], strict=True)]
            return local[0][1], other[0][1], local[1][1]
        return tape.gradient(loss, sources, None, True)

    mean = np.mean(range(1, world + 1))
    for scales, own in ((True, (rank + 1) / world), (False, rank + 1)):
        found = mode(lambda s=scales: step(s, both=s))()
        for gradient, shape, value in zip(found, ([2, 1], [2, 1], []), (own, mean, own), strict=True):
            np.testing.assert_allclose(gradient, np.full(shape, value), rtol=1e-6)
    with raises(gc.ConfigError, "local_layers must be layers"):
        gc.PartialDistributedGradientTape(tf.GradientTape(), local_layers=[extra])


# ------------------------------------------------------------------------------------ batch normalisation


@check()
def statistics_are_those_of_all_batches(rank: int, world: int, mode: Mode) -> None:
    sizes, generator = [3, 0, 2][:world], np.random.default_rng(3)
    x, w = (generator.standard_normal((sum(sizes), 5, 3)).astype(np.float32) + 100 for _ in range(2))
    mask = generator.integers(0, 2, (sum(sizes), 5)).astype(bool)
    mine = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
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
        ours = mode(lambda x, w, o=own, f=train, i=layer: f(i, x, w, o))(
            tf.constant(x[mine]), tf.constant(w[mine])
        )
        theirs = train(plain, tf.constant(x), tf.constant(w), None if given is None else tf.constant(given))
        for found, expected in zip(ours[:2], theirs[:2], strict=True):
            np.testing.assert_allclose(found, expected[mine], rtol=1e-3, atol=1e-4)
        for found, expected in zip(ours[2:], theirs[2:], strict=True):
            np.testing.assert_allclose(gc.allreduce(found, op=gc.Sum), expected, rtol=1e-3, atol=1e-3)
        for found, expected in zip(layer.non_trainable_variables, plain.non_trainable_variables, strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-4)
            everyone = gc.allgather(tf.convert_to_tensor(found)[tf.newaxis])
            for each in everyone:
                same(each, everyone[0])
        if rank == 0:  # alone: nothing is exchanged
            np.testing.assert_allclose(layer(x[:1]), plain(x[:1]), rtol=1e-4, atol=1e-4)


@check()
def empty_batches_alone_have_no_statistics(rank: int, world: int, mode: Mode) -> None:
    layer = built(gc.SyncBatchNormalization(), 5, 3)
    with pytest.raises(tf.errors.InvalidArgumentError, match="no rank has a value"):
        mode(lambda x: layer(x, training=True))(tf.zeros([0, 5, 3]))
    gc.barrier()
    with raises(gc.ConfigError, "fused"):
        gc.SyncBatchNormalization(fused=True)
    again = keras.layers.deserialize(keras.layers.serialize(gc.SyncBatchNormalization(momentum=0.5)))
    assert type(again) is gc.SyncBatchNormalization
    assert again.momentum == 0.5


# ---------------------------------------------------------------------------------------- horovod.keras


@check("eager")
def values_are_exchanged_under_horovods_keras_names(rank: int, world: int, mode: Mode) -> None:
    import gradcomp.tf.keras as hvd

    total = float(sum(range(world)))
    np.testing.assert_allclose(hvd.allreduce(float(rank), "value"), total / world, rtol=1e-6)
    np.testing.assert_allclose(hvd.allreduce([float(rank)], None, False), [total])
    np.testing.assert_allclose(hvd.allreduce([1.0], op=hvd.Sum, postscale_factor=2.0), [2.0 * world])
    np.testing.assert_allclose(hvd.allreduce([rank], op=hvd.Max, compression="none"), [world - 1])
    np.testing.assert_array_equal(hvd.allgather([rank]), range(world))
    np.testing.assert_array_equal(hvd.broadcast([rank], 1), [1])
    np.testing.assert_array_equal(hvd.reducescatter(np.ones([world, 2]), op=hvd.Sum), [[world] * 2])
