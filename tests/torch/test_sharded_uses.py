"""compress_fsdp beside what users of fully_shard use: checkpoints, compilation, adapters, meta devices, some ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from batch import on_ranks
from sharded_models import (
    CASES,
    COARSE,
    EXACT,
    SAME_NUMBERS,
    Case,
    Net,
    Trained,
    build,
    by_blocks,
    decoded,
    go_on,
    loss_of,
    same_bits,
    same_everywhere,
    shards,
    train,
)
from small_torch import shared_folder
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional

import gradcomp.torch as gc

BLOCKS = CASES["by blocks"]


def full(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.full)


# --- activation checkpointing and compilation ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "reuse"),
    [
        ("wrapped blocks", None),
        ("wrapped units", "codes"),
        ("compiled, parts unused", None),
        full("wrapped blocks", "codes"),
        full("wrapped units", None),
        full("checkpoint", "codes"),
        full("reentrant checkpoint", None),
        full("compiled blocks", "codes"),
        full("compiled and wrapped blocks", None),
    ],
)
@on_ranks(2)
def test_activation_checkpointing_and_compilation_change_no_bit(name: str, reuse: str | None):
    """Backward recomputes with the weights of forward; weights and gradients are coded with the same draws."""
    case, times = SAME_NUMBERS[name]
    torch._dynamo.reset()
    counters.clear()
    ours = train(case, 3, COARSE, reuse=reuse)
    plain = train(Case(spare=case.spare), 3, COARSE, reuse=reuse)
    assert ours.losses == plain.losses
    assert same_bits(shards(ours.model), shards(plain.model))
    calls = []
    if times:
        ours.model.blocks[0].norm.register_forward_hook(lambda *_: calls.append(1))
    else:
        assert counters["stats"]["unique_graphs"] > 0
    for trained in (ours, plain):
        loss_of(trained.model, 5).backward()
    mine, theirs = ([p.grad.to_local() for p in t.model.parameters()] for t in (ours, plain))
    assert same_bits(mine, theirs)
    assert len(calls) == times
    mine, theirs = ours.state.statistics(), plain.state.statistics()
    assert replace(mine, exchange_seconds=0) == replace(theirs, exchange_seconds=0)
    assert mine.weight_bytes + mine.gradient_bytes < 0.5 * mine.dense_bytes


# --- adapters --------------------------------------------------------------------------------------------------


class Adapted(nn.Module):
    """A frozen linear module with a trainable low-rank one added to it (LoRA)."""

    def __init__(self, base: nn.Linear, rank: int = 3) -> None:
        super().__init__()
        self.base, self.scale = base, 1.0
        self.a = nn.Parameter(0.1 * torch.randn(rank, base.in_features))
        self.b = nn.Parameter(0.1 * torch.randn(base.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.scale * (x @ self.a.T @ self.b.T)


def adapt(model: Net) -> None:
    model.requires_grad_(False)
    for block in model.blocks:
        block.expand, block.contract = Adapted(block.expand), Adapted(block.contract)


def preference(model: Net, step: int, rank: int) -> torch.Tensor:
    """The loss of direct preference optimisation: two forwards for one backward, and two without the adapters."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    good, bad = torch.randint(41, (2, 5, 7), generator=generator)

    def margin(scale: float) -> torch.Tensor:
        for module in model.modules():
            if isinstance(module, Adapted):
                module.scale = scale
        return sum(
            sign * functional.cross_entropy(model(x).mT, x, reduction="none").sum(1)
            for sign, x in ((-1, good), (1, bad))
        )

    with torch.no_grad():
        before = margin(0.0)
    return -functional.logsigmoid(0.1 * (margin(1.0) - before)).mean()


def check_preferences(learns: str, reuse: str | None) -> None:
    """Gradients are the mean over ranks of those that one process has with the decoded weights, bit for bit."""
    prepare = adapt if learns == "adapters" else Net.train
    case = Case(prepare=prepare)
    ours = train(case, 0, (COARSE[0], "none"), reuse=reuse)
    model = ours.model
    before = shards(model)
    for step in range(4):
        loss = preference(model, step, gc.rank())
        loss.backward()
        gradients = {n: p.grad.full_tensor() for n, p in model.named_parameters() if p.grad is not None}
        alone = Net()
        prepare(alone)
        for module in [*model.blocks, model]:
            module.unshard()
        alone.load_state_dict({name: p.detach() for name, p in model.named_parameters()})
        for module in [*model.blocks, model]:
            module.reshard()
        for rank in range(gc.size()):
            expected = preference(alone, step, rank)
            expected.backward()
            assert rank != gc.rank() or loss == expected
        means = {n: p.grad / gc.size() for n, p in alone.named_parameters() if p.grad is not None}
        assert gradients.keys() == means.keys()
        for name, mean in means.items():
            assert torch.equal(gradients[name], mean), name
        ours.optimizer.step()
        ours.optimizer.zero_grad()
    for old, new, parameter in zip(before, shards(model), model.parameters(), strict=True):
        assert torch.equal(old, new) != parameter.requires_grad
    counted = ours.state.statistics()
    assert (counted.reused > 0) == bool(reuse)
    if (
        learns == "adapters"
    ):  # most bytes are those of frozen weights, at 6 bits; kept codes travel once for five passes
        sent = counted.weight_bytes + counted.gradient_bytes
        assert sent < (0.1 if reuse else 0.4) * counted.dense_bytes


LEARNERS = [("adapters", "codes"), full("adapters", None), full("all weights", "codes")]


@pytest.mark.parametrize(("learns", "reuse"), LEARNERS)
@on_ranks(2)
def test_several_forward_passes_for_one_backward(learns: str, reuse: str | None):
    check_preferences(learns, reuse)


@pytest.mark.full
@pytest.mark.parametrize(("learns", "reuse"), LEARNERS)
@on_ranks(3)
def test_several_forward_passes_on_three_ranks(learns: str, reuse: str | None):
    check_preferences(learns, reuse)


# --- distributed checkpoints -----------------------------------------------------------------------------------


class App:
    """Model, optimizer and compression as one Stateful, as the documentation of DCP recommends."""

    def __init__(self, trained: Trained) -> None:
        self._trained = trained

    def state_dict(self) -> dict[str, object]:
        numbers = self._trained.state.state_dict()
        model, optimizer = get_state_dict(self._trained.model, self._trained.optimizer)
        return {"model": model, "optimizer": optimizer, "compression": numbers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        model, optimizer = state["model"], state["optimizer"]
        set_state_dict(
            self._trained.model, self._trained.optimizer, model_state_dict=model, optim_state_dict=optimizer
        )
        self._trained.state.load_state_dict(state["compression"])


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        ("AdamW", {}),
        ("SGD", {"reuse": "codes"}),  # has no state: torch makes one by a step at a rate of 0
        full("SGD", {}),
        full("AdamW", {"reuse": "codes"}),
        full("AdamW", {"redraw": "gather"}),
        full("AdamW", {"with_optimizer": False}),
        full("AdamW", {"with_optimizer": False, "redraw": "gather"}),
    ],
)
@on_ranks(2)
def test_a_run_resumed_from_a_distributed_checkpoint_goes_on_bit_for_bit(
    optimizer: str, options: dict[str, Any]
):
    """That is also so if an evaluation precedes the save and leaves the root whole; saving changes nothing."""
    case, options = CASES["by blocks"], {"optimizer": optimizer, **options}

    def half() -> Trained:
        trained = train(case, 2, COARSE, **options)
        with torch.no_grad():
            loss_of(trained.model, 9)
        if options.get("redraw") == "gather":
            trained.model.reshard()
        return trained

    whole, first, folder = half(), half(), shared_folder()
    dcp.save({"app": App(first)}, checkpoint_id=folder)
    second = train(case, 0, COARSE, **options)
    dcp.load({"app": App(second)}, checkpoint_id=folder)
    for trained in (whole, first, second):
        go_on(trained, case, range(2, 4))
    assert second.losses == first.losses[2:] == whole.losses[2:]
    assert same_bits(shards(second.model), shards(whole.model))
    assert same_bits(shards(first.model), shards(whole.model))


def full_values(trained: Trained) -> dict[str, torch.Tensor]:
    """Parameters and the states of the optimizer, whole."""
    model, optimizer = get_state_dict(trained.model, trained.optimizer)
    values = model | {
        f"{name}.{key}": value for name, kept in optimizer["state"].items() for key, value in kept.items()
    }
    return {name: v.full_tensor() if isinstance(v, DTensor) else v for name, v in values.items()}


def check_loaded(trained: Trained, folder: Path, masters: dict[str, torch.Tensor], **arguments: Any) -> None:
    """A checkpoint's values are the masters, bit for bit, and training goes on from it."""
    model, optimizer = get_state_dict(trained.model, trained.optimizer)
    dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder, **arguments)
    set_state_dict(trained.model, trained.optimizer, model_state_dict=model, optim_state_dict=optimizer)
    found = full_values(trained)
    assert found.keys() == masters.keys()
    for name, value in masters.items():
        assert torch.equal(found[name], value), name
    go_on(trained, BLOCKS, range(2, 3))
    assert trained.losses[-1] < 4.0


@pytest.mark.full
@on_ranks(4)
def test_a_checkpoint_of_two_ranks_holds_masters_and_loads_into_any_number_with_and_without_gradcomp():
    folder, masters = shared_folder(), None
    two, three = (DeviceMesh("cpu", torch.arange(n)) for n in (2, 3))  # made by all ranks
    if gc.rank() < 2:
        ours = train(Case(mesh=lambda: two), 2, COARSE, process_set=gc.ProcessSet([0, 1]))
        with torch.no_grad():
            loss_of(ours.model, 9)  # the root stays whole
        masters = full_values(ours)
        for (name, _), own in zip(
            ours.model.named_parameters(), ours.optimizer.param_groups[0]["params"], strict=True
        ):
            assert torch.equal(masters[name], own.full_tensor()), name
        model, optimizer = get_state_dict(ours.model, ours.optimizer)
        dcp.save(
            {"model": model, "optimizer": optimizer}, checkpoint_id=folder, process_group=two.get_group()
        )
        for module in [*ours.model.blocks, ours.model]:
            module.unshard()
        assert not torch.equal(ours.model.head.weight, masters["head.weight"]), (
            "ranks compute with other weights"
        )
    masters = gc.broadcast_object(masters)
    if gc.rank() < 3:
        theirs = train(Case(mesh=lambda: three), 0, COARSE, process_set=gc.ProcessSet([0, 1, 2]))
        check_loaded(theirs, folder, masters, process_group=three.get_group())
    check_loaded(train(BLOCKS, 0, COARSE), folder, masters)
    check_loaded(train(CASES["two meshes"], 0), folder, masters)
    model = Net()
    alone = Trained(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    check_loaded(alone, folder, masters, no_dist=True)


# --- the rest --------------------------------------------------------------------------------------------------


@pytest.mark.full
@on_ranks(4)
def test_some_ranks_train_on_their_own():
    members = [0, 2, 3]
    mesh = DeviceMesh("cpu", torch.tensor(members))
    if gc.rank() in members:
        model = Net()
        by_blocks(model, mesh)
        state = gc.compress_fsdp(model, *COARSE, process_set=gc.ProcessSet(members))
        loss_of(model, 0).backward()
        assert state.statistics().scatters == 3
    dist.barrier()


@pytest.mark.full
@on_ranks(2)
def test_metrics_are_means_of_the_optimizers_steps():
    exact = train(BLOCKS, 3, EXACT).state
    assert exact.compression_metrics()["gradcomp/ratio"] == pytest.approx(1.0, rel=0.1), (
        "headers alone are more"
    )
    trained = train(BLOCKS, 2, COARSE, reuse="codes")
    before, counted = trained.state.compression_metrics(), trained.state.statistics()
    assert before["gradcomp/steps"] == 2
    sent = counted.weight_bytes + counted.gradient_bytes
    assert before["gradcomp/sent_mb"] == pytest.approx(sent / 2e6)
    assert before["gradcomp/ratio"] == pytest.approx(counted.dense_bytes / sent)
    assert before["gradcomp/ratio"] > 2
    go_on(trained, BLOCKS, range(2, 3))
    after, now = trained.state.compression_metrics(), trained.state.statistics()
    assert after["gradcomp/sent_mb"] == pytest.approx((now.weight_bytes + now.gradient_bytes - sent) / 1e6)
    assert after["gradcomp/step_ms"] > after["gradcomp/exposed_ms"] > 0


@pytest.mark.full
@on_ranks(2)
def test_a_model_made_on_the_meta_device_gets_its_values_afterwards():
    with torch.device("meta"):
        model = Net()
    by_blocks(model, init_device_mesh("cpu", (2,)))
    state = gc.compress_fsdp(model, *EXACT)
    model.to_empty(device="cpu")
    source = build(BLOCKS)
    for mine, theirs in zip(model.parameters(), source.parameters(), strict=True):
        mine.to_local().detach().copy_(theirs.to_local().detach())
    assert loss_of(model, 0).item() == loss_of(source, 0).item()
    assert state.statistics().gathers == 3


@pytest.mark.full
@on_ranks(2)
def test_steps_without_an_optimizer_that_is_known_draw_anew():
    trained = train(BLOCKS, 1, COARSE, with_optimizer=False)
    first = decoded(trained.model)
    assert decoded(trained.model) == first
    before = shards(trained.model)
    with torch.no_grad():
        for parameter in trained.model.parameters():
            parameter.add_(0)  # as an optimizer's step with a learning rate of 0
    assert all(torch.equal(a, b) for a, b in zip(shards(trained.model), before, strict=True))
    assert decoded(trained.model) != first
    assert same_everywhere(decoded(trained.model))
