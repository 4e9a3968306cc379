"""Parameters that cannot be exchanged as they lie, and gradients that are not as agreed, are refused on every rank."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from batch import on_ranks
from small_torch import NEAREST, assert_still_working, net, train, wrap
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor

import gradcomp.torch as gc


def mesh():
    return init_device_mesh("cpu", (2,))


def sharded():
    model = net()
    fully_shard(model, mesh=mesh())
    return model


def distributed_tensors():
    model = net()
    for module in (model[0], model[2]):
        for name, parameter in list(module.named_parameters()):
            setattr(
                module, name, torch.nn.Parameter(distribute_tensor(parameter.data, mesh(), [Replicate()]))
            )
    return model


def flat(**arguments):
    return FullyShardedDataParallel(net(), device_id=torch.device("cpu"), **arguments)


def with_weight(make: Callable[[torch.Tensor], torch.Tensor]):
    model = net()
    model[0].weight = torch.nn.Parameter(make(model[0].weight.detach()))
    return model


UNUSABLE = {
    "fully_shard": (sharded, "DTensor.*shard"),
    "tensor parallel": (distributed_tensors, "DTensor.*shard"),
    "FSDP": (flat, "FullyShardedDataParallel"),
    "FSDP, use_orig_params": (lambda: flat(use_orig_params=True), "FullyShardedDataParallel"),
    "meta": (lambda: net().to("meta"), "meta.*to_empty"),
    "sparse": (lambda: with_weight(torch.Tensor.to_sparse), r"'0\.weight'.*sparse"),
    "nested": (lambda: with_weight(lambda w: torch.nested.nested_tensor([w, w])), r"'0\.weight'.*nested"),
    "jagged": (
        lambda: with_weight(lambda w: torch.nested.nested_tensor([w, w], layout=torch.jagged)),
        r"'0\.weight'",
    ),
    "subclass": (lambda: with_weight(lambda w: TwoTensor(w, w.clone())), r"'0\.weight'.*TwoTensor"),
    "lazy": (lambda: torch.nn.Sequential(torch.nn.LazyLinear(4)), "forward pass"),
}


@pytest.mark.parametrize("case", UNUSABLE)
@on_ranks(2)
def test_parameters_that_cannot_be_exchanged_as_they_lie_are_refused(case):
    make, says = UNUSABLE[case]
    model = make()
    for construct in (wrap, gc.ddp_comm_hook):
        with pytest.raises(gc.ConfigError, match=says):
            construct(model)


@on_ranks(2)
def test_collectives_and_broadcasts_of_a_dtensor_are_refused():
    tensor = distribute_tensor(torch.ones(4), mesh(), [Replicate()])
    assert isinstance(tensor, DTensor)
    for call, given in (
        (gc.allreduce, tensor),
        (gc.allgather, tensor),
        (gc.broadcast_parameters, {"x": tensor}),
        (gc.broadcast_object, {"x": tensor}),
    ):
        with pytest.raises(gc.ConfigError, match="to_local"):
            call(given)


# ---------------------------------------------------------------------- gradients that are not as agreed


@pytest.mark.parametrize("case", ["bfloat16", "float64", (3, 3), (64, 16), (16, 3)])
@on_ranks(2)
def test_a_parameter_that_became_another_after_wrapping_is_refused(case):
    model, dtype = net(), torch.float32
    wrap(model, NEAREST)
    if isinstance(case, str):
        dtype = getattr(torch, case)
        model.to(dtype)
    else:
        model[2].weight.data = torch.ones(case)
        model = torch.nn.Sequential(Weighted(model[2].weight))
    with pytest.raises(gc.StateError, match=r"layer '.*' was .* when the optimizer was wrapped"):
        model(torch.ones(2, 8, dtype=dtype)).sum().backward()


class Weighted(torch.nn.Module):
    """Its weight has a gradient whatever its shape."""

    def __init__(self, weight: torch.nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight.sum() * x.sum()


REPLACED = {
    "dtype": torch.Tensor.bfloat16,
    "subclass": lambda w: TwoTensor(w, w.clone()),
    "DTensor": lambda w: distribute_tensor(w, mesh(), [Replicate()]),
}


@pytest.mark.parametrize("case", REPLACED)
@on_ranks(2)
def test_a_gradient_that_a_hook_put_there_is_refused_if_it_does_not_fit(case):
    model = net()
    weight = model[0].weight
    weight.grad_dtype = None  # torch allows gradients of any dtype then

    def replace(parameter: torch.nn.Parameter) -> None:
        parameter.grad = REPLACED[case](parameter.detach())

    weight.register_post_accumulate_grad_hook(replace)
    optimizer = wrap(model, NEAREST)
    with pytest.raises(
        gc.StateError, match=r"layer '0\.weight' was float32.* when the optimizer was wrapped"
    ):
        train(model, optimizer)
    assert_still_working()


@pytest.mark.parametrize("has_gradient", [True, False])
@on_ranks(2)
def test_a_gradient_or_a_mean_that_does_not_fit_on_one_rank_is_told_to_the_others(has_gradient):
    model = net()
    optimizer = wrap(model)
    if gc.rank() == 1:
        if has_gradient:
            trained, x = model.bfloat16(), torch.ones(2, 8, dtype=torch.bfloat16)
        else:  # the mean of a layer that only rank 0 has
            model[2].bfloat16()
            trained, x = model[0], torch.ones(2, 8)
        with pytest.raises(gc.StateError, match=r"layer '2\.(bias|weight)' was float32"):
            trained(x).sum().backward()
    else:
        told = "rank 1: StateError: layer '2\\.bias'" if has_gradient else "layer '2\\.(weight|bias)'"
        with pytest.raises(gc.TransportError, match=told + " was float32"):
            train(model, optimizer)
    assert_still_working()


@on_ranks(2)
def test_a_gradient_with_gaps_in_memory_is_exchanged_by_its_values():
    model = torch.nn.Linear(4, 2, bias=False)
    model.weight = torch.nn.Parameter(torch.ones(2, 8)[:, ::2])

    def spread(parameter: torch.nn.Parameter) -> None:
        memory = torch.full((2, 8), 100.0)
        memory[:, ::2] = parameter.grad
        parameter.grad = memory[:, ::2]

    model.weight.register_post_accumulate_grad_hook(spread)
    optimizer = wrap(model)
    model(torch.full((1, 4), 1.0 + gc.rank())).sum().backward()
    assert torch.equal(model.weight.grad, torch.full((2, 4), 1.5))
    optimizer.step()
