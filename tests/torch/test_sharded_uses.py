"""compress_fsdp beside what users of fully_shard use: checkpoints, compilation, meta devices, some of the ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from batch import on_ranks
from sharded_models import (
    CASES,
    COARSE,
    EXACT,
    Case,
    Net,
    build,
    by_blocks,
    decoded,
    go_on,
    loss_of,
    same_everywhere,
    shards,
    train,
)
from small_torch import shared_folder
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import gradcomp.torch as gc

pytestmark = pytest.mark.full

BLOCKS = CASES["by blocks"]


@on_ranks(4)
def test_a_checkpoint_holds_masters_and_loads_into_other_shards_without_gradcomp():
    ours = train(BLOCKS, 2, COARSE)
    masters = {name: p.full_tensor() for name, p in ours.model.named_parameters()}
    folder = shared_folder()
    dcp.save(get_model_state_dict(ours.model), checkpoint_id=folder)
    other = build(CASES["two meshes"], seed=1)  # two shards of each parameter instead of four
    state = get_model_state_dict(other)
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(other, state)
    for name, parameter in other.named_parameters():
        assert torch.equal(parameter.full_tensor(), masters[name]), name
    go_on(type(ours)(other, torch.optim.SGD(other.parameters(), lr=0.1)), BLOCKS, range(2, 3))


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


@on_ranks(2)
def test_compiled_blocks_train_alike():
    def compiled(model: Net, mesh: DeviceMesh) -> None:
        for block in model.blocks:
            block.compile(backend="aot_eager")
        by_blocks(model, mesh)

    plain, ours = train(BLOCKS, compress=EXACT), train(Case(shard=compiled), compress=EXACT)
    torch.testing.assert_close(torch.tensor(ours.losses), torch.tensor(plain.losses), rtol=1e-5, atol=1e-6)
    train(Case(shard=compiled), compress=COARSE)


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
