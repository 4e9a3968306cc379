"""What every rank checks about PyTorch's collectives beside ``collective_checks``: tensors in place, handles, names."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from collective_adapters import Collectives, close, same
from collective_checks import gradients
from numpy_reductions import DTYPES, SHAPES, UFUNCS, reduced, values
from torch_collectives import check, check_of_several, equal

import gradcomp.torch as gc


@check
def strided_input_in_place(c: Collectives) -> None:
    whole = torch.zeros(4, 6)
    view = whole[:, ::2].t()
    view += c.rank
    assert gc.allreduce_(view, op=gc.Sum) is view
    equal(view, torch.full((3, 4), float(sum(range(c.world)))))
    equal(whole[:, 1], torch.zeros(4))


@check
def async_operations_wait_in_any_order(c: Collectives) -> None:
    handles = [gc.allreduce_async(torch.full((1000,), float(i + c.rank)), op=gc.Sum) for i in range(8)]
    order = range(8) if c.rank % 2 else reversed(range(8))
    for i in order:
        equal(gc.synchronize(handles[i]), torch.full((1000,), float(i * c.world + sum(range(c.world)))))


@check
def async_takes_the_values_of_the_call(c: Collectives) -> None:
    value = torch.ones(1000)
    handle = gc.allreduce_async(value, op=gc.Sum)
    value.fill_(-1)
    equal(gc.synchronize(handle), torch.full((1000,), float(c.world)))


@check
def async_in_place_writes_when_synchronized(c: Collectives) -> None:
    value = torch.ones(10)
    handle = gc.allreduce_async_(value, op=gc.Sum)
    assert gc.synchronize(handle) is value
    equal(value, torch.full((10,), float(c.world)))
    assert gc.poll(handle)
    assert gc.synchronize(handle) is value


@check
def parameters_stay_parameters(c: Collectives) -> None:
    parameter = torch.nn.Parameter(torch.full((2,), float(c.rank)))
    gc.allreduce_(parameter, op=gc.Sum)
    equal(parameter.data, torch.full((2,), float(sum(range(c.world)))))
    strided = torch.nn.Parameter(torch.full((2, 3), float(c.rank)).t())
    assert gc.broadcast_(strided, 0) is strided
    equal(strided.data, torch.zeros(3, 2))
    for each in (parameter, strided):
        assert each.requires_grad
        assert each.is_leaf


@check
def strided_parts_are_gathered(c: Collectives) -> None:
    part = torch.arange(6.0).view(2, 3).t()
    equal(gc.allgather(part), torch.cat([part] * c.world))


@check_of_several
def forked_child_is_not_a_rank(c: Collectives) -> None:
    gc.barrier()
    child = os.fork()
    if child == 0:
        try:
            gc.barrier()
        except gc.StateError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


@check
def in_place_and_async_write_where_they_should(c: Collectives) -> None:
    for dtype in DTYPES:
        ours = [values(dtype, (4, 6), r) for r in range(c.world)]
        whole = c.tensor(ours[c.rank])
        view = whole.t()[::2]
        assert gc.allreduce_(view, op=gc.Max) is view
        close(c.array(whole)[:, ::2], reduced([one[:, ::2] for one in ours], gc.Max))
        close(c.array(whole)[:, 1::2], ours[c.rank][:, 1::2])
        value = c.tensor(ours[c.rank])
        handle = gc.allreduce_async(value, op=gc.Sum, name=f"sum of {dtype}")
        close(c.array(gc.synchronize(handle)), reduced(ours, gc.Sum))
        assert gc.poll(handle)
        close(c.array(value), ours[c.rank])


@check
def groups_are_reduced_in_place_and_async(c: Collectives) -> None:
    forms = list(itertools.product(("float32", "bfloat16", "uint8", "int64", "float32"), SHAPES))
    for op in UFUNCS:
        ours = [[values(dtype, shape, r) for r in range(c.world)] for dtype, shape in forms]
        given = [c.tensor(each[c.rank]) for each in ours]
        results = gc.synchronize(gc.grouped_allreduce_async_(given, op=op, name="group"))
        assert all(result is one for result, one in zip(results, given, strict=True))
        for result, each in zip(given, ours, strict=True):
            close(c.array(result), reduced(each, op))


@check
def a_version_counts_what_is_written_in_place(c: Collectives) -> None:
    """Autograd must notice that a tensor that it has saved is another one now."""
    weight = torch.ones(3, requires_grad=True)
    value = torch.ones(3)
    product = weight * value
    gc.allreduce_(value, op=gc.Sum)
    with c.raises(RuntimeError, "modified by an inplace operation"):
        product.sum().backward()


@check
def handles_of_other_collectives_have_their_results(c: Collectives) -> None:
    ours = [[values(dtype, (5, 2), r) for r in range(c.world)] for dtype in ("float32", "int16", "bfloat16")]
    given = [c.tensor(each[c.rank]) for each in ours]
    scattered = gc.grouped_reducescatter_async(given, op=gc.Sum, postscale_factor=2)
    gathered = gc.grouped_allgather_async(given, name="group")
    for result, each in zip(gc.synchronize(scattered), ours, strict=True):
        doubled = (reduced(each, gc.Sum).astype(np.float64) * 2).astype(each[0].dtype)
        close(c.array(result), np.array_split(doubled, c.world)[c.rank])
    for result, each in zip(gc.synchronize(gathered), ours, strict=True):
        same(c.array(result), np.concatenate(each))
    equal(gc.synchronize(gc.allgather_async(torch.full((1,), c.rank))), torch.arange(c.world))
    numbered = torch.arange(2 * c.world) + 10 * c.rank
    parts = torch.cat([torch.arange(2 * c.rank, 2 * c.rank + 2) + 10 * r for r in range(c.world)])
    equal(gc.synchronize(gc.alltoall_async(numbered, name="rows")), parts)
    rows, received = gc.synchronize(gc.alltoall_async(numbered, splits=[2] * c.world))
    equal(rows, parts)
    equal(received, torch.full((c.world,), 2, dtype=torch.int32))
    for root in {0, c.world - 1}:
        for dtype, shape in zip(DTYPES, itertools.cycle(((3,), (), (0, 2), (2, 3, 4))), strict=False):
            ours, expected = (c.tensor(values(dtype, shape, rank)) for rank in (c.rank, root))
            equal(gc.synchronize(gc.broadcast_async(ours, root, name="b")), expected)
            assert gc.synchronize(gc.broadcast_async_(ours, root)) is ours
            equal(ours, expected)


@check
def names_of_compressions_code_tensors(c: Collectives) -> None:
    for compression, half in ((gc.Compression.fp16, torch.float16), (gc.Compression.bf16, torch.bfloat16)):
        for dtype in (torch.float32, torch.float64):
            ours = torch.randn(5, dtype=dtype)
            coded, context = compression.compress(ours)
            assert coded.dtype is half
            equal(compression.decompress(coded, context), ours.to(half).to(dtype))
        counts = torch.arange(3)
        assert compression.decompress(*compression.compress(counts)) is counts
    kept = torch.nn.Parameter(torch.ones(2))
    assert gc.Compression.none.decompress(*gc.Compression.none.compress(kept)) is kept
    assert gc.Compression.fp16.compress(kept)[0].dtype is torch.float16
    with c.raises(gc.ConfigError, "not a tensor of torch: ndarray"):
        gc.Compression.fp16.compress(np.ones(2))


@check
def sparse_tensors_are_added(c: Collectives) -> None:
    def sparse(r: int) -> torch.Tensor:
        index = torch.tensor([[r, r, 0], [0, 1, 1]])[:, : 3 - r % 2]
        return torch.sparse_coo_tensor(
            index, torch.arange(6.0).view(3, 2)[: index.shape[1]] + r, (c.world, 2, 2)
        )

    total = sum(sparse(r).to_dense() for r in range(c.world))
    for op, expected in ((gc.Sum, total), (gc.Average, total / c.world)):
        handle = gc.sparse_allreduce_async(sparse(c.rank), name="table", op=op)
        result = gc.synchronize(handle)
        assert result.is_sparse
        assert result.is_coalesced()
        torch.testing.assert_close(result.to_dense(), expected)
        assert handle() is result
    nothing = torch.sparse_coo_tensor(torch.zeros(2, 0), torch.zeros(0, 3), (4, 5, 3))
    assert gc.sparse_allreduce_async(nothing, None, gc.Sum)().to_dense().abs().sum() == 0
    for wrong in (torch.ones(3), 3):
        with c.raises(gc.ConfigError, "sparse"):
            gc.sparse_allreduce_async(wrong, "wrong", gc.Sum)()
    if c.world > 1:
        other = torch.sparse_coo_tensor(torch.zeros(1, 1), torch.ones(1), (3 + min(c.rank, 1),))
        with c.raises(gc.PlanMismatchError, "[3]", "[4]"):
            gc.sparse_allreduce_async(other, "sizes", gc.Sum)()


@check
def named_calls_find_each_other_in_any_order(c: Collectives) -> None:
    """Every rank has its own order; unnamed calls between them keep theirs."""
    order = np.random.default_rng(c.rank).permutation(30)
    handles = {}
    for place, number in enumerate(order.tolist()):
        name = f"layer {number}"
        if number % 3 == 0:
            handles[number] = gc.allreduce_async(torch.full((number + 1,), c.rank), op=gc.Sum, name=name)
        elif number % 3 == 1:
            handles[number] = gc.allgather_async(torch.full((1,), c.rank), name=name)
        else:
            handles[number] = gc.broadcast_async(torch.full((2,), c.rank), c.world - 1, name=name)
        if place % 10 == 9:
            equal(gc.allreduce(torch.tensor([place]), op=gc.Max), torch.tensor([place]))
    for number in np.random.default_rng(c.rank + 50).permutation(30).tolist():
        result = gc.synchronize(handles[number])
        expected = (
            torch.full((number + 1,), sum(range(c.world))), torch.arange(c.world), torch.full((2,), c.world - 1),
        )[number % 3]  # fmt: skip
        equal(result, expected)


@check_of_several
def what_differs_under_a_name_is_an_error_on_every_rank(c: Collectives) -> None:
    same_call = functools.partial(gc.allreduce_async, torch.ones(2), op=gc.Sum, name="same")
    last = c.rank == c.world - 1

    def other() -> gc.Handle:
        return gc.allreduce_async(torch.ones(4 if last else 3), name="other")

    first, second = (same_call(), other()) if last else (other(), same_call())
    wrong, right = (second, first) if last else (first, second)
    equal(gc.synchronize(right), torch.full((2,), float(c.world)))
    with c.raises(gc.PlanMismatchError, "'other'", "[3]", "[4]", f"rank {c.world - 1}"):
        gc.synchronize(wrong)


@check
def a_name_belongs_to_one_call_at_a_time(c: Collectives) -> None:
    first = gc.allreduce_async(torch.ones(1), op=gc.Sum, name="twice")
    with c.raises(gc.ConfigError, "'twice' is pending"):
        gc.allreduce(torch.ones(1), op=gc.Sum, name="twice")
    equal(gc.synchronize(first), torch.full((1,), float(c.world)))
    for _ in range(2):
        equal(gc.allreduce(torch.ones(1), op=gc.Sum, name="twice"), torch.full((1,), float(c.world)))
    # One rank's mistake is an error at once and there alone, though nobody waits for the first call.
    begin: list[Callable[..., gc.Handle]] = [
        gc.allreduce_async, gc.allgather_async, gc.reducescatter_async, gc.alltoall_async,
        functools.partial(gc.broadcast_async, root_rank=0),
    ]  # fmt: skip
    for number, call in enumerate(begin):
        if c.rank == number % c.world:
            handle = call(torch.ones(c.world), name="held")
            with c.raises(ValueError, f"rank {c.rank}: an operation named 'held' is pending"):
                call(torch.ones(c.world), name="held")
        gc.barrier()
        if c.rank != number % c.world:
            handle = call(torch.ones(c.world), name="held")
        gc.synchronize(handle)
    gc.barrier()


@check_of_several
def errors_are_caught_as_horovods(c: Collectives) -> None:
    """Other shapes, dtypes, ranks of tensors, roots, and what is impossible everywhere; all goes on behind each."""
    one, last = torch.ones(4), c.rank == c.world - 1
    wrong = (torch.ones(5), torch.ones(4, dtype=torch.int32), torch.ones(2, 2)) if last else (one,) * 3
    cases: list[Callable[[], Any]] = [
        lambda: gc.broadcast(one, c.rank),
        lambda: gc.reducescatter(one, op=gc.Adasum),
    ]
    for other in wrong:
        cases += [functools.partial(call, other) for call in (gc.allreduce, gc.reducescatter)]
        cases.append(functools.partial(gc.broadcast, other, 0))
    for other in wrong[1:]:  # ranks may have other numbers of rows
        rows = other.repeat(c.world, *[1] * (other.dim() - 1))
        cases += [functools.partial(call, rows) for call in (gc.allgather, gc.alltoall)]
    for number, case in enumerate(cases):
        for kind in (RuntimeError, gc.HorovodInternalError):
            with c.raises(kind):
                case()
        equal(gc.allreduce(torch.tensor([number])), torch.tensor([number]))


@check
def groups_must_have_tensors_and_names_be_strings(c: Collectives) -> None:
    for wrong, text in (([], "empty"), (torch.ones(2), "not a list"), ([torch.ones(1), "x"], "tensor 1")):
        for grouped in (gc.grouped_allreduce, gc.grouped_allgather, gc.grouped_reducescatter):
            with c.raises(gc.ConfigError, text):
                grouped(wrong)
    with c.raises(gc.ConfigError, "name must be a string"):
        gc.allreduce(torch.ones(1), name=3)


@check
def other_reductions_have_the_gradient_of_what_they_chose(c: Collectives) -> None:
    """Unlike under TensorFlow, where Horovod reduces gradients by the operation itself."""
    forms = [(5, 2)] * c.world
    for op, ufunc in ((gc.Min, np.minimum), (gc.Max, np.maximum), (gc.Product, np.multiply)):
        gradients(
            c, forms, functools.partial(gc.allreduce, op=op, prescale_factor=0.5, postscale_factor=3.0),
            lambda xs, f=ufunc: [3 * f.reduce(np.stack(xs) * 0.5)] * c.world,
        )  # fmt: skip
        gradients(
            c, forms, lambda x, op=op: gc.grouped_allreduce([x, x * 2], op=op)[1],
            lambda xs, f=ufunc: [f.reduce(np.stack(xs) * 2)] * c.world,
        )  # fmt: skip
    if c.world in (1, 2, 4):
        with c.raises(gc.ConfigError, "ADASUM", "no gradient"):
            gc.allreduce(torch.ones(3, requires_grad=True), op=gc.Adasum).sum().backward()
