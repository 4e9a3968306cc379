"""What every rank checks about broadcasts of models, optimizers' states and objects under PyTorch."""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable
from typing import Any

import torch
from collective_adapters import Check, Collectives
from logs import logged
from torch_collectives import CHECKS, check, check_of_several, equal

import gradcomp.torch as gc


def model(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    layers = torch.nn.Sequential(
        torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 2).to(torch.bfloat16)
    )
    layers[1].running_mean.fill_(seed)
    layers[1].num_batches_tracked.fill_(seed)
    return layers


@check
def parameters_and_buffers_become_the_roots(c: Collectives) -> None:
    for root in range(c.world):
        ours = model(c.rank)
        gc.broadcast_parameters(ours.state_dict(), root_rank=root)
        for name, value in model(root).state_dict().items():
            equal(ours.state_dict()[name], value)


@check
def named_parameters_work_too(c: Collectives) -> None:
    ours = model(c.rank)
    gc.broadcast_parameters(ours.named_parameters(), root_rank=0)
    for mine, roots in zip(ours.parameters(), model(0).parameters(), strict=True):
        equal(mine.data, roots.data)
    assert all(p.requires_grad for p in ours.parameters())


@check
def order_of_names_does_not_matter(c: Collectives) -> None:
    values = {name: torch.full((2,), float(c.rank)) for name in "abc"}
    given = values if c.rank == 0 else dict(reversed(values.items()))
    gc.broadcast_parameters(given)
    assert all(torch.equal(v, torch.zeros(2)) for v in values.values())


@check
def odd_tensors_are_broadcast(c: Collectives) -> None:
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

    values = make(c.rank)
    gc.broadcast_parameters({})
    gc.broadcast_parameters(values, root_rank=c.world - 1)
    for name, value in make(c.world - 1).items():
        equal(values[name], value)


@check
def not_a_number_is_broadcast_bit_for_bit(c: Collectives) -> None:
    value = torch.tensor([float("nan"), -0.0]) if c.rank == 0 else torch.ones(2)
    gc.broadcast_parameters({"w": value})
    assert torch.equal(value.view(torch.int32), torch.tensor([float("nan"), -0.0]).view(torch.int32))


@check
def other_entries_of_a_dict_are_replaced(c: Collectives) -> None:
    state = {
        "w": torch.full((2,), float(c.rank)),
        "extra": {"epoch": c.rank, "t": torch.full((1,), float(c.rank))},
    }
    gc.broadcast_parameters(state, root_rank=c.world - 1)
    assert state["extra"]["epoch"] == c.world - 1
    equal(state["extra"]["t"], torch.full((1,), float(c.world - 1)))


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
def a_whole_module_becomes_the_roots_with_its_extra_state(c: Collectives) -> None:
    ours = torch.nn.Sequential(Counter(c.rank), torch.nn.Linear(2, 2), Counter(10 + c.rank))
    gc.broadcast_parameters(ours, root_rank=c.world - 1)
    assert [ours[0].count, ours[2].count] == [c.world - 1, 9 + c.world]
    for value in (*ours.state_dict().values(), ours[0].unsaved):
        if isinstance(value, torch.Tensor):
            kept = gc.broadcast_object(value, c.world - 1)
            equal(value, kept)
    equal(ours[2].unsaved, torch.full((2,), 9.0 + c.world))


@check_of_several
def extra_state_in_a_dict_is_warned_of(c: Collectives) -> None:
    ours = torch.nn.Sequential(Counter(0))
    with logged(logging.WARNING) as lines:
        gc.broadcast_parameters(ours.state_dict())
    assert len(lines) == (c.rank == 0)
    assert all("0._extra_state" in line and "broadcast_parameters(model)" in line for line in lines)


@check
def objects_arrive(c: Collectives) -> None:
    sent = {
        "none": None, "numbers": [1, 2.5, True, 2**80, 1 + 2j], "text": "ü", "bytes": b"\0x", "tuple": (1, ()),
        "set": {1, 2}, "ordered": collections.OrderedDict(a=1), "size": torch.Size([2]), "dtype": torch.bfloat16,
    }  # fmt: skip
    assert gc.broadcast_object(sent if c.rank == c.world - 1 else object(), root_rank=c.world - 1) == sent


@check
def tensors_in_objects_arrive(c: Collectives) -> None:
    received = gc.broadcast_object(
        [torch.arange(3), torch.ones(2, dtype=torch.bfloat16)] if c.rank == 0 else None
    )
    equal(received[0], torch.arange(3))
    equal(received[1], torch.ones(2, dtype=torch.bfloat16))


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
        equal(left, right)
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
def state_that_only_the_root_has(c: Collectives) -> None:
    for kind in (torch.optim.Adam, torch.optim.SGD):
        arguments = {"momentum": 0.9} if kind is torch.optim.SGD else {}
        ours = optimizer(kind, 2 if c.rank == 0 else 0, c.rank, lr=0.1 + c.rank, **arguments)
        gc.broadcast_optimizer_state(ours)
        equal_state(ours, optimizer(kind, 2, 0, lr=0.1, **arguments))


@check
def state_that_only_the_others_have(c: Collectives) -> None:
    ours = optimizer(torch.optim.Adam, 0 if c.rank == 0 else 2, c.rank, lr=0.1)
    gc.broadcast_optimizer_state(ours)
    equal_state(ours, optimizer(torch.optim.Adam, 0, 0, lr=0.1))


@check
def state_wider_than_its_parameter_stays_wide(c: Collectives) -> None:
    parameter = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    ours = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    if c.rank == 0:
        ours.state[parameter]["momentum_buffer"] = torch.full((3,), 1 + 2**-20)
    gc.broadcast_optimizer_state(ours)
    equal(ours.state[parameter]["momentum_buffer"], torch.full((3,), 1 + 2**-20))


@check
def state_that_belongs_to_no_parameter(c: Collectives) -> None:
    ours = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1, momentum=0.9)
    ours.state["whole"] = {"norm": torch.tensor([1.0 + c.rank])}
    gc.broadcast_optimizer_state(ours)
    equal(ours.state["whole"]["norm"], torch.tensor([1.0]))


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
def every_optimizer_of_torchs_gets_the_roots_state(c: Collectives) -> None:
    """State of two steps on the root and none elsewhere, and the other way around; then all go on alike."""
    kinds = [
        kind for kind in vars(torch.optim).values()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    ]  # fmt: skip
    assert {torch.optim.SGD, torch.optim.LBFGS, torch.optim.Adagrad, torch.optim.SparseAdam} <= set(kinds)
    for kind in kinds:
        for root in (0, c.world - 1):
            ours = used(kind, 2 if c.rank == 0 else 0, c.rank)
            gc.broadcast_optimizer_state(ours, root, torch.nn.Linear(1, 1))
            gc.broadcast_parameters(ours.param_groups[0]["params"], root)
            equal_state(ours, used(kind, 2 if root == 0 else 0, root))
            ours.step(lambda: gradients_of(ours))  # noqa: B023 - called at once
            c.everywhere(c.array(torch.cat(ours.param_groups[0]["params"])))


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
    "sparse_tensors": (Wrong, ("rank 0",),
        lambda first, last: gc.allreduce(torch.ones(2, 2).to_sparse(), op=gc.Sum)),
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


def refused(name: str) -> Check:
    def run(c: Collectives) -> None:
        kind, texts, call = REFUSED[name]
        with c.raises(kind, *(text.format(last=c.world - 1) for text in texts)):
            call(c.rank == 0, c.rank == c.world - 1)

    return run


CHECKS.update({name: refused(name) for name in REFUSED})


@check
def not_parameters_at_all(c: Collectives) -> None:
    meta = {"w": torch.ones(1, device="meta")}
    for params in (3, [torch.ones(2), 1], [(1, torch.ones(1))], [("w", 1)], meta):
        with c.raises(gc.ConfigError):
            gc.broadcast_parameters(params)


@check
def root_out_of_range_is_refused(c: Collectives) -> None:
    for call in (
        lambda root: gc.broadcast_parameters({}, root),
        lambda root: gc.broadcast_optimizer_state(sgd(1), root),
    ):
        for root in (c.world, -1, "0"):
            with c.raises(gc.ConfigError, "root_rank", f"0 .. {c.world - 1}"):
                call(root)


@check
def objects_are_gathered(c: Collectives) -> None:
    gathered = gc.allgather_object({"rank": c.rank, "values": torch.full((c.rank,), 1.0)}, name="objects")
    assert [each["rank"] for each in gathered] == list(range(c.world))
    assert [len(each["values"]) for each in gathered] == list(range(c.world))
    if c.world > 1:
        with c.raises(gc.ConfigError, f"rank {c.world - 1}", "tensors, numbers"):
            gc.allgather_object(object() if c.rank == c.world - 1 else 1)
