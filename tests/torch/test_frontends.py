"""``DistributedOptimizer`` and ``ddp_comm_hook`` keep the contract of all frontends."""

from __future__ import annotations

from typing import Any

import frontend_contract as contract
import pytest
import torch
from batch import on_ranks
from torch.nn.parallel import DistributedDataParallel

import gradcomp.torch as gc


class Model(torch.nn.Module):
    """Its loss has the gradients that it is given."""

    def __init__(self) -> None:
        super().__init__()
        first, second = contract.SHAPES
        self.first = torch.nn.Parameter(torch.zeros(first))
        self.second = torch.nn.Parameter(torch.zeros(second))

    def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return (self.first * first).sum() + (self.second * second).sum()


class Torch(contract.FrontendContract):
    """What both have in common."""

    gc = gc

    def make_model(self) -> None:
        self.model = self.trained = Model()

    def backward(self, passes: tuple[contract.Arrays, ...]) -> None:
        for gradients in passes:
            self.trained(*map(torch.from_numpy, gradients)).backward()

    def means(self) -> contract.Arrays:
        return [parameter.grad.numpy().copy() for parameter in self.model.parameters()]


class Optimizer(Torch):
    name = "optimizer"
    takes = (
        "op", "backward_passes_per_step", "gradient_predivide_factor", "groups", "sparse_as_dense", "process_set",
        "finish", "grad_scaler", "reduction", "on_skip", "residuals", "layers",
    )  # fmt: skip
    compared = set(contract.ALIKE)

    def wrap(self, compression: Any = "none", **arguments: Any) -> None:
        sgd = torch.optim.SGD(self.model.parameters(), lr=0.0)
        self.state = gc.DistributedOptimizer(sgd, self.model.named_parameters(), compression, **arguments)

    def step(self, *passes: contract.Arrays) -> None:
        self.state.zero_grad()
        self.backward(passes)
        self.state.step()


class Hook(Torch):
    name = "hook"
    takes = ("grad_scaler", "on_skip", "layers")
    only_default = ("on_skip",)

    def wrap(self, compression: Any = "none", **arguments: Any) -> None:
        self.state, hook = gc.ddp_comm_hook(self.model, compression, **arguments)
        self.trained = DistributedDataParallel(self.model)
        self.trained.register_comm_hook(self.state, hook)

    def step(self, *passes: contract.Arrays) -> None:
        self.trained.zero_grad()
        self.backward(passes)


FRONTENDS = {frontend.name: frontend for frontend in (Optimizer, Hook)}


@pytest.mark.parametrize(("frontend", "check", "case"), contract.cases(*FRONTENDS.values()))
@on_ranks(2)
def test_the_frontend_keeps_the_contract(frontend, check, case):
    contract.check(FRONTENDS[frontend](), check, case)
