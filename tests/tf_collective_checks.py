"""What every rank checks about TensorFlow's collectives beside ``collective_checks``: shapes, variables, order."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from collective_adapters import Collectives
from tf_collectives import calling, check, equal

import gradcomp.tf as gc
from gradcomp.tf.bridge import typed_errors

# ------------------------------------------------------------------------------------------------- tensors


@check()
def what_becomes_a_tensor_is_one(c: Collectives) -> None:
    equal(c.mode(lambda: gc.allreduce(np.float32([1, 2])))(), tf.constant([1.0, 2.0]))
    equal(c.mode(lambda: gc.allreduce(2.0))(), tf.constant(2.0))
    variable = tf.Variable([float(c.rank)])
    equal(c.mode(lambda: gc.allreduce(variable, op=gc.Sum))(), tf.constant([float(sum(range(c.world)))]))


@check("graph")
def static_shapes_are_kept(c: Collectives) -> None:
    shapes: list[Any] = []

    def look(x: Any) -> Any:
        swapped = gc.alltoall(x, [0] * (c.world - 1) + [7])[0]
        results = (gc.allreduce(x), gc.broadcast(x, 0), gc.allgather(x), gc.reducescatter(x), swapped)
        shapes.extend(result.shape.as_list() for result in results)
        return x

    c.mode(look)(tf.ones([7, 3]))
    own = 7 // c.world + (c.rank < 7 % c.world)
    assert shapes == [[7, 3], [7, 3], [None, 3], [own, 3], [None, 3]]


@check("graph")
def unknown_shapes_are_settled_when_it_runs(c: Collectives) -> None:
    @tf.function(input_signature=[tf.TensorSpec(None, tf.float32)])
    def everything(x: Any) -> Any:
        return gc.allreduce(x), gc.allgather(x), gc.broadcast(x, 0), gc.reducescatter(x), gc.alltoall(x)

    results = everything(tf.ones([c.world, 2]))
    for result, rows in zip(results, (c.world, c.world * c.world, c.world, 1, c.world), strict=True):
        equal(result, tf.ones([rows, 2]))


def gradient_of(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The gradient of the sum of what the function returns."""

    def gradient(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_sum(function(x))
        return tape.gradient(y, x)

    return gradient


@check()
def gradients_have_gradients(c: Collectives) -> None:
    first = gradient_of(lambda x: gc.allreduce(x, op=gc.Sum) ** 3)
    # first = N * 3 s^2 with s the sum of x over ranks; its sum's gradient, summed over ranks: N * N * 6 s.
    equal(c.mode(gradient_of(first))(tf.ones(2)), tf.fill([2], 6.0 * c.world**3))


@check()
def rows_of_slices_are_gathered(c: Collectives) -> None:
    for op, divisor in ((gc.Average, c.world), (gc.Sum, 1)):

        def reduce(values: Any, indices: Any, op: Any = op) -> Any:
            return gc.allreduce(tf.IndexedSlices(values, indices, tf.constant([9, 2])), op=op)

        result = c.mode(reduce)(tf.fill([c.rank + 1, 2], 1.0 + c.rank), tf.fill([c.rank + 1], c.rank))
        assert isinstance(result, tf.IndexedSlices)
        expected = np.zeros([9, 2], np.float32)
        for r in range(c.world):
            expected[r] = (r + 1) * (r + 1) / divisor
        np.testing.assert_allclose(tf.convert_to_tensor(result), expected, rtol=1e-6)


@check()
def what_cannot_be_exchanged_is_refused(c: Collectives) -> None:
    sparse, ragged = tf.sparse.eye(2), tf.ragged.constant([[1.0], [2.0, 3.0]])
    slices = tf.IndexedSlices(tf.ones([1, 2]), [0])
    symbolic = keras.Input([3])
    for collective in (gc.allreduce, gc.allgather, gc.reducescatter, gc.alltoall):
        for wrong, text in (
            *((tf.constant(["text"]), "string"), (sparse, "to_dense"), (ragged, "to_tensor")),
            *((object(), "object"), (symbolic, "KerasTensor"), ({}, "not a tensor but dict")),
        ):
            with c.raises(gc.ConfigError, "rank 0", text):
                c.mode(calling(collective, wrong))()
    with c.raises(gc.ConfigError, "IndexedSlices", "convert_to_tensor"):
        c.mode(lambda: gc.broadcast(slices, 0))()


@check()
def slices_take_average_and_sum(c: Collectives) -> None:
    slices = tf.IndexedSlices(tf.ones([1, 2]), [0])
    for arguments in ({"op": gc.Max}, {"op": gc.Adasum}, {"postscale_factor": 2.0}):
        with c.raises(gc.ConfigError, "tf.IndexedSlices take Average and Sum"):
            c.mode(lambda a=arguments: gc.allreduce(slices, **a))()


@check("graph")
def scalars_of_unknown_shape_have_no_rows(c: Collectives) -> None:
    for collective in (gc.allgather, gc.reducescatter, gc.alltoall):
        unknown = tf.function(collective, input_signature=[tf.TensorSpec(None, tf.float32)])
        with c.raises(gc.ConfigError, "without dimensions"):
            unknown(tf.constant(1.0))


# ------------------------------------------------------------------------------------------------ variables


def model(seed: int) -> keras.Model:
    keras.utils.set_random_seed(seed)
    keras.backend.clear_session()
    layers = [
        keras.layers.Embedding(7, 4), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5),
        keras.layers.Dense(2, dtype="mixed_bfloat16"),
    ]  # fmt: skip
    made = keras.Sequential([keras.Input([3]), *layers])
    made.layers[1].moving_mean.assign([float(seed)] * 4)
    return made


@check()
def roots_of_variables_must_be_there(c: Collectives) -> None:
    for root in (c.world, -1, "0"):
        with c.raises(gc.ConfigError, "root_rank", f"0 .. {c.world - 1}"):
            c.mode(lambda r=root: gc.broadcast_variables([], r))()


@check()
def a_models_variables_become_the_roots(c: Collectives) -> None:
    c.mode(lambda: gc.broadcast_variables([]))()
    for root in {0, c.world - 1}:
        ours = model(c.rank)
        c.mode(lambda m=ours, r=root: gc.broadcast_variables(m.variables, r))()
        for mine, roots in zip(ours.variables, model(root).variables, strict=True):
            equal(mine.value, roots.value)


@check()
def odd_variables_are_broadcast_in_chunks(c: Collectives) -> None:
    from gradcomp.job import channel as module

    def make(seed: int) -> list[tf.Variable]:
        values = [
            tf.constant([seed % 2 == 0] * 3), tf.fill([2], tf.complex(float(seed), 1.0)), tf.zeros([0]),
            tf.fill([3], tf.constant(seed + 0.5, tf.float64)), tf.constant(seed, tf.int64),
            tf.constant([float("nan"), -0.0, seed], tf.bfloat16), tf.fill([100], seed), tf.fill([1], 1.0 * seed),
        ]  # fmt: skip
        return [tf.Variable(value) for value in values]

    ours = make(c.rank)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_CHUNK_BYTES", 64)
        c.mode(lambda: gc.broadcast_variables(ours, c.world - 1))()
    for mine, roots in zip(ours, make(c.world - 1), strict=True):
        equal(mine.read_value(), roots.read_value())


@check()
def different_variables_name_the_first_difference(c: Collectives) -> None:
    last = c.rank == c.world - 1
    shapes = [tf.Variable(tf.ones(3), name="same"), tf.Variable(tf.ones(4 if last else 3), name="w")]
    names = [tf.Variable(tf.ones(3), name="kernel" if last else "bias")]
    dtypes = [tf.Variable(tf.ones(3, tf.float64 if last else tf.float32), name="w")]
    fewer = [tf.Variable(tf.fill([2], float(c.rank)), name="a"), tf.Variable(1.0, name="b")][
        : 1 if last else 2
    ]
    for variables, *texts in (
        (shapes, "w: float32 [3]", f"rank {c.world - 1} has w: float32 [4]"),
        (names, "rank 0 has bias:", "kernel"),
        (dtypes, "float32", "float64"),
        (fewer, "nothing more"),
    ):
        with c.raises(gc.PlanMismatchError, *texts):
            c.mode(lambda v=variables: gc.broadcast_variables(v))()
    equal(fewer[0].read_value(), tf.fill([2], float(c.rank)))  # nothing moved


@check()
def what_is_no_variable_is_refused(c: Collectives) -> None:
    loose = tf.Variable([1.0], shape=tf.TensorShape([None]), name="loose")
    text = tf.Variable("text", name="label")
    for wrong, said in (
        *((3, "got int"), ([tf.ones(2)], "not a variable"), ([1.0], "not a variable but float")),
        *(([loose], "loose: its shape"), ([text], "label: string")),
    ):
        with c.raises(gc.ConfigError, "rank 0", said):
            c.mode(lambda w=wrong: gc.broadcast_variables(w))()


# -------------------------------------------------------------------------------------------------- objects


@check("eager")
def objects_arrive(c: Collectives) -> None:
    value = {
        "none": None, "numbers": [1, -2.5, True, 2**80, float("inf")], "text": "ü", "bytes": b"\0x", "tuple": (1, ()),
        3: {}, "dict": {"tuple": [1]},
    }  # fmt: skip
    got = gc.broadcast_object(value if c.rank == c.world - 1 else object(), root_rank=c.world - 1)
    assert got == value
    assert [type(item) for item in got["numbers"]] == [int, float, bool, int, float]


@check("eager")
def arrays_in_objects_arrive(c: Collectives) -> None:
    bf16 = tf.bfloat16.as_numpy_dtype
    arrays = [np.arange(6.0).reshape(2, 3).T, np.zeros([0, 2], np.int8), np.asarray(1 + 2j), np.ones(3, bf16)]
    got = gc.broadcast_object([*arrays, np.float32(0.1)] if c.rank == 0 else None)
    for mine, roots in zip(got, [*arrays, np.float32(0.1)], strict=True):
        assert type(mine) is type(roots)
        assert mine.dtype == roots.dtype
        np.testing.assert_array_equal(mine, roots)
    got[0][:] = 1  # it is the receiver's own


class Custom:
    pass


@check("eager")
def anything_else_is_refused_on_every_rank(c: Collectives) -> None:
    for wrong, said in (
        *((Custom(), "Custom"), (len, "builtin"), ({(1, 2): 3}, "tuple as a key"), ({1, 2}, "set")),
        *((np.asarray([None]), "ndarray of object"), (tf.ones(2), "numpy()"), (np.asarray("text"), "<U4")),
    ):
        with c.raises(gc.ConfigError, "rank 0", said, "only None, numbers"):
            gc.broadcast_object({"x": wrong} if c.rank == 0 else None)


# ---------------------------------------------------------------------------------------------------- order


@check("graph")
def calls_with_names_in_another_order_on_each_rank(c: Collectives) -> None:
    """More calls than threads, Python between them, results that nobody needs, and in a loop."""
    collectives = {
        "sum": lambda x, name: gc.allreduce(x, op=gc.Sum, name=name)[0],
        "mean": lambda x, name: gc.grouped_allreduce([x, x], name=name)[1][0],
        "rows": lambda x, name: tf.reduce_sum(gc.allgather(x, name=name)) / len(x),
        "root": lambda x, name: gc.broadcast(x, 1, name=name)[0],
        "part": lambda x, name: (
            tf.reduce_sum(gc.reducescatter(x, op=gc.Sum, name=name))
            / tf.cast(len(gc.reducescatter(x, name=f"{name} again")), tf.float32)
        ),
        "swap": lambda x, name: tf.reduce_sum(gc.alltoall(x, name=name)) * c.world / len(x),
        "slices": lambda x, name: tf.reduce_sum(
            tf.convert_to_tensor(
                gc.allreduce(
                    tf.IndexedSlices(x[:, None], tf.range(len(x)), [len(x), 1]), op=gc.Sum, name=name
                )
            )[0]
        ),
    }
    total = float(sum(range(1, c.world + 1)))
    expected = dict.fromkeys(collectives, total) | {"mean": total / c.world, "root": 2.0}
    order = list(collectives)[:: 1 if c.rank == 0 else -1]

    @tf.function
    def step(x: Any) -> Any:
        results = []
        for name in order:
            results.append(collectives[name](x, name))
            tf.numpy_function(np.copy, [results[0]], tf.float32)
        for name in order[::-1]:
            gc.allreduce(x, name=f"{name}, for nobody")
        for _ in tf.range(3):
            again = [
                collectives[name](result * 0.0 + x, f"{name} in a loop")
                for name, result in zip(order, results, strict=True)
            ]
            results = [tf.add(*pair) for pair in zip(results, again, strict=True)]
        return {name: result / 4.0 for name, result in zip(order, results, strict=True)}

    for _ in range(2):
        found = step(tf.fill([6], c.rank + 1.0))
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, err_msg=name)


@check("graph")
def gradients_of_calls_in_another_order(c: Collectives) -> None:
    weight = tf.Variable(tf.ones(3))

    @tf.function
    def step() -> Any:
        with tf.GradientTape() as tape:
            names = ["a", "b", "c", "d"][:: 1 if c.rank == 0 else -1]
            loss = tf.add_n([tf.reduce_sum(gc.allreduce(weight, op=gc.Sum, name=name)) for name in names])
        return tape.gradient(loss, weight)

    for _ in range(2):
        equal(step(), tf.fill([3], 4.0 * c.world))


@check("graph")
def a_name_used_twice_in_a_function(c: Collectives) -> None:
    def twice(x: Any) -> Any:
        return gc.allreduce(x, op=gc.Sum, name="twice"), gc.allreduce(x * 2.0, op=gc.Sum, name="twice")

    once, doubled = c.mode(twice)(tf.ones(3))
    equal(doubled, once * 2.0)
    slices = tf.IndexedSlices(tf.ones([1, 3]), tf.constant([c.rank]), tf.constant([c.world, 3]))
    dense, rows = c.mode(lambda x: gc.grouped_allreduce([x, slices], op=gc.Sum, name="both"))(tf.ones(3))
    equal(dense, once)
    equal(tf.convert_to_tensor(rows), tf.ones([c.world, 3]))


@check("graph")
def calls_run_in_program_order(c: Collectives) -> None:
    """Results that nobody uses, calls without data between them, on ranks that are slow in different places."""

    def nap(x: Any, turn: int) -> Any:
        def wait(value: Any) -> Any:
            time.sleep(0.1 * (turn == c.rank))
            return value

        x.set_shape([3])
        return tf.ensure_shape(tf.numpy_function(wait, [x], tf.float32, stateful=False), [3])

    weight = tf.Variable(1.0)

    @tf.function
    def inner(x: Any) -> Any:
        gc.allreduce(x * weight, name="inner")
        return x

    @tf.function
    def outer(x: Any) -> Any:
        a = gc.allreduce(nap(x, 0), name="first")
        if tf.reduce_sum(nap(x, 1)) > 0:
            gc.allreduce(x * weight, name="branch")
        else:
            gc.barrier()
        gc.allreduce(x, name="behind the branch")
        inner(nap(x, 0))
        gc.allreduce(x, name="behind the function")
        for _ in tf.range(2):
            inner(nap(x, 1))
            gc.allgather(x, name="in the loop")
        gc.barrier()
        weight.assign_add(1.0)
        return a

    for _ in range(3):
        equal(outer(tf.ones(3)), tf.ones(3))
    assert outer.experimental_get_tracing_count() == 1


@check("graph")
def gradients_run_in_program_order_too(c: Collectives) -> None:
    weight = tf.Variable(tf.ones(3))

    @tf.function
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            parts = [gc.allreduce(x * weight, op=gc.Sum, name=str(i)) for i in range(4)]
            loss = tf.add_n([tf.reduce_sum(part) for part in parts])
        gc.barrier()
        gradient = tape.gradient(loss, weight)
        gc.barrier()
        weight.assign_sub(0.0 * gradient)
        return gradient

    for _ in range(3):
        equal(step(tf.ones(3)), tf.fill([3], 4.0 * c.world))


@check("eager")
def errors_while_tracing_keep_their_class(c: Collectives) -> None:
    with pytest.raises(gc.ConfigError, match="op=Sum"):
        tf.function(gc.allreduce)(tf.constant([True]))


@check("graph")
def errors_while_running_can_be_had_back(c: Collectives) -> None:
    with pytest.raises(gc.PlanMismatchError, match="do not call the same"), typed_errors():
        c.mode(gc.allreduce)(tf.ones(1 + min(c.rank, 1)))


@check("eager")
def xla_cannot_call_out(c: Collectives) -> None:
    collectives = (gc.allreduce, gc.allgather, gc.reducescatter, gc.alltoall, lambda x: gc.broadcast(x, 0))
    for called in (*collectives, tf.function(gc.allreduce)):
        with pytest.raises(gc.ConfigError, match="jit_compile=False"):
            tf.function(called, jit_compile=True)(tf.ones(6))
    gc.barrier()
