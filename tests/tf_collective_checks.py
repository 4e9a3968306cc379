"""What every rank checks about TensorFlow's collectives, in eager mode and inside tf.function, in this order.

A check asserts on every rank. It gets this rank, the world's size, and ``mode``, which makes a function run in one of
the two ways. ``main`` writes what came of each, by name and mode, as JSON.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_checks import new_names
from without_inline import nothing_inline_among

import gradcomp.tf as gc
from gradcomp.tf import bridge
from gradcomp.tf.bridge import typed_errors

Mode = Callable[[Callable[..., Any]], Callable[..., Any]]


def eager(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def graph(function: Callable[..., Any]) -> Callable[..., Any]:
    return tf.function(function)


MODES = {"eager": eager, "graph": graph}
CHECKS: dict[str, tuple[Callable[[int, int, Mode], None], tuple[str, ...]]] = {}


def check(*modes: str) -> Callable[[Callable[[int, int, Mode], None]], Callable[[int, int, Mode], None]]:
    """Register a check, for both modes if none is named."""

    def register(function: Callable[[int, int, Mode], None]) -> Callable[[int, int, Mode], None]:
        CHECKS[function.__name__] = function, modes or tuple(MODES)
        return function

    return register


@contextmanager
def raises(kind: type[Exception], *texts: str) -> Iterator[None]:
    """An error while an op runs is TensorFlow's, with the class and the message in its text."""
    with pytest.raises((kind, tf.errors.OpError)) as caught:
        yield
    text = str(caught.value)
    assert isinstance(caught.value, kind) or f"{kind.__name__}: " in text, text
    assert all(part in text for part in texts), text


def calling(function: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
    """The call, for arguments that tf.function would look into."""
    return lambda: function(*arguments)


def same(left: Any, right: Any) -> None:
    right = tf.convert_to_tensor(right)
    assert left.dtype == right.dtype, (left.dtype, right.dtype)
    assert left.shape == right.shape, (left.shape, right.shape)
    assert np.ascontiguousarray(left).tobytes() == np.ascontiguousarray(right).tobytes(), (left, right)


def gradient_of(function: Callable[[Any], Any], weight: float = 1.0) -> Callable[[Any], Any]:
    """The gradient of ``weight`` times the sum of what the function returns."""

    def gradient(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_sum(function(x)) * weight
        return tape.gradient(y, x)

    return gradient


FLOATS = (tf.float16, tf.bfloat16, tf.float32, tf.float64)
INTEGERS = (tf.uint8, tf.int8, tf.uint16, tf.int16, tf.uint32, tf.int32, tf.uint64, tf.int64)


@check("graph")
def the_first_call_is_traced_once(rank: int, world: int, mode: Mode) -> None:
    assert bridge._turn is None, "this must be the first check in a graph"
    call = tf.function(gc.allreduce)
    for _ in range(2):
        call(tf.ones(1))
    assert call.experimental_get_tracing_count() == 1


# ---------------------------------------------------------------------------------------------- allreduce


@check()
def average_is_the_default(rank: int, world: int, mode: Mode) -> None:
    values = [tf.range(5.0) * (r + 1) for r in range(world)]
    for arguments in ({}, {"average": True}):
        result = mode(lambda x, a=arguments: gc.allreduce(x, **a))(values[rank])
        np.testing.assert_allclose(result, np.mean(values, axis=0), rtol=1e-6)
    same(mode(lambda x: gc.allreduce(x, average=False))(tf.ones(3)), tf.ones(3) * world)


@check()
def halves_are_added_in_float32(rank: int, world: int, mode: Mode) -> None:
    """256 + 1 + 1 + ... is 256 in bfloat16, one addition at a time."""
    value = tf.constant([256.0 if rank == 0 else 1.0], tf.bfloat16)
    same(mode(lambda x: gc.allreduce(x, op=gc.Sum))(value), tf.constant([256.0 + world - 1], tf.bfloat16))
    rows = tf.repeat(value, world)
    same(mode(lambda x: gc.reducescatter(x, op=gc.Sum))(rows), tf.constant([256.0 + world - 1], tf.bfloat16))


@check()
def average_of_large_halves_does_not_overflow(rank: int, world: int, mode: Mode) -> None:
    large = tf.constant([60000.0] * world, tf.float16)
    same(mode(gc.allreduce)(large), large)
    same(mode(gc.reducescatter)(large), large[:1])


@check()
def what_becomes_a_tensor_is_one(rank: int, world: int, mode: Mode) -> None:
    same(mode(lambda: gc.allreduce(np.float32([1, 2])))(), tf.constant([1.0, 2.0]))
    same(mode(lambda: gc.allreduce(2.0))(), tf.constant(2.0))
    variable = tf.Variable([float(rank)])
    same(mode(lambda: gc.allreduce(variable, op=gc.Sum))(), tf.constant([float(sum(range(world)))]))


@check()
def sums_are_the_same_bytes_everywhere(rank: int, world: int, mode: Mode) -> None:
    result = mode(gc.allreduce)(tf.random.stateless_normal([10007], [rank, 1]))
    everyone = tf.reshape(gc.allgather(result), [world, -1])
    for row in everyone:
        same(row, everyone[0])


@check("graph")
def static_shapes_are_kept(rank: int, world: int, mode: Mode) -> None:
    shapes: list[Any] = []

    def look(x: Any) -> Any:
        swapped = gc.alltoall(x, [0] * (world - 1) + [7])[0]
        results = (gc.allreduce(x), gc.broadcast(x, 0), gc.allgather(x), gc.reducescatter(x), swapped)
        shapes.extend(result.shape.as_list() for result in results)
        return x

    mode(look)(tf.ones([7, 3]))
    own = 7 // world + (rank < 7 % world)
    assert shapes == [[7, 3], [7, 3], [None, 3], [own, 3], [None, 3]]


@check("graph")
def unknown_shapes_are_settled_when_it_runs(rank: int, world: int, mode: Mode) -> None:
    @tf.function(input_signature=[tf.TensorSpec(None, tf.float32)])
    def everything(x: Any) -> Any:
        return gc.allreduce(x), gc.allgather(x), gc.broadcast(x, 0), gc.reducescatter(x), gc.alltoall(x)

    results = everything(tf.ones([world, 2]))
    for result, rows in zip(results, (world, world * world, world, 1, world), strict=True):
        same(result, tf.ones([rows, 2]))


@check()
def gradients_have_gradients(rank: int, world: int, mode: Mode) -> None:
    first = gradient_of(lambda x: gc.allreduce(x, op=gc.Sum) ** 3)
    # first = N * 3 s^2 with s the sum of x over ranks; its sum's gradient, summed over ranks: N * N * 6 s.
    same(mode(gradient_of(first))(tf.ones(2)), tf.fill([2], 6.0 * world**3))


@check()
def rows_of_slices_are_gathered(rank: int, world: int, mode: Mode) -> None:
    for op, divisor in ((gc.Average, world), (gc.Sum, 1)):

        def reduce(values: Any, indices: Any, op: Any = op) -> Any:
            return gc.allreduce(tf.IndexedSlices(values, indices, tf.constant([9, 2])), op=op)

        result = mode(reduce)(tf.fill([rank + 1, 2], 1.0 + rank), tf.fill([rank + 1], rank))
        assert isinstance(result, tf.IndexedSlices)
        expected = np.zeros([9, 2], np.float32)
        for r in range(world):
            expected[r] = (r + 1) * (r + 1) / divisor
        np.testing.assert_allclose(tf.convert_to_tensor(result), expected, rtol=1e-6)


@check()
def different_shapes_name_both(rank: int, world: int, mode: Mode) -> None:
    with raises(gc.PlanMismatchError, "rank 0 has", "[3]", f"rank {world - 1} has", "[4]"):
        mode(gc.allreduce)(tf.ones(4 if rank == world - 1 else 3))


@check()
def different_dtypes_operations_and_names_are_refused(rank: int, world: int, mode: Mode) -> None:
    def differ(collective: Any, **arguments: Any) -> Callable[[Any], Any]:
        return mode(lambda x: collective(x, **arguments))

    reductions, own, x = (gc.allreduce, gc.reducescatter), int(rank == 0), tf.ones(6)
    for collective in (*reductions, gc.allgather, gc.alltoall):
        with raises(gc.PlanMismatchError, "float32", "float64"):
            differ(collective)(tf.cast(x, (tf.float32, tf.float64)[own]))
        if collective in reductions:
            with raises(gc.PlanMismatchError, "AVERAGE", "SUM"):
                differ(collective, op=(gc.Average, gc.Sum)[own])(x)
    with raises(gc.PlanMismatchError, "'loss'", "'accuracy'"):  # they wait for each other for a second
        differ(gc.allreduce, name=("accuracy", "loss")[own])(x)


@check()
def different_calls_are_refused(rank: int, world: int, mode: Mode) -> None:
    with raises(gc.PlanMismatchError, "barrier()", "allreduce("):
        if rank == 0:
            mode(gc.barrier)()
        else:
            mode(gc.allreduce)(tf.ones(3))


@check()
def one_ranks_bad_argument_is_everyones_error(rank: int, world: int, mode: Mode) -> None:
    with raises(gc.ConfigError, f"rank {world - 1}", "string"):
        mode(lambda: gc.allreduce("no tensor" if rank == world - 1 else tf.ones(3)))()


@check()
def what_cannot_be_exchanged_is_refused(rank: int, world: int, mode: Mode) -> None:
    sparse, ragged = tf.sparse.eye(2), tf.ragged.constant([[1.0], [2.0, 3.0]])
    slices = tf.IndexedSlices(tf.ones([1, 2]), [0])
    symbolic = keras.Input([3])
    for collective in (gc.allreduce, gc.allgather, gc.reducescatter, gc.alltoall):
        for wrong, text in (
            *((tf.constant(["text"]), "string"), (sparse, "to_dense"), (ragged, "to_tensor")),
            *((object(), "object"), (symbolic, "KerasTensor"), ({}, "not a tensor but dict")),
        ):
            with raises(gc.ConfigError, "rank 0", text):
                mode(calling(collective, wrong))()
    for reduction in (gc.allreduce, gc.reducescatter):
        with raises(gc.ConfigError, "complex128", "reduced"):
            mode(calling(reduction, tf.constant([1j])))()
    with raises(gc.ConfigError, "IndexedSlices", "convert_to_tensor"):
        mode(lambda: gc.broadcast(slices, 0))()


@check()
def wrong_operations_are_refused(rank: int, world: int, mode: Mode) -> None:
    with raises(gc.ConfigError, "average and op"):
        mode(lambda: gc.allreduce(tf.ones(1), average=True, op=gc.Sum))()
    for collective in (gc.allreduce, gc.reducescatter):
        for value, arguments, *texts in (
            (1.0, {"op": "mean"}, "Average or Sum"),
            (True, {}, "average of bool"),
            (True, {"op": gc.Sum, "prescale_factor": 2.0}, "bool cannot be scaled"),
            (1.0, {"prescale_factor": float("nan")}, "prescale_factor must be a finite number"),
            (1.0, {"compression": gc.TopK(density=0.5)}, "compression must be", "topk"),
        ):
            with raises(gc.ConfigError, *texts):
                mode(lambda c=collective, v=value, a=arguments: c(tf.constant([v]), **a))()
    for collective, dtype in ((gc.reducescatter, tf.float32), (gc.allreduce, tf.int32)):
        with raises(gc.ConfigError, "Adasum is an allreduce of floating-point tensors"):
            mode(lambda c=collective, d=dtype: c(tf.ones(2, d), op=gc.Adasum))()
    if world == 3:
        with raises(gc.ConfigError, "power of two"):
            mode(lambda: gc.allreduce(tf.ones(2), op=gc.Adasum))()
    slices = tf.IndexedSlices(tf.ones([1, 2]), [0])
    for arguments in ({"op": gc.Max}, {"op": gc.Adasum}, {"postscale_factor": 2.0}):
        with raises(gc.ConfigError, "tf.IndexedSlices take Average and Sum"):
            mode(lambda a=arguments: gc.allreduce(slices, **a))()


# ----------------------------------------------------------------------------------------------- allgather


@check()
def ragged_parts_are_joined(rank: int, world: int, mode: Mode) -> None:
    parts = [tf.fill([r, 3], float(r)) for r in range(world)]
    same(mode(gc.allgather)(parts[rank]), tf.concat(parts, 0))


@check()
def any_dtype_is_moved(rank: int, world: int, mode: Mode) -> None:
    for dtype in (*FLOATS, *INTEGERS, tf.bool, tf.complex64, tf.complex128):
        parts = [tf.cast(tf.range(world) + r, dtype) for r in range(world)]
        move = mode(lambda x: (gc.allgather(x), gc.broadcast(x, world - 1), gc.alltoall(x)))
        gathered, roots, swapped = move(parts[rank])
        same(gathered, tf.concat(parts, 0))
        same(roots, parts[-1])
        same(swapped, tf.stack([part[rank] for part in parts]))


@check()
def nothing_is_gathered_from_empty_parts(rank: int, world: int, mode: Mode) -> None:
    same(mode(gc.allgather)(tf.zeros([0, 4])), tf.zeros([0, 4]))
    same(mode(gc.allgather)(tf.zeros([2, 0])), tf.zeros([2 * world, 0]))


@check()
def gradient_of_allgather_is_the_mean_of_each_part(rank: int, world: int, mode: Mode) -> None:
    def numbered(x: Any) -> Any:
        whole = gc.allgather(x)
        return whole * tf.range(tf.cast(tf.size(whole), tf.float32))

    start = sum(range(rank + 1))
    gradient = mode(gradient_of(numbered))(tf.ones(rank + 1))
    same(gradient, tf.range(float(start), float(start + rank + 1)))


@check()
def different_trailing_shapes_are_refused(rank: int, world: int, mode: Mode) -> None:
    for collective in (gc.allgather, gc.alltoall):
        with raises(gc.PlanMismatchError, "[*, 3]", "[*, 4]"):
            mode(collective)(tf.ones([world, 4 if rank else 3]))


@check()
def scalars_have_no_rows(rank: int, world: int, mode: Mode) -> None:
    for collective in (gc.allgather, gc.reducescatter, gc.alltoall):
        with raises(gc.ConfigError, "without dimensions"):
            mode(collective)(tf.constant(1.0))
        if mode is graph:
            unknown = tf.function(collective, input_signature=[tf.TensorSpec(None, tf.float32)])
            with raises(gc.ConfigError, "without dimensions"):
                unknown(tf.constant(1.0))


# ----------------------------------------------------------------------------------------------- broadcast


@check()
def the_roots_bytes_arrive(rank: int, world: int, mode: Mode) -> None:
    for root in range(world):
        value = tf.constant([float("nan"), -0.0, root]) if rank == root else tf.ones(3)
        same(mode(lambda x, r=root: gc.broadcast(x, r))(value), tf.constant([float("nan"), -0.0, root]))


@check()
def gradient_of_broadcast_is_the_roots(rank: int, world: int, mode: Mode) -> None:
    gradient = mode(gradient_of(lambda x: gc.broadcast(x, 1), rank + 1.0))(tf.ones(2))
    mean = sum(range(world + 1)) / world
    np.testing.assert_allclose(gradient, [mean if rank == 1 else 0.0] * 2, rtol=1e-6)


@check()
def root_out_of_range_is_refused(rank: int, world: int, mode: Mode) -> None:
    for call in (
        lambda root: gc.broadcast(tf.ones(1), root),
        lambda root: gc.broadcast_object(1, root),
        lambda root: gc.broadcast_variables([], root),
    ):
        for root in (world, -1, "0"):
            with raises(gc.ConfigError, "root_rank", f"0 .. {world - 1}"):
                mode(lambda c=call, r=root: c(r))()


@check()
def different_roots_are_refused(rank: int, world: int, mode: Mode) -> None:
    with raises(gc.PlanMismatchError, "root_rank=0", "root_rank=1"):
        mode(lambda: gc.broadcast(tf.ones(1), min(rank, 1)))()


# ------------------------------------------------------------------------------------------- reducescatter


@check()
def rows_are_split_and_added_in_rank_order(rank: int, world: int, mode: Mode) -> None:
    for rows in (0, 1, world, 2 * world + 1):
        values = [
            np.random.default_rng(r).standard_normal((rows, 3)).astype(np.float32) for r in range(world)
        ]
        total = values[0].copy()
        for value in values[1:]:
            total += value
        parts = np.array_split(total, world)  # sizes differ by at most one, the larger ones first
        same(mode(lambda x: gc.reducescatter(x, op=gc.Sum))(tf.constant(values[rank])), parts[rank])
        same(mode(gc.reducescatter)(tf.constant(values[rank])), parts[rank] / np.float32(world))


@check()
def gradient_of_reducescatter_gathers(rank: int, world: int, mode: Mode) -> None:
    for op, factor in ((gc.Average, 1), (gc.Sum, world)):
        scatter = gradient_of(lambda x, o=op: gc.reducescatter(x, op=o, prescale_factor=3.0), rank + 1.0)
        parts = np.array_split(np.zeros(world + 1, np.float32), world)
        expected = np.concatenate([part + r + 1 for r, part in enumerate(parts)]) * 3 * factor
        np.testing.assert_allclose(mode(scatter)(tf.ones(world + 1)), expected, rtol=1e-6)


# ------------------------------------------------------------------------------------------------ alltoall


def sent(rank: int, world: int) -> tuple[list[int], tf.Tensor]:
    """Rank r sends r + place rows to a place; a row names both."""
    splits = [rank + place for place in range(world)]
    rows = [[float(rank), float(place)] for place, count in enumerate(splits) for _ in range(count)]
    return splits, tf.reshape(tf.constant(rows, tf.float32), [-1, 2])


@check()
def rows_go_where_splits_say(rank: int, world: int, mode: Mode) -> None:
    splits, rows = sent(rank, world)
    for dtype in (tf.int32, tf.int64):
        got, received = mode(gc.alltoall)(rows, tf.constant(splits, dtype))
        same(received, tf.constant([r + rank for r in range(world)], tf.int32))
        same(got, tf.constant([[float(r), float(rank)] for r in range(world) for _ in range(r + rank)]))


@check()
def equal_parts_need_no_splits(rank: int, world: int, mode: Mode) -> None:
    got = mode(gc.alltoall)(tf.range(2 * world) + 100 * rank)
    same(got, tf.constant([100 * r + 2 * rank + i for r in range(world) for i in range(2)]))
    same(mode(gc.alltoall)(tf.zeros([0, 2])), tf.zeros([0, 2]))


@check()
def wrong_splits_are_refused_everywhere(rank: int, world: int, mode: Mode) -> None:
    right = [1] * (world - 1) + [2]
    for wrong in ([1] * world, right[1:], [-1, *right[1:-1], 3], [[1] * world], [0] * world):
        with raises(gc.ConfigError, f"rank {world - 1}", "splits"):
            mode(gc.alltoall)(tf.ones([world + 1]), tf.constant(wrong if rank == world - 1 else right))
    with raises(gc.ConfigError, "splits", "float32"):
        mode(gc.alltoall)(tf.ones([3]), tf.ones([world]))
    with raises(gc.ConfigError, "give splits"):
        mode(gc.alltoall)(tf.ones([world + 1]))


@check()
def gradient_of_alltoall_goes_back(rank: int, world: int, mode: Mode) -> None:
    splits, rows = sent(rank, world)
    gradient = mode(gradient_of(lambda x: gc.alltoall(x, splits)[0], rank + 1.0))(rows)
    same(gradient, tf.repeat(tf.constant([[p + 1.0] * 2 for p in range(world)]), splits, axis=0))


# --------------------------------------------------------------------------------------------- process sets


@check()
def some_ranks_can_do_without_the_others(rank: int, world: int, mode: Mode) -> None:
    if world < 3:
        return
    some = gc.ProcessSet([0, world - 1])
    if not some.included():
        with raises(gc.ConfigError, f"rank {rank} is not a member"):
            mode(lambda x: gc.allreduce(x, process_set=some))(tf.ones(1))
        return
    last = float(world - 1)
    mine = tf.fill([2], float(rank))
    same(mode(lambda x: gc.allreduce(x, process_set=some))(mine), tf.fill([2], last / 2))
    same(mode(lambda x: gc.allgather(x, process_set=some))(mine), tf.constant([0, 0, last, last]))
    same(mode(lambda x: gc.broadcast(x, world - 1, process_set=some))(mine), tf.fill([2], last))
    same(mode(lambda x: gc.reducescatter(x, op=gc.Sum, process_set=some))(mine), tf.fill([1], last))
    same(mode(lambda x: gc.alltoall(x, process_set=some))(mine), tf.constant([0, last]))
    assert gc.broadcast_object(rank, world - 1, process_set=some) == world - 1
    with raises(gc.ConfigError, "a member of"):
        mode(lambda x: gc.broadcast(x, 1, process_set=some))(mine)


# ------------------------------------------------------------------------------------------------ variables


def model(seed: int) -> keras.Model:
    keras.utils.set_random_seed(seed)
    new_names()
    layers = [
        keras.layers.Embedding(7, 4), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5),
        keras.layers.Dense(2, dtype="mixed_bfloat16"),
    ]  # fmt: skip
    made = keras.Sequential([keras.Input([3]), *layers])
    made.layers[1].moving_mean.assign([float(seed)] * 4)
    return made


@check()
def a_models_variables_become_the_roots(rank: int, world: int, mode: Mode) -> None:
    mode(lambda: gc.broadcast_variables([]))()
    for root in {0, world - 1}:
        ours = model(rank)
        mode(lambda m=ours, r=root: gc.broadcast_variables(m.variables, r))()
        for mine, roots in zip(ours.variables, model(root).variables, strict=True):
            same(mine.value, roots.value)


@check()
def odd_variables_are_broadcast_in_chunks(rank: int, world: int, mode: Mode) -> None:
    from gradcomp.job import channel as module

    def make(seed: int) -> list[tf.Variable]:
        values = [
            tf.constant([seed % 2 == 0] * 3), tf.fill([2], tf.complex(float(seed), 1.0)), tf.zeros([0]),
            tf.fill([3], tf.constant(seed + 0.5, tf.float64)), tf.constant(seed, tf.int64),
            tf.constant([float("nan"), -0.0, seed], tf.bfloat16), tf.fill([100], seed), tf.fill([1], 1.0 * seed),
        ]  # fmt: skip
        return [tf.Variable(value) for value in values]

    ours = make(rank)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_CHUNK_BYTES", 64)
        mode(lambda: gc.broadcast_variables(ours, world - 1))()
    for mine, roots in zip(ours, make(world - 1), strict=True):
        same(mine.read_value(), roots.read_value())


@check()
def different_variables_name_the_first_difference(rank: int, world: int, mode: Mode) -> None:
    last = rank == world - 1
    shapes = [tf.Variable(tf.ones(3), name="same"), tf.Variable(tf.ones(4 if last else 3), name="w")]
    names = [tf.Variable(tf.ones(3), name="kernel" if last else "bias")]
    dtypes = [tf.Variable(tf.ones(3, tf.float64 if last else tf.float32), name="w")]
    fewer = [tf.Variable(tf.fill([2], float(rank)), name="a"), tf.Variable(1.0, name="b")][: 1 if last else 2]
    for variables, *texts in (
        (shapes, "w: float32 [3]", f"rank {world - 1} has w: float32 [4]"),
        (names, "rank 0 has bias:", "kernel"),
        (dtypes, "float32", "float64"),
        (fewer, "nothing more"),
    ):
        with raises(gc.PlanMismatchError, *texts):
            mode(lambda v=variables: gc.broadcast_variables(v))()
    same(fewer[0].read_value(), tf.fill([2], float(rank)))  # nothing moved


@check()
def what_is_no_variable_is_refused(rank: int, world: int, mode: Mode) -> None:
    loose = tf.Variable([1.0], shape=tf.TensorShape([None]), name="loose")
    text = tf.Variable("text", name="label")
    for wrong, said in (
        *((3, "got int"), ([tf.ones(2)], "not a variable"), ([1.0], "not a variable but float")),
        *(([loose], "loose: its shape"), ([text], "label: string")),
    ):
        with raises(gc.ConfigError, "rank 0", said):
            mode(lambda w=wrong: gc.broadcast_variables(w))()


# -------------------------------------------------------------------------------------------------- objects


@check("eager")
def objects_arrive(rank: int, world: int, mode: Mode) -> None:
    value = {
        "none": None, "numbers": [1, -2.5, True, 2**80, float("inf")], "text": "ü", "bytes": b"\0x", "tuple": (1, ()),
        3: {}, "dict": {"tuple": [1]},
    }  # fmt: skip
    got = gc.broadcast_object(value if rank == world - 1 else object(), root_rank=world - 1)
    assert got == value
    assert [type(item) for item in got["numbers"]] == [int, float, bool, int, float]


@check("eager")
def arrays_in_objects_arrive(rank: int, world: int, mode: Mode) -> None:
    bf16 = tf.bfloat16.as_numpy_dtype
    arrays = [np.arange(6.0).reshape(2, 3).T, np.zeros([0, 2], np.int8), np.asarray(1 + 2j), np.ones(3, bf16)]
    got = gc.broadcast_object([*arrays, np.float32(0.1)] if rank == 0 else None)
    for mine, roots in zip(got, [*arrays, np.float32(0.1)], strict=True):
        assert type(mine) is type(roots)
        assert mine.dtype == roots.dtype
        np.testing.assert_array_equal(mine, roots)
    got[0][:] = 1  # it is the receiver's own


class Custom:
    pass


@check("eager")
def anything_else_is_refused_on_every_rank(rank: int, world: int, mode: Mode) -> None:
    for wrong, said in (
        *((Custom(), "Custom"), (len, "builtin"), ({(1, 2): 3}, "tuple as a key"), ({1, 2}, "set")),
        *((np.asarray([None]), "ndarray of object"), (tf.ones(2), "numpy()"), (np.asarray("text"), "<U4")),
    ):
        with raises(gc.ConfigError, "rank 0", said, "only None, numbers"):
            gc.broadcast_object({"x": wrong} if rank == 0 else None)


# ---------------------------------------------------------------------------------------------------- order


@check("graph")
def calls_with_names_in_another_order_on_each_rank(rank: int, world: int, mode: Mode) -> None:
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
        "swap": lambda x, name: tf.reduce_sum(gc.alltoall(x, name=name)) * world / len(x),
        "slices": lambda x, name: tf.reduce_sum(
            tf.convert_to_tensor(
                gc.allreduce(
                    tf.IndexedSlices(x[:, None], tf.range(len(x)), [len(x), 1]), op=gc.Sum, name=name
                )
            )[0]
        ),
    }
    total = float(sum(range(1, world + 1)))
    expected = dict.fromkeys(collectives, total) | {"mean": total / world, "root": 2.0}
    order = list(collectives)[:: 1 if rank == 0 else -1]

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
        found = step(tf.fill([6], rank + 1.0))
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, err_msg=name)


@check("graph")
def gradients_of_calls_in_another_order(rank: int, world: int, mode: Mode) -> None:
    weight = tf.Variable(tf.ones(3))

    @tf.function
    def step() -> Any:
        with tf.GradientTape() as tape:
            names = ["a", "b", "c", "d"][:: 1 if rank == 0 else -1]
            loss = tf.add_n([tf.reduce_sum(gc.allreduce(weight, op=gc.Sum, name=name)) for name in names])
        return tape.gradient(loss, weight)

    for _ in range(2):
        same(step(), tf.fill([3], 4.0 * world))


@check("graph")
def a_name_used_twice_in_a_function(rank: int, world: int, mode: Mode) -> None:
    def twice(x: Any) -> Any:
        return gc.allreduce(x, op=gc.Sum, name="twice"), gc.allreduce(x * 2.0, op=gc.Sum, name="twice")

    once, doubled = mode(twice)(tf.ones(3))
    same(doubled, once * 2.0)
    slices = tf.IndexedSlices(tf.ones([1, 3]), tf.constant([rank]), tf.constant([world, 3]))
    dense, rows = mode(lambda x: gc.grouped_allreduce([x, slices], op=gc.Sum, name="both"))(tf.ones(3))
    same(dense, once)
    same(tf.convert_to_tensor(rows), tf.ones([world, 3]))


@check("graph")
def calls_run_in_program_order(rank: int, world: int, mode: Mode) -> None:
    """Results that nobody uses, calls without data between them, on ranks that are slow in different places."""

    def nap(x: Any, turn: int) -> Any:
        def wait(value: Any) -> Any:
            time.sleep(0.1 * (turn == rank))
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
        same(outer(tf.ones(3)), tf.ones(3))
    assert outer.experimental_get_tracing_count() == 1


@check("graph")
def gradients_run_in_program_order_too(rank: int, world: int, mode: Mode) -> None:
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
        same(step(tf.ones(3)), tf.fill([3], 4.0 * world))


@check()
def errors_leave_the_channel_usable(rank: int, world: int, mode: Mode) -> None:
    call = mode(lambda x: gc.allreduce(x, op=gc.Sum))
    for size in (1, 2):
        with raises(gc.PlanMismatchError):
            call(tf.ones(size + min(rank, 1)))
        same(call(tf.ones(7)), tf.fill([7], float(world)))


@check("eager")
def errors_while_tracing_keep_their_class(rank: int, world: int, mode: Mode) -> None:
    with pytest.raises(gc.ConfigError, match="op=Sum"):
        tf.function(gc.allreduce)(tf.constant([True]))


@check("graph")
def errors_while_running_can_be_had_back(rank: int, world: int, mode: Mode) -> None:
    with pytest.raises(gc.PlanMismatchError, match="do not call the same"), typed_errors():
        mode(gc.allreduce)(tf.ones(1 + min(rank, 1)))


@check("eager")
def xla_cannot_call_out(rank: int, world: int, mode: Mode) -> None:
    collectives = (gc.allreduce, gc.allgather, gc.reducescatter, gc.alltoall, lambda x: gc.broadcast(x, 0))
    for called in (*collectives, tf.function(gc.allreduce)):
        with pytest.raises(gc.ConfigError, match="jit_compile=False"):
            tf.function(called, jit_compile=True)(tf.ones(6))
    gc.barrier()


def main(directory: str, inter_op_threads: str) -> None:
    """Run all; ``inter_op_threads``: 0 for as many as TensorFlow wants."""
    tf.config.threading.set_inter_op_parallelism_threads(int(inter_op_threads))
    tf.config.threading.set_intra_op_parallelism_threads(1)
    gc.init(timeout_seconds=60, stall_warning_seconds=1, log_level="warning")
    nothing_inline_among(3, gc.size())
    outcome = {}
    for name, (function, modes) in CHECKS.items():
        # In the larger world what is the same in both modes is looked at in one.
        for mode in modes if gc.size() == 2 else modes[-1:]:
            try:
                function(gc.rank(), gc.size(), MODES[mode])
                outcome[f"{name} {mode}"] = ""
            except (Exception, pytest.fail.Exception):  # noqa: BLE001 - the parent shows it
                outcome[f"{name} {mode}"] = traceback.format_exc()
    (Path(directory) / f"{gc.rank()}.json").write_text(json.dumps(outcome))
    gc.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
