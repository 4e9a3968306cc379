"""What every rank checks about Horovod's collectives for PyTorch; one process of a world runs them all, in this order.

Expected values come from NumPy, expected gradients from autograd over all ranks' tensors in one process: those of the
sum of all ranks' losses, times a factor where Horovod has one.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import collective_checks
import ml_dtypes
import numpy as np
import torch
from collective_checks import everywhere, raises, same
from numpy_reductions import DTYPES, FLOATS, SHAPES, UFUNCS, ops_of, reduced, values

import gradcomp.torch as gc

CHECKS: dict[str, Callable[[int, int], None]] = {}


def check(function: Callable[[int, int], None]) -> Callable[[int, int], None]:
    """Register a check; it gets this rank and the world's size."""
    CHECKS[function.__name__] = function
    return function


def tensor(array: np.ndarray) -> torch.Tensor:
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.astype(np.float32)).to(torch.bfloat16)
    return torch.from_numpy(np.array(array))


def close(result: torch.Tensor, expected: np.ndarray) -> None:
    """Equal but for the order of additions."""
    wanted = tensor(expected)
    assert result.dtype == wanted.dtype, (result.dtype, wanted.dtype)
    assert result.shape == wanted.shape, (result.shape, wanted.shape)
    if result.dtype.is_floating_point:
        torch.testing.assert_close(result, wanted)
    else:
        assert (result.to(torch.int64) == wanted.to(torch.int64)).all(), (result, wanted)


# --------------------------------------------------------------------------------------------- allreduce


@check
def every_op_of_every_dtype_and_shape(rank: int, world: int) -> None:
    for dtype in DTYPES:
        ours = [[values(dtype, shape, r) for r in range(world)] for shape in SHAPES]
        for number, op in enumerate(ops_of(dtype)):
            results = gc.grouped_allreduce([tensor(each[rank]) for each in ours], op=op)
            for result, each in zip(results, ours, strict=True):
                close(result, reduced(each, op))
            alone = ours[number % len(ours)]
            close(gc.allreduce(tensor(alone[rank]), op=op), reduced(alone, op))


@check
def groups_of_mixed_dtypes_are_reduced_like_their_members(rank: int, world: int) -> None:
    forms = list(itertools.product(("float32", "bfloat16", "uint8", "int64", "float32"), SHAPES))
    for op in UFUNCS:
        ours = [[values(dtype, shape, r) for r in range(world)] for dtype, shape in forms]
        given = [tensor(each[rank]) for each in ours]
        for result, each in zip(gc.grouped_allreduce(given, op=op), ours, strict=True):
            close(result, reduced(each, op))
        results = gc.synchronize(gc.grouped_allreduce_async_(given, op=op, name="group"))
        assert all(result is one for result, one in zip(results, given, strict=True))
        for result, each in zip(given, ours, strict=True):
            close(result, reduced(each, op))


@check
def in_place_and_async_write_where_they_should(rank: int, world: int) -> None:
    for dtype in DTYPES:
        ours = [values(dtype, (4, 6), r) for r in range(world)]
        whole = tensor(ours[rank])
        view = whole.t()[::2]
        assert gc.allreduce_(view, op=gc.Max) is view
        close(whole[:, ::2], reduced([one[:, ::2] for one in ours], gc.Max))
        close(whole[:, 1::2], ours[rank][:, 1::2])
        value = tensor(ours[rank])
        handle = gc.allreduce_async(value, op=gc.Sum, name=f"sum of {dtype}")
        close(gc.synchronize(handle), reduced(ours, gc.Sum))
        assert gc.poll(handle)
        close(value, ours[rank])


@check
def a_version_counts_what_is_written_in_place(rank: int, world: int) -> None:
    """Autograd must notice that a tensor that it has saved is another one now."""
    weight = torch.ones(3, requires_grad=True)
    value = torch.ones(3)
    product = weight * value
    gc.allreduce_(value, op=gc.Sum)
    with raises(RuntimeError, "modified by an inplace operation"):
        product.sum().backward()


@check
def factors_apply_before_and_after(rank: int, world: int) -> None:
    for op in (gc.Sum, gc.Average, gc.Max):
        for dtype in FLOATS:
            ours = [values(dtype, (7,), r) for r in range(world)]
            result = gc.allreduce(tensor(ours[rank]), op=op, prescale_factor=0.5, postscale_factor=4.0)
            half = [(one.astype(np.float64) * 0.5).astype(one.dtype) for one in ours]
            close(result, (reduced(half, op).astype(np.float64) * 4).astype(ours[0].dtype))


@check
def factors_of_integers_leave_whole_numbers(rank: int, world: int) -> None:
    """As Horovod has it: in float64, towards zero, before and after."""
    value = torch.tensor([3, -3, 4], dtype=torch.int32)
    half = torch.tensor([1, -1, 2], dtype=torch.int32)
    same(gc.allreduce(value, op=gc.Sum, prescale_factor=0.5), world * half)
    scaled = torch.trunc(value.double() * world * 0.5).to(torch.int32)
    same(gc.allreduce(value, op=gc.Sum, postscale_factor=0.5), scaled)
    same(gc.allreduce(value, postscale_factor=0.5), half)
    same(gc.allreduce(torch.tensor([200], dtype=torch.uint8)), torch.tensor([200], dtype=torch.uint8))


@check
def a_nan_is_the_least_and_the_largest(rank: int, world: int) -> None:
    value = torch.tensor([float("nan") if rank == world - 1 else 1.0, 2.0])
    for op in (gc.Min, gc.Max):
        result = gc.allreduce(value, op=op)
        assert torch.isnan(result[0])
        assert result[1] == 2.0


@check
def halves_travel_as_halves(rank: int, world: int) -> None:
    for compression, half in (
        (gc.Compression.fp16, torch.float16), (gc.Compression.bf16, torch.bfloat16), ("none", torch.float32),
    ):  # fmt: skip
        torch.manual_seed(0)
        ours = torch.randn(world, 33)
        expected = ours.to(half).to(torch.float32).mean(0).to(half).to(torch.float32)
        torch.testing.assert_close(gc.allreduce(ours[rank], compression=compression), expected)
        (grouped,) = gc.grouped_allreduce([ours[rank]], compression=compression)
        same(grouped, gc.allreduce(ours[rank], compression=compression))
        assert gc.reducescatter(torch.ones(world, 2), compression=compression).dtype == torch.float32
    with raises(gc.ConfigError, "quantize", "Compression.none, fp16 or bf16"):
        gc.allreduce(torch.ones(1), compression=gc.Quantize(bits=4))


class Halving:
    """A compressor as Horovod's users write them."""

    @staticmethod
    def compress(value: torch.Tensor) -> tuple[torch.Tensor, int]:
        return value / 2, 2

    @staticmethod
    def decompress(value: torch.Tensor, context: int) -> torch.Tensor:
        return value * context


@check
def names_of_compressions_code_tensors(rank: int, world: int) -> None:
    for compression, half in ((gc.Compression.fp16, torch.float16), (gc.Compression.bf16, torch.bfloat16)):
        for dtype in (torch.float32, torch.float64):
            ours = torch.randn(5, dtype=dtype)
            coded, context = compression.compress(ours)
            assert coded.dtype is half
            same(compression.decompress(coded, context), ours.to(half).to(dtype))
        counts = torch.arange(3)
        assert compression.decompress(*compression.compress(counts)) is counts
    kept = torch.nn.Parameter(torch.ones(2))
    assert gc.Compression.none.decompress(*gc.Compression.none.compress(kept)) is kept
    assert gc.Compression.fp16.compress(kept)[0].dtype is torch.float16
    with raises(gc.ConfigError, "not a tensor of torch: ndarray"):
        gc.Compression.fp16.compress(np.ones(2))


@check
def compressors_of_users_are_called(rank: int, world: int) -> None:
    same(gc.allreduce(torch.ones(3), op=gc.Sum, compression=Halving), torch.ones(3) * world)


@check
def adasum_adds_in_pairs(rank: int, world: int) -> None:
    """Against the paper's formula, in float64, each tensor for itself."""

    def pair(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return (1 - a @ b / (2 * (a @ a))) * a + (1 - a @ b / (2 * (b @ b))) * b

    if world & (world - 1):
        with raises(gc.ConfigError, "power of two"):
            gc.allreduce(torch.ones(3), op=gc.Adasum)
        return
    ours = [np.random.default_rng([r, n]).normal(size=n) for n in (9, 30) for r in range(world)]
    expected = []
    for left in (ours[:world], ours[world:]):
        while len(left) > 1:
            left[:] = [pair(a, b) for a, b in zip(left[::2], left[1::2], strict=True)]
        expected.append(torch.from_numpy(left[0]))
    given = [torch.from_numpy(ours[rank]), torch.from_numpy(ours[world + rank])]
    for result, wanted in zip(gc.grouped_allreduce(given, op=gc.Adasum), expected, strict=True):
        torch.testing.assert_close(result, wanted)
        everywhere(result)
    single = gc.allreduce(given[0].to(torch.bfloat16), op=gc.Adasum)
    torch.testing.assert_close(single, expected[0].to(torch.bfloat16), rtol=0.05, atol=0.05)
    same(gc.allreduce(torch.full((2,), 3.0), op=gc.Adasum), torch.full((2,), 3.0))  # parallel: averaged
    with raises(gc.ConfigError, "Adasum", "int64"):
        gc.allreduce(torch.ones(3, dtype=torch.int64), op=gc.Adasum)


# ------------------------------------------------------------------------------- reducescatter, allgather


def shares(rows: int, world: int) -> list[slice]:
    counts = [rows // world + (r < rows % world) for r in range(world)]
    return [slice(sum(counts[:r]), sum(counts[: r + 1])) for r in range(world)]


@check
def rows_are_reduced_and_scattered(rank: int, world: int) -> None:
    shapes = itertools.cycle(((2 * world + 1,), (0,), (3, 4), (world, 0), (5, 2, 3), (7,)))
    for dtype in DTYPES:
        for op, shape in zip(ops_of(dtype), shapes, strict=False):
            ours = [values(dtype, shape, r) for r in range(world)]
            mine = shares(shape[0], world)[rank]
            close(gc.reducescatter(tensor(ours[rank]), op=op), reduced(ours, op)[mine])


@check
def groups_are_reduced_and_scattered(rank: int, world: int) -> None:
    forms = list(itertools.product(("float32", "int16", "float32", "bfloat16"), ((5,), (3, 2), (0, 3))))
    ours = [[values(dtype, shape, r) for r in range(world)] for dtype, shape in forms]
    handle = gc.grouped_reducescatter_async(
        [tensor(each[rank]) for each in ours], op=gc.Sum, postscale_factor=2
    )
    for result, each in zip(gc.synchronize(handle), ours, strict=True):
        mine = shares(len(each[0]), world)[rank]
        close(result, (reduced(each, gc.Sum).astype(np.float64) * 2).astype(each[0].dtype)[mine])


@check
def scalars_have_no_rows(rank: int, world: int) -> None:
    for collective in (gc.reducescatter, gc.alltoall, gc.allgather):
        with raises(gc.ConfigError, "no rows"):
            collective(torch.tensor(1.0))


@check
def groups_of_ragged_parts_are_gathered(rank: int, world: int) -> None:
    forms = (("float32", (3,)), ("bool", ()), ("bfloat16", (2, 2)), ("uint8", (0,)))
    ours = [
        [values(dtype, (abs(r - place), *rest), r) for r in range(world)]
        for place, (dtype, rest) in enumerate(forms)
    ]
    given = [tensor(each[rank]) for each in ours]
    for results in (gc.grouped_allgather(given), gc.synchronize(gc.grouped_allgather_async(given, name="g"))):
        for result, each in zip(results, ours, strict=True):
            close(result, np.concatenate(each))
    same(gc.synchronize(gc.allgather_async(torch.full((1,), rank))), torch.arange(world))


# ------------------------------------------------------------------------------------ broadcast, alltoall


@check
def tensors_are_broadcast(rank: int, world: int) -> None:
    for dtype, shape in zip(("complex64", *DTYPES), itertools.cycle(SHAPES), strict=False):
        ours = [tensor(values(dtype, shape, r)) for r in range(world)]
        for root in {0, world - 1}:
            value = ours[rank].clone()
            same(gc.broadcast(value, root), ours[root])
            same(value, ours[rank])
            same(gc.synchronize(gc.broadcast_async(value, root, name="b")), ours[root])
            handle = gc.broadcast_async_(value, root)
            assert gc.synchronize(handle) is value
            same(value, ours[root])
    parameter = torch.nn.Parameter(torch.full((2, 3), float(rank)).t())
    assert gc.broadcast_(parameter, 0) is parameter
    same(parameter.data, torch.zeros(3, 2))


@check
def a_root_that_is_not_there_is_refused(rank: int, world: int) -> None:
    for root in (world, -1, "0"):
        with raises(gc.ConfigError, "root_rank"):
            gc.broadcast(torch.ones(1), root)
    if world > 1:
        with raises(gc.PlanMismatchError, "root_rank=0", "root_rank=1", "'start'"):
            gc.broadcast(torch.ones(1), root_rank=min(rank, 1), name="start")


@check
def rows_go_to_their_ranks(rank: int, world: int) -> None:
    for dtype, rest in itertools.product(("bool", "bfloat16", "int32", "float64"), ((), (3,), (2, 2), (0,))):
        counts = [[(sender + to) % 3 for to in range(world)] for sender in range(world)]
        ours = [values(dtype, (sum(counts[r]), *rest), r) for r in range(world)]
        starts = [sum(counts[sender][:rank]) for sender in range(world)]
        expected = np.concatenate([ours[s][starts[s] : starts[s] + counts[s][rank]] for s in range(world)])
        for splits in (counts[rank], torch.tensor(counts[rank], dtype=torch.int32)):
            rows, received = gc.alltoall(tensor(ours[rank]), splits=splits)
            close(rows, expected)
            same(received, torch.tensor([counts[s][rank] for s in range(world)], dtype=torch.int32))
    equal = torch.arange(2 * world) + 10 * rank
    parts = [torch.arange(2 * rank, 2 * rank + 2) + 10 * r for r in range(world)]
    same(gc.alltoall(equal), torch.cat(parts))
    same(gc.synchronize(gc.alltoall_async(equal, name="rows")), torch.cat(parts))
    rows, received = gc.synchronize(gc.alltoall_async(equal, splits=[2] * world))
    same(rows, torch.cat(parts))
    same(received, torch.full((world,), 2, dtype=torch.int32))


@check
def wrong_splits_are_refused(rank: int, world: int) -> None:
    for splits in ([1] * (world + 1), [-1] + [2] * (world - 1), [0.5] * world):
        with raises(gc.ConfigError, "splits"):
            gc.alltoall(torch.ones(world), splits=splits)


# ---------------------------------------------------------------------------------------------- gradients


def gradients(
    forms: Sequence[Sequence[int]],
    rank: int,
    theirs: Callable[[torch.Tensor], Any],
    ours: Callable[[list[torch.Tensor]], list[torch.Tensor]],
    factor: float = 1.0,
) -> None:
    """``theirs``: the collective. ``ours``: from all ranks' tensors to all ranks' results, in plain torch.

    ``factor``: what Horovod's gradient is of the gradient of the sum of all ranks' losses.
    """
    torch.manual_seed(1)
    tensors = [torch.randn(form, dtype=torch.float64, requires_grad=True) for form in forms]
    results = ours(tensors)
    weights = [torch.randn_like(result) for result in results]
    loss = sum((result * weight).sum() for result, weight in zip(results, weights, strict=True))
    (expected,) = torch.autograd.grad(loss, [tensors[rank]], materialize_grads=True)
    mine = tensors[rank].detach().clone().requires_grad_()
    result = theirs(mine)
    torch.testing.assert_close(result, results[rank])
    (result * weights[rank]).sum().backward()
    torch.testing.assert_close(mine.grad, expected * factor)


@check
def every_collective_has_its_gradient(rank: int, world: int) -> None:
    together: dict[Any, Callable[[torch.Tensor], torch.Tensor]] = {
        gc.Average: lambda x: x.mean(0),
        gc.Sum: lambda x: x.sum(0),
        gc.Min: lambda x: x.amin(0),
        gc.Max: lambda x: x.amax(0),
        gc.Product: lambda x: x.prod(0),
    }
    equal = [(5, 2)] * world
    for op, plain in together.items():
        gradients(
            equal, rank, lambda x, op=op: gc.allreduce(x, op=op, prescale_factor=0.5, postscale_factor=3.0),
            lambda xs, plain=plain: [3 * plain(torch.stack(xs) * 0.5)] * world,
        )  # fmt: skip
        gradients(
            equal, rank, lambda x, op=op: gc.grouped_allreduce([x, x * 2], op=op)[1],
            lambda xs, plain=plain: [plain(torch.stack(xs) * 2)] * world,
        )  # fmt: skip
    for op in (gc.Average, gc.Sum):
        gradients(
            equal, rank, lambda x, op=op: gc.reducescatter(x, op=op, prescale_factor=2.0, name="scattered"),
            lambda xs, op=op: [2 * together[op](torch.stack(xs))[part] for part in shares(5, world)], factor=world,
        )  # fmt: skip
        gradients(
            equal, rank, lambda x, op=op: gc.grouped_reducescatter([x, x], op=op, postscale_factor=0.5)[1],
            lambda xs, op=op: [0.5 * together[op](torch.stack(xs))[part] for part in shares(5, world)], factor=world,
        )  # fmt: skip
    ragged = [(r + 1, 2) for r in range(world)]
    mean = 1 / world
    gradients(ragged, rank, lambda x: gc.allgather(x, name="all"), lambda xs: [torch.cat(xs)] * world, mean)
    gradients(
        ragged, rank, lambda x: gc.grouped_allgather([x, x])[1], lambda xs: [torch.cat(xs)] * world, mean
    )
    gradients(equal, rank, lambda x: gc.broadcast(x, world - 1), lambda xs: [xs[-1] * 1] * world, mean)
    splits = [1] * (world - 1) + [2]
    gradients(
        [(world + 1, 2)] * world, rank, lambda x: gc.alltoall(x, splits=splits)[0],
        lambda xs: [torch.cat([x[r : r + splits[r]] for x in xs]) for r in range(world)],
    )  # fmt: skip


@check
def halves_have_gradients_too_and_adasum_has_none(rank: int, world: int) -> None:
    value = torch.ones(3, requires_grad=True)
    gc.allreduce(value, compression=gc.Compression.bf16, op=gc.Sum).sum().backward()
    same(value.grad, torch.full((3,), float(world)))
    if world in (1, 2, 4):
        value = torch.ones(3, requires_grad=True)
        with raises(gc.ConfigError, "ADASUM", "no gradient"):
            gc.allreduce(value, op=gc.Adasum).sum().backward()


# ----------------------------------------------------------------------------------------- sparse, objects


@check
def sparse_tensors_are_added(rank: int, world: int) -> None:
    def sparse(r: int) -> torch.Tensor:
        index = torch.tensor([[r, r, 0], [0, 1, 1]])[:, : 3 - r % 2]
        return torch.sparse_coo_tensor(
            index, torch.arange(6.0).view(3, 2)[: index.shape[1]] + r, (world, 2, 2)
        )

    total = sum(sparse(r).to_dense() for r in range(world))
    for op, expected in ((gc.Sum, total), (gc.Average, total / world)):
        handle = gc.sparse_allreduce_async(sparse(rank), name="table", op=op)
        result = gc.synchronize(handle)
        assert result.is_sparse
        assert result.is_coalesced()
        torch.testing.assert_close(result.to_dense(), expected)
        assert handle() is result
    nothing = torch.sparse_coo_tensor(torch.zeros(2, 0), torch.zeros(0, 3), (4, 5, 3))
    assert gc.sparse_allreduce_async(nothing, None, gc.Sum)().to_dense().abs().sum() == 0
    for wrong in (torch.ones(3), 3):
        with raises(gc.ConfigError, "sparse"):
            gc.sparse_allreduce_async(wrong, "wrong", gc.Sum)()
    if world > 1:
        other = torch.sparse_coo_tensor(torch.zeros(1, 1), torch.ones(1), (3 + min(rank, 1),))
        with raises(gc.PlanMismatchError, "[3]", "[4]"):
            gc.sparse_allreduce_async(other, "sizes", gc.Sum)()


@check
def objects_are_gathered(rank: int, world: int) -> None:
    gathered = gc.allgather_object({"rank": rank, "values": torch.full((rank,), 1.0)}, name="objects")
    assert [each["rank"] for each in gathered] == list(range(world))
    assert [len(each["values"]) for each in gathered] == list(range(world))
    if world > 1:
        with raises(gc.ConfigError, f"rank {world - 1}", "tensors, numbers"):
            gc.allgather_object(object() if rank == world - 1 else 1)


# -------------------------------------------------------------------------------------------------- names


@check
def named_calls_find_each_other_in_any_order(rank: int, world: int) -> None:
    """Every rank has its own order; unnamed calls between them keep theirs."""
    order = np.random.default_rng(rank).permutation(30)
    handles = {}
    for place, number in enumerate(order.tolist()):
        name = f"layer {number}"
        if number % 3 == 0:
            handles[number] = gc.allreduce_async(torch.full((number + 1,), rank), op=gc.Sum, name=name)
        elif number % 3 == 1:
            handles[number] = gc.allgather_async(torch.full((1,), rank), name=name)
        else:
            handles[number] = gc.broadcast_async(torch.full((2,), rank), world - 1, name=name)
        if place % 10 == 9:
            same(gc.allreduce(torch.tensor([place]), op=gc.Max), torch.tensor([place]))
    for number in np.random.default_rng(rank + 50).permutation(30).tolist():
        result = gc.synchronize(handles[number])
        expected = (
            torch.full((number + 1,), sum(range(world))), torch.arange(world), torch.full((2,), world - 1),
        )[number % 3]  # fmt: skip
        same(result, expected)


@check
def calls_of_several_threads_find_each_other(rank: int, world: int) -> None:
    results: dict[str, torch.Tensor] = {}

    def call(name: str) -> None:
        results[name] = gc.allreduce(torch.full((2,), float(len(name))), op=gc.Sum, name=name)

    names = ["a", "bb", "ccc"]
    threads = [threading.Thread(target=call, args=(name,)) for name in names[rank % 3 :] + names[: rank % 3]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name in names:
        same(results[name], torch.full((2,), float(len(name) * world)))


@check
def what_differs_under_a_name_is_an_error_on_every_rank(rank: int, world: int) -> None:
    if world == 1:
        return
    same_call = functools.partial(gc.allreduce_async, torch.ones(2), op=gc.Sum, name="same")
    last = rank == world - 1

    def other() -> gc.Handle:
        return gc.allreduce_async(torch.ones(4 if last else 3), name="other")

    first, second = (same_call(), other()) if last else (other(), same_call())
    wrong, right = (second, first) if last else (first, second)
    same(gc.synchronize(right), torch.full((2,), float(world)))
    with raises(gc.PlanMismatchError, "'other'", "[3]", "[4]", f"rank {world - 1}"):
        gc.synchronize(wrong)
    with raises(gc.PlanMismatchError, "'factor'", "prescale_factor=2.0"):
        gc.allreduce(torch.ones(1), name="factor", prescale_factor=2.0 if last else 1.0)
    with raises(gc.PlanMismatchError, "'op'", "MIN", "MAX"):
        gc.allreduce(torch.ones(1), name="op", op=gc.Min if last else gc.Max)
    with raises(gc.PlanMismatchError, "'group'", "[1]", "[2]"):
        gc.grouped_allreduce([torch.ones(1), torch.ones(2 if last else 1)], name="group")


@check
def a_name_belongs_to_one_call_at_a_time(rank: int, world: int) -> None:
    first = gc.allreduce_async(torch.ones(1), op=gc.Sum, name="twice")
    with raises(gc.ConfigError, "'twice' is pending"):
        gc.allreduce(torch.ones(1), op=gc.Sum, name="twice")
    same(gc.synchronize(first), torch.full((1,), float(world)))
    for _ in range(2):
        same(gc.allreduce(torch.ones(1), op=gc.Sum, name="twice"), torch.full((1,), float(world)))
    # One rank's mistake is an error at once and there alone, though nobody waits for the first call.
    begin: list[Callable[..., gc.Handle]] = [
        gc.allreduce_async, gc.allgather_async, gc.reducescatter_async, gc.alltoall_async,
        functools.partial(gc.broadcast_async, root_rank=0),
    ]  # fmt: skip
    for number, call in enumerate(begin):
        if rank == number % world:
            handle = call(torch.ones(world), name="held")
            with raises(ValueError, f"rank {rank}: an operation named 'held' is pending"):
                call(torch.ones(world), name="held")
        gc.barrier()
        if rank != number % world:
            handle = call(torch.ones(world), name="held")
        gc.synchronize(handle)
    gc.barrier()


@check
def errors_are_caught_as_horovods(rank: int, world: int) -> None:
    """Other shapes, dtypes, ranks of tensors, roots, and what is impossible everywhere; all goes on behind each."""
    if world == 1:
        return
    one, last = torch.ones(4), rank == world - 1
    wrong = (torch.ones(5), torch.ones(4, dtype=torch.int32), torch.ones(2, 2)) if last else (one,) * 3
    cases: list[Callable[[], Any]] = [
        lambda: gc.broadcast(one, rank),
        lambda: gc.reducescatter(one, op=gc.Adasum),
    ]
    for other in wrong:
        cases += [functools.partial(call, other) for call in (gc.allreduce, gc.reducescatter)]
        cases.append(functools.partial(gc.broadcast, other, 0))
    for other in wrong[1:]:  # ranks may have other numbers of rows
        rows = other.repeat(world, *[1] * (other.dim() - 1))
        cases += [functools.partial(call, rows) for call in (gc.allgather, gc.alltoall)]
    for number, case in enumerate(cases):
        for kind in (RuntimeError, gc.HorovodInternalError):
            with raises(kind):
                case()
        same(gc.allreduce(torch.tensor([number])), torch.tensor([number]))


@check
def groups_must_have_tensors_and_names_be_strings(rank: int, world: int) -> None:
    for wrong, text in (([], "empty"), (torch.ones(2), "not a list"), ([torch.ones(1), "x"], "tensor 1")):
        for grouped in (gc.grouped_allreduce, gc.grouped_allgather, gc.grouped_reducescatter):
            with raises(gc.ConfigError, text):
                grouped(wrong)
    with raises(gc.ConfigError, "name must be a string"):
        gc.allreduce(torch.ones(1), name=3)


# ------------------------------------------------------------------------------------------- process sets


@check
def some_of_the_ranks_call_alone(rank: int, world: int) -> None:
    half = gc.ProcessSet(range(rank % 2, world, 2))
    ours = [values("float32", (4, 3), r) for r in half.ranks]
    mine, count, place = values("float32", (4, 3), rank), half.size(), half.rank()
    for op in UFUNCS:
        close(gc.allreduce(tensor(mine), op=op, process_set=half), reduced(ours, op))
        rows = shares(4, count)[place]
        close(gc.reducescatter(tensor(mine), op=op, process_set=half), reduced(ours, op)[rows])
    close(gc.broadcast(tensor(mine), half.ranks[-1], process_set=half), ours[-1])
    close(gc.grouped_allgather([tensor(mine)], process_set=half)[0], np.concatenate(ours))
    assert gc.allgather_object(rank, process_set=half) == list(half.ranks)
    rows, _ = gc.alltoall(torch.full((count,), rank), splits=[1] * count, process_set=half)
    same(rows, torch.tensor(half.ranks))
    gc.barrier()


def main() -> None:
    collective_checks.main(CHECKS)
