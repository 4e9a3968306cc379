"""What every rank checks about the user's collectives, over each frontend; one process of a world runs them all.

Expected values come from NumPy, expected gradients from differences of the sum of all ranks' losses, times a factor
where Horovod has one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
from collective_adapters import Check, Collectives, close, of_dtype, same
from numpy_reductions import DTYPES, FLOATS, SHAPES, UFUNCS, ops_of, reduced, values

from gradcomp import ConfigError
from gradcomp.job.reduce_op import Adasum, Average, Max, Min, Sum

CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


def numbers(count: int, rank: int) -> np.ndarray:
    return np.arange(float(count), dtype=np.float32) * (rank + 1)


def ones(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.ones(shape, dtype)


# ---------------------------------------------------------------------------------------------- reductions


@check
def average_is_the_default(c: Collectives) -> None:
    ours = [numbers(5, r) for r in range(c.world)]
    for arguments in ({}, {"average": True}):
        close(c(partial(c.gc.allreduce, **arguments), ours[c.rank]), np.mean(ours, axis=0))
    same(c(partial(c.gc.allreduce, average=False), ones(3)), ones(3) * c.world)


@check
def every_op_of_every_dtype_and_shape(c: Collectives) -> None:
    """Alone, and in groups of all dtypes and shapes."""
    forms = list(itertools.product(DTYPES, SHAPES))
    for number, op in enumerate(UFUNCS):
        chosen = [form for form in forms if op in ops_of(form[0])]
        ours = [[values(*form, r) for r in range(c.world)] for form in chosen]
        results = c(partial(c.gc.grouped_allreduce, op=op), [each[c.rank] for each in ours])
        for result, each in zip(results, ours, strict=True):
            close(result, reduced(each, op))
        for each in ours[number :: 3 * len(SHAPES) + 1]:  # few, since all were in the group
            close(c(partial(c.gc.allreduce, op=op), each[c.rank]), reduced(each, op))


@check
def halves_are_added_in_float32(c: Collectives) -> None:
    """256 + 1 + 1 + ... is 256 in bfloat16, one addition at a time."""
    mine, total = (of_dtype("bfloat16", x) for x in (256 if c.rank == 0 else 1, 256 + c.world - 1))
    same(c(partial(c.gc.allreduce, op=Sum), mine), total)
    same(c(partial(c.gc.reducescatter, op=Sum), mine.repeat(c.world)), total)


@check
def average_of_large_halves_does_not_overflow(c: Collectives) -> None:
    large = of_dtype("float16", 60000).repeat(c.world)
    same(c(c.gc.allreduce, large), large)
    same(c(c.gc.reducescatter, large), large[:1])


@check
def around_the_size_that_travels_with_the_comparison(c: Collectives) -> None:
    for count in (0, 1, 1023, 1024, 1025):
        ours = [numbers(count, r) for r in range(c.world)]
        same(c(partial(c.gc.allreduce, op=Sum, name="sized"), ours[c.rank]), np.sum(ours, axis=0))
    odd = [("uint8", 3), ("float32", 5), ("bfloat16", 1), ("bool", 3), ("float64", 2)]
    ours = [[values(dtype, (count,), r) for r in range(c.world)] for dtype, count in odd]
    results = c(partial(c.gc.grouped_allreduce, op=Sum), [each[c.rank] for each in ours])
    for result, each in zip(results, ours, strict=True):
        same(result, reduced(each, Sum))


@check
def sums_are_the_same_bytes_everywhere(c: Collectives) -> None:
    c.everywhere(c(c.gc.allreduce, np.random.default_rng(c.rank).standard_normal(10007, np.float32)))


@check
def values_that_are_not_finite_are_seen_by_all(c: Collectives) -> None:
    mine = of_dtype("float32", np.nan if c.rank == c.world - 1 else 1, c.rank, np.inf)
    for op, second in ((Min, 0.0), (Max, c.world - 1.0), (Average, (c.world - 1) / 2)):
        np.testing.assert_array_equal(c(partial(c.gc.allreduce, op=op), mine), [np.nan, second, np.inf])


@check
def factors_apply_before_and_after(c: Collectives) -> None:
    factors = {"prescale_factor": 0.5, "postscale_factor": 4.0}

    def scaled(each: Sequence[np.ndarray], op: Any) -> np.ndarray:
        half = [(one.astype(np.float64) * 0.5).astype(one.dtype) for one in each]
        return (reduced(half, op).astype(np.float64) * 4).astype(each[0].dtype)

    ours = [[values(dtype, (7,), r) for r in range(c.world)] for dtype in FLOATS]
    for op in UFUNCS:
        results = c(partial(c.gc.grouped_allreduce, op=op, **factors), [each[c.rank] for each in ours])
        for result, each in zip(results, ours, strict=True):
            close(result, scaled(each, op))
    close(c(partial(c.gc.allreduce, op=Sum, **factors), ours[2][c.rank]), scaled(ours[2], Sum))
    part = np.array_split(scaled(ours[2], Sum), c.world)[c.rank]
    close(c(partial(c.gc.reducescatter, op=Sum, **factors), ours[2][c.rank]), part)


@check
def factors_of_integers_leave_whole_numbers(c: Collectives) -> None:
    """As Horovod has it: in float64, towards zero, before and after."""
    value, half = of_dtype("int32", 3, -3, 4), of_dtype("int32", 1, -1, 2)
    same(c(partial(c.gc.allreduce, op=Sum, prescale_factor=0.5), value), c.world * half)
    scaled = np.trunc(value * c.world * 0.5).astype(np.int32)
    same(c(partial(c.gc.allreduce, op=Sum, postscale_factor=0.5), value), scaled)
    same(c(partial(c.gc.allreduce, postscale_factor=0.5), value), half)
    same(c(c.gc.allreduce, of_dtype("uint8", 200)), of_dtype("uint8", 200))


class Doubling:
    """A compressor as Horovod's users write them."""

    @staticmethod
    def compress(value: Any) -> tuple[Any, int]:
        return value * 2, 1

    @staticmethod
    def decompress(value: Any, context: int) -> Any:
        return value + context


@check
def halves_travel_and_the_dtype_comes_back(c: Collectives) -> None:
    ours = np.random.default_rng(0).standard_normal((c.world, 33), np.float32)
    fp16, bf16 = c.gc.Compression.fp16, c.gc.Compression.bf16
    travels = ((fp16, "float16"), (bf16, "bfloat16"), ("bf16", "bfloat16"), ("none", "float32"))
    for compression, half in travels:
        dtype = of_dtype(half).dtype
        mean = ours.astype(dtype).astype(np.float32).mean(0).astype(dtype).astype(np.float32)
        found = c(partial(c.gc.allreduce, compression=compression), ours[c.rank])
        close(found, mean)
        if compression is bf16:
            same(c(partial(c.gc.grouped_allreduce, compression=compression), [ours[c.rank]])[0], found)
        parts = c(partial(c.gc.reducescatter, compression=compression), ours[c.rank])
        close(parts, np.array_split(mean, c.world)[c.rank])
    whole = c(partial(c.gc.allreduce, op=Max, compression="fp16"), of_dtype("int32", c.rank))
    same(whole, of_dtype("int32", c.world - 1))
    doubled = c(partial(c.gc.allreduce, op=Sum, compression=Doubling), ones(3))
    same(doubled, ones(3) * (2 * c.world + 1))


@check
def adasum_adds_in_pairs(c: Collectives) -> None:
    """Against the paper's formula, in float64, each tensor for itself."""

    def pair(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return (1 - a @ b / (2 * (a @ a))) * a + (1 - a @ b / (2 * (b @ b))) * b

    if c.world & (c.world - 1):
        with c.raises(ConfigError, "power of two"):
            c(partial(c.gc.allreduce, op=Adasum), ones(3))
        return
    ours = [[np.random.default_rng([r, n]).normal(size=n) for r in range(c.world)] for n in (9, 30)]
    results = c(partial(c.gc.grouped_allreduce, op=Adasum), [each[c.rank] for each in ours])
    for each, result in zip(ours, results, strict=True):
        left = each
        while len(left) > 1:
            left = [pair(a, b) for a, b in zip(left[::2], left[1::2], strict=True)]
        close(result, left[0])
        c.everywhere(result)
    narrow = of_dtype("bfloat16", *ours[0][c.rank])
    single = c(partial(c.gc.allreduce, op=Adasum), narrow).astype(np.float64)
    np.testing.assert_allclose(single, results[0], rtol=0.05, atol=0.05)
    for dtype in FLOATS:  # parallel vectors are averaged
        threes = of_dtype(dtype, 3, 3)
        same(c(partial(c.gc.allreduce, op=Adasum), threes), threes)
        if c.world > 1:  # orthogonal ones are added
            axis = of_dtype(dtype, *((1, 0), (0, 2))[c.rank % 2])
            close(c(partial(c.gc.allreduce, op=Adasum), axis), of_dtype(dtype, 1, 2))


@check
def rows_are_reduced_and_scattered(c: Collectives) -> None:
    shapes = itertools.cycle(((2 * c.world + 1,), (0,), (3, 4), (c.world, 0), (5, 2, 3), (7,)))
    for op in UFUNCS:
        forms = [(dtype, shape) for dtype, shape in zip(DTYPES, shapes, strict=False) if op in ops_of(dtype)]
        ours = [[values(*form, r) for r in range(c.world)] for form in forms]
        expected = [np.array_split(reduced(each, op), c.world)[c.rank] for each in ours]
        found = c(partial(c.gc.grouped_reducescatter, op=op), [each[c.rank] for each in ours])
        for result, wanted in zip(found, expected, strict=True):
            close(result, wanted)
        for each, wanted in list(zip(ours, expected, strict=True))[::5]:
            close(c(partial(c.gc.reducescatter, op=op), each[c.rank]), wanted)


@check
def scattered_rows_are_added_in_rank_order(c: Collectives) -> None:
    for rows in (0, 1, c.world, 2 * c.world + 1):
        ours = [np.random.default_rng(r).standard_normal((rows, 3), np.float32) for r in range(c.world)]
        total = ours[0].copy()
        for each in ours[1:]:
            total += each
        part = np.array_split(total, c.world)[c.rank]  # sizes differ by at most one, the larger ones first
        same(c(partial(c.gc.reducescatter, op=Sum), ours[c.rank]), part)
        same(c(c.gc.reducescatter, ours[c.rank]), part / np.float32(c.world))


# --------------------------------------------------------------------------------------------------- moves


@check
def any_dtype_is_moved(c: Collectives) -> None:
    dtypes = (*DTYPES, "complex64", "complex128")
    ours = [[of_dtype(dtype, *(np.arange(c.world) + r)) for r in range(c.world)] for dtype in dtypes]
    gathered = c(c.gc.grouped_allgather, [each[c.rank] for each in ours])
    for result, each in zip(gathered, ours, strict=True):
        same(result, np.concatenate(each))
        same(c(c.gc.alltoall, each[c.rank]), [one[c.rank] for one in each])


@check
def ragged_parts_are_joined(c: Collectives) -> None:
    parts = [np.full((r, 3), r, np.float32) for r in range(c.world)]
    same(c(c.gc.allgather, parts[c.rank]), np.concatenate(parts))
    same(c(c.gc.allgather, ones(0, 4)), ones(0, 4))
    same(c(c.gc.allgather, ones(2, 0)), ones(2 * c.world, 0))
    forms = (("float32", (3,)), ("bool", ()), ("bfloat16", (2, 2)), ("uint8", (0,)), ("complex64", (2,)))
    ours = [
        [values(dtype, (abs(r - n), *rest), r) for r in range(c.world)]
        for n, (dtype, rest) in enumerate(forms)
    ]
    for result, each in zip(c(c.gc.grouped_allgather, [p[c.rank] for p in ours]), ours, strict=True):
        same(result, np.concatenate(each))


@check
def the_roots_bytes_arrive(c: Collectives) -> None:
    for root in range(c.world):
        mine = of_dtype("float32", np.nan, -0.0, root) if c.rank == root else ones(3)
        same(c(partial(c.gc.broadcast, root_rank=root), mine), of_dtype("float32", np.nan, -0.0, root))
    for dtype, shape in zip(("complex64", *DTYPES), itertools.cycle(SHAPES), strict=False):
        ours = [values(dtype, shape, r) for r in range(c.world)]
        same(c(partial(c.gc.broadcast, root_rank=c.world - 1), ours[c.rank]), ours[-1])


@check
def rows_go_to_their_ranks(c: Collectives) -> None:
    for dtype, rest in (("bool", ()), ("bfloat16", (3,)), ("int32", (2, 2)), ("float64", (0,))):
        counts = np.array([[(sender + to) % 3 for to in range(c.world)] for sender in range(c.world)])
        ours = [values(dtype, (sum(counts[r]), *rest), r) for r in range(c.world)]
        starts = [sum(counts[r][: c.rank]) for r in range(c.world)]
        mine = [ours[r][starts[r] : starts[r] + counts[r][c.rank]] for r in range(c.world)]
        for splits in (counts[c.rank].astype(np.int32), counts[c.rank]):
            rows, received = c(c.gc.alltoall, ours[c.rank], splits)
            same(rows, np.concatenate(mine))
            same(received, counts[:, c.rank].astype(np.int32))
        rows, _ = c(partial(c.gc.alltoall, splits=counts[c.rank].tolist()), ours[c.rank])
        same(rows, np.concatenate(mine))
    equal = np.arange(2 * c.world) + 10 * c.rank
    same(c(c.gc.alltoall, equal), [2 * c.rank + i + 10 * r for r in range(c.world) for i in range(2)])
    same(c(c.gc.alltoall, ones(0, 2)), ones(0, 2))


# ---------------------------------------------------------------------------------------------- gradients


def differences(loss: Callable[[], float], array: np.ndarray) -> np.ndarray:
    """The gradient of a loss that is linear in every single element."""
    found = np.empty_like(array)
    for place in np.ndindex(array.shape):
        before = array[place]
        above, below = before + 1e-4, before - 1e-4
        array[place] = above
        higher = loss()
        array[place] = below
        found[place] = (higher - loss()) / (above - below)
        array[place] = before
    return found


def gradients(
    c: Collectives,
    forms: Sequence[Sequence[int]],
    theirs: Callable[[Any], Any],
    ours: Callable[[list[np.ndarray]], list[np.ndarray]],
    factor: float = 1.0,
) -> None:
    """``theirs``: the collective. ``ours``: from all ranks' arrays to all ranks' results.

    ``factor``: what Horovod's gradient is of the gradient of the sum of all ranks' losses.
    """
    generator = np.random.default_rng(1)
    arrays = [generator.standard_normal(form) for form in forms]
    weights = [generator.standard_normal(result.shape) for result in ours(arrays)]

    def loss() -> float:
        return sum(
            float((result * weight).sum()) for result, weight in zip(ours(arrays), weights, strict=True)
        )

    result, gradient = c.gradient(theirs, arrays[c.rank].copy(), weights[c.rank])
    close(result, ours(arrays)[c.rank])
    close(gradient, differences(loss, arrays[c.rank]) * factor)


@check
def every_collective_has_its_gradient(c: Collectives) -> None:
    together = {Sum: partial(np.sum, axis=0), Average: partial(np.mean, axis=0)}
    gc, world, mean = c.gc, c.world, 1 / c.world
    equal, ragged = [(5, 2)] * world, [(r + 1, 2) for r in range(world)]

    def scattered(x: np.ndarray) -> list[np.ndarray]:
        return np.array_split(x, world)

    for op, reduce in together.items():
        gradients(
            c, equal, partial(gc.allreduce, op=op, prescale_factor=0.5, postscale_factor=3.0),
            lambda xs, f=reduce: [3 * f(np.stack(xs) * 0.5)] * world,
        )  # fmt: skip
        gradients(
            c, equal, lambda x, op=op: gc.grouped_allreduce([x, x * 2], op=op)[1],
            lambda xs, f=reduce: [f(np.stack(xs) * 2)] * world,
        )  # fmt: skip
        gradients(
            c, equal, partial(gc.reducescatter, op=op, prescale_factor=2.0, name="scattered"),
            lambda xs, f=reduce: scattered(2 * f(np.stack(xs))), world,
        )  # fmt: skip
        gradients(
            c, equal, lambda x, op=op: gc.grouped_reducescatter([x, x], op=op, postscale_factor=0.5)[1],
            lambda xs, f=reduce: scattered(0.5 * f(np.stack(xs))), world,
        )  # fmt: skip
    gathers = (partial(gc.allgather, name="all"), lambda x: gc.grouped_allgather([x, x])[1])
    for gather in gathers:
        gradients(c, ragged, gather, lambda xs: [np.concatenate(xs)] * world, mean)
    gradients(c, equal, partial(gc.broadcast, root_rank=world - 1), lambda xs: [xs[-1] * 1] * world, mean)
    splits = [1] * (world - 1) + [2]
    gradients(
        c, [(world + 1, 2)] * world, lambda x: gc.alltoall(x, splits=splits)[0],
        lambda xs: [np.concatenate([x[r : r + splits[r]] for x in xs]) for r in range(world)],
    )  # fmt: skip


@check
def halves_have_gradients_and_a_scattered_minimum_has_none(c: Collectives) -> None:
    halves = partial(c.gc.allreduce, compression=c.gc.Compression.bf16, op=Sum)
    _, gradient = c.gradient(halves, ones(3), ones(3) * (c.rank + 1))
    same(gradient, ones(3) * sum(range(1, c.world + 1)))
    with c.raises(ConfigError, "op=MIN has no gradient"):
        c.gradient(partial(c.gc.reducescatter, op=Min), ones(c.world), ones(1))


# ------------------------------------------------------------------------------------------ names and sets


@check
def calls_of_several_threads_find_each_other(c: Collectives) -> None:
    names = ["a", "bb", "ccc"]
    tensors = {name: c.tensor(ones(2) * len(name)) for name in names}
    with ThreadPoolExecutor(3) as pool:
        jobs = {
            name: pool.submit(c.gc.allreduce, tensors[name], op=Sum, name=name)
            for name in names[c.rank % 3 :] + names[: c.rank % 3]
        }
        for name, job in jobs.items():
            same(c.array(job.result()), ones(2) * len(name) * c.world)


@check
def some_of_the_ranks_call_alone(c: Collectives) -> None:
    half = c.gc.ProcessSet(range(c.rank % 2, c.world, 2))
    ours, place = [values("float32", (4, 3), r) for r in half.ranks], half.rank()
    mine, there = ours[place], {"process_set": half}
    for op in UFUNCS:
        close(c(partial(c.gc.allreduce, op=op, **there), mine), reduced(ours, op))
        rows = np.array_split(reduced(ours, op), half.size())[place]
        close(c(partial(c.gc.reducescatter, op=op, **there), mine), rows)
    same(c(partial(c.gc.broadcast, root_rank=half.ranks[-1], **there), mine), ours[-1])
    same(c(partial(c.gc.grouped_allgather, **there), [mine])[0], np.concatenate(ours))
    assert c.gc.allgather_object(c.rank, **there) == list(half.ranks)
    assert c.gc.broadcast_object(c.rank, half.ranks[-1], **there) == half.ranks[-1]
    same(c(partial(c.gc.alltoall, **there), np.full(half.size(), c.rank)), half.ranks)
    rows, _ = c(partial(c.gc.alltoall, splits=[1] * half.size(), **there), np.full(half.size(), c.rank))
    same(rows, half.ranks)
    if c.world > 1:
        others = c.gc.ProcessSet(range(1 - c.rank % 2, c.world, 2))
        with c.raises(ConfigError, f"rank {c.rank} is not a member"):
            c(partial(c.gc.allreduce, process_set=others), mine)
        with c.raises(ConfigError, "a member of"):
            c(partial(c.gc.broadcast, root_rank=others.ranks[0], **there), mine)
    c.gc.barrier()
