"""What every rank checks about the user's collectives; one process of a world runs them all, in this order.

A check asserts on every rank. ``main`` prints what came of each, by name, as JSON.
"""

from __future__ import annotations

import collections
import json
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from logs import logged
from without_inline import nothing_inline_among

import gradcomp.torch as gc

CHECKS: dict[str, Callable[[int, int], None]] = {}


def check(function: Callable[[int, int], None]) -> Callable[[int, int], None]:
    """Register a check; it gets this rank and the world's size."""
    CHECKS[function.__name__] = function
    return function


@contextmanager
def raises(kind: type[Exception], *texts: str) -> Iterator[None]:
    with pytest.raises(kind) as caught:
        yield
    assert all(text in str(caught.value) for text in texts), str(caught.value)


def same(left: torch.Tensor, right: torch.Tensor) -> None:
    assert left.dtype == right.dtype, (left.dtype, right.dtype)
    assert left.shape == right.shape, (left.shape, right.shape)
    assert torch.equal(left, right), (left, right)


def everywhere(value: torch.Tensor) -> None:
    """All ranks hold the same bytes; compared through allgather."""
    flat = value.detach().contiguous().view(-1).view(torch.uint8)
    parts = gc.allgather(flat).view(gc.size(), -1)
    assert (parts == parts[0]).all()


# ---------------------------------------------------------------------------------------------- allreduce


@check
def average_is_the_default(rank: int, world: int) -> None:
    values = [torch.arange(5.0) * (r + 1) for r in range(world)]
    torch.testing.assert_close(gc.allreduce(values[rank]), torch.stack(values).mean(0))


FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
SHAPES = ((), (0,), (1,), (7,), (2, 3, 4, 5), (3, 0))


@check
def sums_of_every_dtype_and_shape_come_back(rank: int, world: int) -> None:
    """Halves are added in float32: 256 + 1 + 1 + ... is 256 in bfloat16, one addition at a time."""
    forms = [
        *((dtype, (3,)) for dtype in (*FLOATS, *INTEGERS)),
        *((torch.float32, shape) for shape in SHAPES),
    ]
    cases = [[torch.full(shape, r + 1, dtype=dtype) for r in range(world)] for dtype, shape in forms]
    cases.append([torch.tensor([256.0 if r == 0 else 1.0], dtype=torch.bfloat16) for r in range(world)])
    for values in cases:
        before = values[rank].clone()
        total = torch.stack(values).to(torch.float64).sum(0).to(before.dtype)
        same(gc.allreduce(values[rank], op=gc.Sum), total)
        same(values[rank], before)


@check
def horovods_average_argument(rank: int, world: int) -> None:
    one = torch.ones(3)
    same(gc.allreduce(one, average=False), one * world)
    same(gc.allreduce(one, average=True), one)


@check
def average_of_large_halves_does_not_overflow(rank: int, world: int) -> None:
    large = torch.tensor([60000.0], dtype=torch.float16)
    same(gc.allreduce(large), large)


@check
def around_the_size_that_travels_with_the_comparison(rank: int, world: int) -> None:
    for count in (0, 1, 1023, 1024, 1025):
        values = [torch.arange(float(count)) * (r + 1) for r in range(world)]
        same(gc.allreduce(values[rank], op=gc.Sum, name="sized"), torch.stack(values).sum(0))
    odd = [torch.full((3,), rank, dtype=torch.uint8), torch.ones(5), torch.ones(1, dtype=torch.bfloat16)]
    odd += [torch.tensor([rank == 0] * 3), torch.ones(2, dtype=torch.float64)]
    for value, result in zip(odd, gc.grouped_allreduce(odd, op=gc.Sum), strict=True):
        one = value.new_ones(len(value))
        total = one if value.dtype == torch.bool else one * (sum(range(world)) if len(value) == 3 else world)
        same(result, total)


@check
def strided_input_in_place(rank: int, world: int) -> None:
    whole = torch.zeros(4, 6)
    view = whole[:, ::2].t()
    view += rank
    assert gc.allreduce_(view, op=gc.Sum) is view
    same(view, torch.full((3, 4), float(sum(range(world)))))
    same(whole[:, 1], torch.zeros(4))


@check
def sums_are_the_same_bytes_everywhere(rank: int, world: int) -> None:
    torch.manual_seed(rank)
    everywhere(gc.allreduce(torch.randn(10007)))


@check
def non_finite_values_are_seen_by_all(rank: int, world: int) -> None:
    result = gc.allreduce(torch.tensor([float("nan") if rank == 0 else 1.0, float("inf")]))
    assert torch.isnan(result[0])
    assert torch.isinf(result[1])


@check
def async_operations_wait_in_any_order(rank: int, world: int) -> None:
    handles = [gc.allreduce_async(torch.full((1000,), float(i + rank)), op=gc.Sum) for i in range(8)]
    order = range(8) if rank % 2 else reversed(range(8))
    for i in order:
        same(gc.synchronize(handles[i]), torch.full((1000,), float(i * world + sum(range(world)))))


@check
def async_takes_the_values_of_the_call(rank: int, world: int) -> None:
    value = torch.ones(1000)
    handle = gc.allreduce_async(value, op=gc.Sum)
    value.fill_(-1)
    same(gc.synchronize(handle), torch.full((1000,), float(world)))


@check
def async_in_place_writes_when_synchronized(rank: int, world: int) -> None:
    value = torch.ones(10)
    handle = gc.allreduce_async_(value, op=gc.Sum)
    assert gc.synchronize(handle) is value
    same(value, torch.full((10,), float(world)))
    assert gc.poll(handle)
    assert gc.synchronize(handle) is value


@check
def allreduce_is_differentiable(rank: int, world: int) -> None:
    value = torch.ones(3, requires_grad=True)
    (gc.allreduce(value) * (rank + 1)).sum().backward()
    torch.testing.assert_close(value.grad, torch.full((3,), sum(range(world + 1)) / world))


@check
def in_place_on_a_parameter(rank: int, world: int) -> None:
    parameter = torch.nn.Parameter(torch.full((2,), float(rank)))
    gc.allreduce_(parameter, op=gc.Sum)
    same(parameter.data, torch.full((2,), float(sum(range(world)))))
    assert parameter.requires_grad
    assert parameter.is_leaf


# ----------------------------------------------------------------------------------------------- allgather


@check
def ragged_parts_are_joined(rank: int, world: int) -> None:
    parts = [torch.full((r, 3), float(r)) for r in range(world)]
    same(gc.allgather(parts[rank]), torch.cat(parts))


@check
def any_dtype_is_gathered(rank: int, world: int) -> None:
    for dtype in (torch.bool, torch.uint8, torch.bfloat16, torch.float64, torch.complex64, torch.int16):
        parts = [torch.arange(r + 1).to(dtype) for r in range(world)]
        same(gc.allgather(parts[rank]), torch.cat(parts))


@check
def nothing_is_gathered_from_empty_parts(rank: int, world: int) -> None:
    same(gc.allgather(torch.zeros(0, 4)), torch.zeros(0, 4))
    same(gc.allgather(torch.zeros(2, 0)), torch.zeros(2 * world, 0))


@check
def strided_parts_are_gathered(rank: int, world: int) -> None:
    part = torch.arange(6.0).view(2, 3).t()
    same(gc.allgather(part), torch.cat([part] * world))


@check
def allgather_is_differentiable(rank: int, world: int) -> None:
    part = torch.ones(rank + 1, requires_grad=True)
    whole = gc.allgather(part)
    (whole * torch.arange(len(whole))).sum().backward()
    start = sum(range(rank + 1))
    torch.testing.assert_close(part.grad, torch.arange(start, start + rank + 1).float())


# ----------------------------------------------------------------------------------------------- broadcast


def model(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    layers = torch.nn.Sequential(
        torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 2).to(torch.bfloat16)
    )
    layers[1].running_mean.fill_(seed)
    layers[1].num_batches_tracked.fill_(seed)
    return layers


@check
def parameters_and_buffers_become_the_roots(rank: int, world: int) -> None:
    for root in range(world):
        ours = model(rank)
        gc.broadcast_parameters(ours.state_dict(), root_rank=root)
        for name, value in model(root).state_dict().items():
            same(ours.state_dict()[name], value)


@check
def named_parameters_work_too(rank: int, world: int) -> None:
    ours = model(rank)
    gc.broadcast_parameters(ours.named_parameters(), root_rank=0)
    for mine, roots in zip(ours.parameters(), model(0).parameters(), strict=True):
        same(mine.data, roots.data)
    assert all(p.requires_grad for p in ours.parameters())


@check
def order_of_names_does_not_matter(rank: int, world: int) -> None:
    values = {name: torch.full((2,), float(rank)) for name in "abc"}
    given = values if rank == 0 else dict(reversed(values.items()))
    gc.broadcast_parameters(given)
    assert all(torch.equal(v, torch.zeros(2)) for v in values.values())


@check
def odd_tensors_are_broadcast(rank: int, world: int) -> None:
    """Every dtype, empty, scalar and strided, side by side in one buffer."""

    def make(seed: int) -> dict[str, torch.Tensor]:
        return {
            "bool": torch.tensor([seed % 2 == 0] * 3),
            "complex": torch.full((2,), complex(seed, 1)),
            "double": torch.full((3,), seed + 0.5, dtype=torch.float64),
            "empty": torch.zeros(0),
            "half": torch.full((5,), float(seed), dtype=torch.float16),
            "scalar": torch.tensor(seed),
            "strided": torch.full((4, 3), float(seed)).t(),
        }

    values = make(rank)
    gc.broadcast_parameters({})
    gc.broadcast_parameters(values, root_rank=world - 1)
    for name, value in make(world - 1).items():
        same(values[name], value)


@check
def not_a_number_is_broadcast_bit_for_bit(rank: int, world: int) -> None:
    value = torch.tensor([float("nan"), -0.0]) if rank == 0 else torch.ones(2)
    gc.broadcast_parameters({"w": value})
    assert torch.equal(value.view(torch.int32), torch.tensor([float("nan"), -0.0]).view(torch.int32))


@check
def other_entries_of_a_dict_are_replaced(rank: int, world: int) -> None:
    state = {"w": torch.full((2,), float(rank)), "extra": {"epoch": rank, "t": torch.full((1,), float(rank))}}
    gc.broadcast_parameters(state, root_rank=world - 1)
    assert state["extra"]["epoch"] == world - 1
    same(state["extra"]["t"], torch.full((1,), float(world - 1)))


class Counter(torch.nn.Linear):
    """Holds something that is neither a parameter nor a buffer; and a buffer that no state_dict has."""

    def __init__(self, seed: int) -> None:
        super().__init__(2, 2)
        self.count = seed
        self.register_buffer("unsaved", torch.full((2,), float(seed)), persistent=False)

    def get_extra_state(self) -> dict[str, object]:
        return {"count": self.count, "t": torch.full((1 + self.count,), 1.0)}

    def set_extra_state(self, state: dict[str, object]) -> None:
        assert isinstance(state["count"], int)
        self.count = state["count"]


@check
def a_whole_module_becomes_the_roots_with_its_extra_state(rank: int, world: int) -> None:
    ours = torch.nn.Sequential(Counter(rank), torch.nn.Linear(2, 2), Counter(10 + rank))
    gc.broadcast_parameters(ours, root_rank=world - 1)
    assert [ours[0].count, ours[2].count] == [world - 1, 9 + world]
    for value in (*ours.state_dict().values(), ours[0].unsaved):
        if isinstance(value, torch.Tensor):
            kept = gc.broadcast_object(value, world - 1)
            same(value, kept)
    same(ours[2].unsaved, torch.full((2,), 9.0 + world))


@check
def extra_state_in_a_dict_is_warned_of(rank: int, world: int) -> None:
    ours = torch.nn.Sequential(Counter(0))
    with logged(logging.WARNING) as lines:
        gc.broadcast_parameters(ours.state_dict())
    assert len(lines) == (rank == 0)
    assert all("0._extra_state" in line and "broadcast_parameters(model)" in line for line in lines)


@check
def objects_arrive(rank: int, world: int) -> None:
    sent = {
        "none": None, "numbers": [1, 2.5, True, 2**80, 1 + 2j], "text": "ü", "bytes": b"\0x", "tuple": (1, ()),
        "set": {1, 2}, "ordered": collections.OrderedDict(a=1), "size": torch.Size([2]), "dtype": torch.bfloat16,
    }  # fmt: skip
    assert gc.broadcast_object(sent if rank == world - 1 else object(), root_rank=world - 1) == sent


@check
def tensors_in_objects_arrive(rank: int, world: int) -> None:
    received = gc.broadcast_object(
        [torch.arange(3), torch.ones(2, dtype=torch.bfloat16)] if rank == 0 else None
    )
    same(received[0], torch.arange(3))
    same(received[1], torch.ones(2, dtype=torch.bfloat16))


class Custom:
    pass


# ----------------------------------------------------------------------------------------- optimizer state


def optimizer(
    kind: type[torch.optim.Optimizer], steps: int, seed: int, **arguments: float
) -> torch.optim.Optimizer:
    torch.manual_seed(seed)
    parameters = [torch.nn.Parameter(torch.randn(3, 2)), torch.nn.Parameter(torch.randn(4))]
    made = kind(parameters, **arguments)
    for _ in range(steps):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        made.step()
    return made


def equal_value(left: Any, right: Any) -> None:
    """LBFGS has lists of tensors."""
    if isinstance(left, torch.Tensor):
        same(left, right)
    elif isinstance(left, list):
        assert len(left) == len(right)
        for mine, theirs in zip(left, right, strict=True):
            equal_value(mine, theirs)
    else:
        assert left == right


def equal_state(left: torch.optim.Optimizer, right: torch.optim.Optimizer) -> None:
    a, b = left.state_dict(), right.state_dict()
    assert a["param_groups"] == b["param_groups"], (a["param_groups"], b["param_groups"])
    assert a["state"].keys() == b["state"].keys()
    for index in a["state"]:
        assert a["state"][index].keys() == b["state"][index].keys()
        for key, value in a["state"][index].items():
            equal_value(value, b["state"][index][key])


@check
def state_that_only_the_root_has(rank: int, world: int) -> None:
    for kind in (torch.optim.Adam, torch.optim.SGD):
        arguments = {"momentum": 0.9} if kind is torch.optim.SGD else {}
        ours = optimizer(kind, 2 if rank == 0 else 0, rank, lr=0.1 + rank, **arguments)
        gc.broadcast_optimizer_state(ours)
        equal_state(ours, optimizer(kind, 2, 0, lr=0.1, **arguments))


@check
def state_that_only_the_others_have(rank: int, world: int) -> None:
    ours = optimizer(torch.optim.Adam, 0 if rank == 0 else 2, rank, lr=0.1)
    gc.broadcast_optimizer_state(ours)
    equal_state(ours, optimizer(torch.optim.Adam, 0, 0, lr=0.1))


@check
def state_wider_than_its_parameter_stays_wide(rank: int, world: int) -> None:
    parameter = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    ours = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    if rank == 0:
        ours.state[parameter]["momentum_buffer"] = torch.full((3,), 1 + 2**-20)
    gc.broadcast_optimizer_state(ours)
    same(ours.state[parameter]["momentum_buffer"], torch.full((3,), 1 + 2**-20))


@check
def state_that_belongs_to_no_parameter(rank: int, world: int) -> None:
    ours = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1, momentum=0.9)
    ours.state["whole"] = {"norm": torch.tensor([1.0 + rank])}
    gc.broadcast_optimizer_state(ours)
    same(ours.state["whole"]["norm"], torch.tensor([1.0]))


def used(kind: type[torch.optim.Optimizer], steps: int, seed: int) -> torch.optim.Optimizer:
    """Any optimizer of torch's, on two matrices, after so many steps."""
    torch.manual_seed(seed)
    values = [torch.nn.Parameter(torch.randn(3, 2)) for _ in range(2)]
    result = kind(values, lr=0.1 + seed)
    for _ in range(steps):
        result.step(lambda: gradients_of(result))
    return result


def gradients_of(optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """A closure that LBFGS takes too; SparseAdam gets sparse gradients."""
    values = optimizer.param_groups[0]["params"]
    for value in values:
        value.grad = value.detach() * 2
        if isinstance(optimizer, torch.optim.SparseAdam):
            value.grad = value.grad.to_sparse()
    return sum(value.detach().square().sum() for value in values)


@check
def every_optimizer_of_torchs_gets_the_roots_state(rank: int, world: int) -> None:
    """State of two steps on the root and none elsewhere, and the other way around; then all go on alike."""
    kinds = [
        kind for kind in vars(torch.optim).values()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    ]  # fmt: skip
    assert {torch.optim.SGD, torch.optim.LBFGS, torch.optim.Adagrad, torch.optim.SparseAdam} <= set(kinds)
    for kind in kinds:
        for root in (0, world - 1):
            ours = used(kind, 2 if rank == 0 else 0, rank)
            gc.broadcast_optimizer_state(ours, root, torch.nn.Linear(1, 1))
            gc.broadcast_parameters(ours.param_groups[0]["params"], root)
            equal_state(ours, used(kind, 2 if root == 0 else 0, root))
            ours.step(lambda: gradients_of(ours))  # noqa: B023 - called at once
            everywhere(torch.cat(ours.param_groups[0]["params"]).detach())


@check
def forked_child_is_not_a_rank(rank: int, world: int) -> None:
    gc.barrier()
    child = os.fork()
    if child == 0:
        try:
            gc.barrier()
        except gc.StateError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


# ------------------------------------------------------------------------------------------------- refused


def without(name: str) -> dict[str, torch.Tensor]:
    return {key: value for key, value in model(0).state_dict().items() if key != name}


def with_extra_state(inner: torch.nn.Module) -> torch.nn.Module:
    inner.register_buffer("unsaved", torch.zeros(2), persistent=False)
    return torch.nn.Sequential(inner)


def sgd(size: int) -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.ones(size)], lr=1)


SMALL = torch.nn.Sequential(torch.nn.Linear(3, 6))

Mismatch, Wrong = gc.PlanMismatchError, gc.ConfigError

# Names of checks; the error, what its text has ({last} is the last rank), and the call of a rank, which is told
# whether it is the first and whether it is the last one.
# fmt: off
REFUSED: dict[str, tuple[type[Exception], tuple[str, ...], Callable[[bool, bool], Any]]] = {
    "different_shapes_name_both": (Mismatch, ("rank 0 has", "[3]", "rank {last} has", "[4]"),
        lambda first, last: gc.allreduce(torch.ones(4 if last else 3))),
    "different_dtypes": (Mismatch, ("float32", "float64"),
        lambda first, last: gc.allreduce(torch.ones(3, dtype=torch.float64 if first else torch.float32))),
    "different_operations": (Mismatch, ("AVERAGE", "SUM"),
        lambda first, last: gc.allreduce(torch.ones(3), op=gc.Sum if first else gc.Average)),
    "different_names": (Mismatch, ("'loss'", "'accuracy'"),
        lambda first, last: gc.allreduce(torch.ones(3), name="loss" if first else "accuracy")),
    "different_calls": (Mismatch, ("barrier()", "allreduce("),
        lambda first, last: gc.barrier() if first else gc.allreduce(torch.ones(3))),
    "one_ranks_bad_argument_is_everyones_error": (Wrong, ("rank {last}", "str"),
        lambda first, last: gc.allreduce("no tensor" if last else torch.ones(3))),
    "complex_numbers": (Wrong, ("rank 0",),
        lambda first, last: gc.allreduce(torch.ones(2, dtype=torch.complex64), op=gc.Sum)),
    "sparse_tensors": (Wrong, ("rank 0",),
        lambda first, last: gc.allreduce(torch.ones(2, 2).to_sparse(), op=gc.Sum)),
    "average_of_bool": (Wrong, ("bool", "op=Sum"),
        lambda first, last: gc.allreduce(torch.ones(3, dtype=torch.bool))),
    "both_spellings_at_once": (Wrong, ("average and op",),
        lambda first, last: gc.allreduce(torch.ones(1), average=True, op=gc.Sum)),
    "unknown_operation": (Wrong, ("Average or Sum",),
        lambda first, last: gc.allreduce(torch.ones(1), op="mean")),
    "different_trailing_shapes": (Mismatch, ("[*, 3]", "[*, 4]"),
        lambda first, last: gc.allgather(torch.ones(2, 3 if first else 4))),
    "scalars_cannot_be_gathered": (Wrong, ("no rows",),
        lambda first, last: gc.allgather(torch.tensor(1.0))),
    "modules_with_other_extra_state": (Mismatch, ("0: extra state",),
        lambda first, last: gc.broadcast_parameters(
            with_extra_state(torch.nn.Linear(2, 2) if first else Counter(0)))),
    "different_models_name_the_first_difference":
        (Mismatch, ("0.bias: float32 [5]", "rank {last} has 0.bias: float32 [6]"),
        lambda first, last: gc.broadcast_parameters((SMALL if last else model(0)).state_dict())),
    "missing_parameter_is_named": (Mismatch, ("1.weight",),
        lambda first, last: gc.broadcast_parameters(without("1.weight" if first else ""))),
    "repeated_name_is_named": (Wrong, ("'w'", "twice"),
        lambda first, last: gc.broadcast_parameters([("w", torch.ones(1)), ("w", torch.ones(1))])),
    "different_roots": (Mismatch, ("root_rank=0", "root_rank=1"),
        lambda first, last: gc.broadcast_object(1, root_rank=0 if first else 1)),
    "arbitrary_classes_are_refused_on_every_rank": (Wrong, ("rank 0", "Custom", "tensors, numbers, strings"),
        lambda first, last: gc.broadcast_object({"x": Custom()} if first else None)),
    "functions_are_refused_on_every_rank": (Wrong, ("rank 0",),
        lambda first, last: gc.broadcast_object(lambda: None)),
    "a_model_is_a_module": (Wrong, ("model must be a torch.nn.Module", "list"),
        lambda first, last: gc.broadcast_optimizer_state(sgd(1), 0, None if first else [])),
    "different_optimizers": (Mismatch, ("SGD", "Adam"),
        lambda first, last: gc.broadcast_optimizer_state(
            optimizer(torch.optim.Adam if first else torch.optim.SGD, 0, 0, lr=0.1))),
    "different_parameter_shapes": (Mismatch, ("group 0: float32 [2]",),
        lambda first, last: gc.broadcast_optimizer_state(sgd(2 if first else 3))),
    "not_an_optimizer": (Wrong, ("dict",),
        lambda first, last: gc.broadcast_optimizer_state({})),
}
# fmt: on


def refused(name: str) -> Callable[[int, int], None]:
    def run(rank: int, world: int) -> None:
        kind, texts, call = REFUSED[name]
        with raises(kind, *(text.format(last=world - 1) for text in texts)):
            call(rank == 0, rank == world - 1)

    return run


CHECKS.update({name: refused(name) for name in REFUSED})


@check
def not_parameters_at_all(rank: int, world: int) -> None:
    meta = {"w": torch.ones(1, device="meta")}
    for params in (3, [torch.ones(2), 1], [(1, torch.ones(1))], [("w", 1)], meta):
        with raises(gc.ConfigError):
            gc.broadcast_parameters(params)


@check
def root_out_of_range_is_refused(rank: int, world: int) -> None:
    for call in (
        lambda root: gc.broadcast_object(1, root),
        lambda root: gc.broadcast_parameters({}, root),
        lambda root: gc.broadcast_optimizer_state(sgd(1), root),
    ):
        for root in (world, -1, "0"):
            with raises(gc.ConfigError, "root_rank", f"0 .. {world - 1}"):
                call(root)


def main(checks: dict[str, Callable[[int, int], None]] | None = None) -> None:
    gc.init(timeout_seconds=60)
    nothing_inline_among(3, gc.size())
    outcome = {}
    for name, function in (checks or CHECKS).items():
        try:
            function(gc.rank(), gc.size())
            outcome[name] = ""
        except (Exception, pytest.fail.Exception):  # noqa: BLE001 - the parent shows it
            outcome[name] = traceback.format_exc()
    json.dump(outcome, sys.stdout)
