"""compress_fsdp(replicas=): hybrid sharding, beside torch's own on a mesh of two dimensions."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import preloaded
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from batch import on_ranks
from documented import ROOT, blocks
from launching import run_ranks
from sharded_models import (
    CASES,
    SAME_NUMBERS,
    WIDTH,
    Case,
    Net,
    Trained,
    build,
    by_blocks,
    go_on,
    loss_of,
    shards,
)
from small_torch import shared_folder
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import gradcomp.torch as gc

NEAREST = gc.Quantize(bits=4, bucket_size=64, rounding="nearest")
BLOCKS = CASES["by blocks"]
PAGE = ROOT / "docs/sharded.md"


def mesh_of(replicas: int) -> DeviceMesh:
    return init_device_mesh("cpu", (replicas, gc.size() // replicas), mesh_dim_names=("replicas", "shards"))


def plain(case: Case, replicas: int, rate: float = 0.5, momentum: float = 0.0) -> Trained:
    """Torch's own hybrid sharding."""
    model = build(replace(case, mesh=lambda: mesh_of(replicas)))
    return Trained(model, optimizer_of(model, rate, momentum))


def hybrid(
    case: Case,
    compression: Any,
    replicas: int,
    rate: float = 0.5,
    momentum: float = 0.0,
    *more: Any,
    **options: Any,
) -> Trained:
    """The same model under compress_fsdp, with other values on the other replicas."""
    mesh = mesh_of(replicas)
    model = build(replace(case, mesh=lambda: mesh["shards"]), seed=mesh["replicas"].get_local_rank())
    optimizer = optimizer_of(model, rate, momentum)
    group = (compression, mesh["replicas"], *more)
    state = gc.compress_fsdp(model, "none", "none", optimizer=optimizer, replicas=group, **options)
    return Trained(model, optimizer, state)


def optimizer_of(model: nn.Module, rate: float, momentum: float = 0.0) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=rate, momentum=momentum)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.grad.to_local().clone() for n, p in model.named_parameters() if p.grad is not None}


def of_all_ranks(value: Any) -> list[Any]:
    found: list[Any] = [None] * gc.size()
    dist.all_gather_object(found, value)
    return found


def assert_replicas_are_equal(model: nn.Module, replicas: int) -> None:
    digest = hashlib.sha256(b"".join(shard.numpy().tobytes() for shard in shards(model))).hexdigest()
    by_rank = of_all_ranks(digest)
    size = gc.size() // replicas
    assert all(by_rank[rank] == by_rank[rank % size] for rank in range(gc.size()))


def narrow(model: Net, mesh: Any) -> None:
    """Some ranks hold no shard of a parameter with one row."""
    model.spare = nn.Sequential(nn.Linear(WIDTH, 1), nn.Linear(1, WIDTH))
    by_blocks(model, mesh)


NARROW = Case(shard=narrow)
EXACT = CASES | {name: case for name, (case, _) in SAME_NUMBERS.items()} | {"empty shards": NARROW}
MORE = (
    "as a whole", "modules together, in another order", "tied", "unused", "not resharded",
    "micro-batches, reduced once", "clipped", "checkpoint", "wrapped units",
)  # fmt: skip
ALIKE = ["empty shards", "columns", "frozen", "bfloat16 weights", "micro-batches"]


@pytest.mark.parametrize("name", [*ALIKE, *(pytest.param(name, marks=pytest.mark.full) for name in MORE)])
@on_ranks(4)
def test_uncompressed_means_are_those_of_torchs_own_hybrid_sharding(name: str):
    theirs, ours = plain(EXACT[name], 2), hybrid(EXACT[name], "none", 2)
    for trained in (theirs, ours):
        go_on(trained, EXACT[name], range(3))
    assert ours.losses == theirs.losses
    assert all(torch.equal(a, b) for a, b in zip(shards(ours.model), shards(theirs.model), strict=True))


@pytest.mark.parametrize("replicas", [1, 2])
@on_ranks(2)
def test_one_replica_and_one_shard_are_hybrid_sharding_too(replicas: int):
    theirs, ours = plain(BLOCKS, replicas), hybrid(BLOCKS, "none", replicas)
    for trained in (theirs, ours):
        go_on(trained, BLOCKS, range(3))
    assert all(torch.equal(a, b) for a, b in zip(shards(ours.model), shards(theirs.model), strict=True))
    assert ours.state.statistics().gathers == (0 if replicas == 2 else 15)


@on_ranks(4)
def test_a_mean_that_is_deferred_is_that_of_all_micro_batches():
    """Until then gradients are those of before, as under torch's own hybrid sharding."""
    theirs, ours = plain(BLOCKS, 2), hybrid(BLOCKS, "none", 2)
    found = []
    for trained in (theirs, ours):
        for micro, together in enumerate((True, False, False, True)):
            trained.model.set_requires_all_reduce(together)
            loss_of(trained.model, 0, micro).backward()
            found.append(gradients(trained.model))
    for mine, torchs in zip(found[4:], found[:4], strict=True):
        assert mine.keys() == torchs.keys()
        for name, gradient in mine.items():
            torch.testing.assert_close(gradient, torchs[name], rtol=1e-6, atol=1e-8)
    assert ours.state.replicas.statistics().steps == 2


#: By string form, since the names of cases go to the ranks.
LOSSY = ["quantize:bits=4,bucket_size=64,rounding=nearest", "topk:density=0.05", "powersgd:rank=2"]


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("compression", LOSSY)
@on_ranks(4)
def test_what_was_not_applied_is_in_the_residuals(compression: str, passes: int):
    """sum of true means = sum of applied means + mean over replicas of residuals + server-side errors."""
    theirs, ours = plain(NARROW, 2, rate=0.0), hybrid(NARROW, compression, 2, rate=0.0)
    missing: dict[str, torch.Tensor] = {}
    for step in range(4):
        for trained, sign in ((theirs, 1.0), (ours, -1.0)):
            for micro in range(passes):
                loss_of(trained.model, step, micro).backward()
            for name, gradient in gradients(trained.model).items():
                missing[name] = missing.get(name, torch.zeros_like(gradient)) + sign * gradient
            trained.optimizer.step()
            trained.optimizer.zero_grad()
    snapshot = ours.state.replicas.checkpoint_manager.snapshot()
    kept = {name: torch.from_numpy(value) / 2 for name, value in snapshot.first.items()}
    at = 0
    for row in snapshot.ranges:
        name = list(snapshot.shared.layers)[row.layer]
        kept[name].view(-1)[row.start : row.end] += torch.from_numpy(snapshot.second[at : at + row.length])
        at += row.length
    by_rank = of_all_ranks(kept)
    assert any(value.abs().max() > 0 for value in kept.values() if value.numel())
    for name, expected in missing.items():
        same = [each[name] for rank, each in enumerate(by_rank) if rank % 2 == gc.rank() % 2 and name in each]
        torch.testing.assert_close(sum(same, torch.zeros_like(expected)), expected, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("compression", [*LOSSY, "quantize:bits=4", "by layer"])
@on_ranks(4)
def test_replicas_stay_equal_bit_for_bit(compression: str):
    chosen: Any = compression
    if compression == "by layer":
        chosen = gc.Policy(NEAREST, overrides={"head.*": "none", "embedding.*": "topk:density=0.1"})
    ours = hybrid(replace(NARROW, clip=True), chosen, 2)
    go_on(ours, NARROW, range(5))
    assert_replicas_are_equal(ours.model, 2)
    assert ours.state.replicas.statistics().dense_bytes > ours.state.replicas.statistics().wire_bytes


@on_ranks(3)
def test_three_replicas_of_one_shard():
    theirs, ours = plain(BLOCKS, 3), hybrid(BLOCKS, "none", 3)
    for trained in (theirs, ours):
        go_on(trained, BLOCKS, range(3))
    torch.testing.assert_close(shards(ours.model), shards(theirs.model), rtol=1e-4, atol=1e-6)
    ours = hybrid(BLOCKS, NEAREST, 3)
    go_on(ours, BLOCKS, range(3))
    assert_replicas_are_equal(ours.model, 3)


@on_ranks(4)
def test_weights_and_gradients_may_be_quantised_within_a_replica():
    model, mesh = one_dimension()
    optimizer = optimizer_of(model, 0.5)
    coarse = gc.Quantize(bits=6, bucket_size=64)
    state = gc.compress_fsdp(model, coarse, coarse, optimizer=optimizer, replicas=(NEAREST, mesh["replicas"]))
    go_on(Trained(model, optimizer, state), BLOCKS, range(4))
    assert_replicas_are_equal(model, 2)
    metrics = state.compression_metrics()
    counted = state.statistics()
    assert counted.replica_bytes == state.replicas.statistics().wire_bytes > 0
    sent = counted.weight_bytes + counted.gradient_bytes + counted.replica_bytes
    assert metrics["gradcomp/sent_mb"] == pytest.approx(sent / 4e6)


@on_ranks(4)
def test_a_controller_chooses_for_each_rank_shards_alike_on_all_replicas():
    every_matrix = gc.Policy(NEAREST, filter=gc.Filter(min_elements=0))
    ours = hybrid(BLOCKS, every_matrix, 2, 0.5, 0.0, gc.LGreCo(4, alpha=3))
    go_on(ours, BLOCKS, range(12))
    assert_replicas_are_equal(ours.model, 2)
    pipeline = ours.state.replicas.exchanger.pipeline
    assert pipeline.plan.version > 0
    plans = of_all_ranks(pipeline.plan.to_json())
    assert plans[0] == plans[2]
    assert plans[1] == plans[3]


@on_ranks(4)
def test_a_gradient_of_some_replicas_alone_counts_as_zero_on_the_others():
    ours = hybrid(BLOCKS, "none", 2)
    first = gc.rank() < 2
    ours.model.use_spare = first
    loss_of(ours.model, 0).backward()
    by_rank = of_all_ranks(gradients(ours.model)["spare.weight"])
    assert torch.equal(by_rank[0], by_rank[2])
    assert by_rank[0].abs().max() > 0
    ours.optimizer.step()
    go_on(ours, BLOCKS, range(1, 3))
    assert_replicas_are_equal(ours.model, 2)


@on_ranks(4)
def test_an_infinity_on_one_rank_skips_the_step_everywhere_and_keeps_the_residuals():
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    ours = hybrid(BLOCKS, NEAREST, 2, grad_scaler=scaler)
    go_on(ours, BLOCKS, range(1))
    before, kept = shards(ours.model), residuals(ours)
    loss = scaler.scale(loss_of(ours.model, 1))
    (loss * float("inf") if gc.rank() == 3 else loss).backward()
    scaler.unscale_(ours.optimizer)
    scaler.step(ours.optimizer)
    scaler.update()
    ours.optimizer.zero_grad()
    assert scaler.get_scale() < 4.0
    assert all(torch.equal(a, b) for a, b in zip(shards(ours.model), before, strict=True))
    assert all(torch.equal(value, kept[name]) for name, value in residuals(ours).items())
    go_on(ours, BLOCKS, range(2, 4))
    assert_replicas_are_equal(ours.model, 2)


def residuals(trained: Trained) -> dict[str, torch.Tensor]:
    first = trained.state.replicas.checkpoint_manager.snapshot().first
    return {name: torch.from_numpy(value) for name, value in first.items()}


# --- saved and resumed -----------------------------------------------------------------------------------------


def parts(trained: Trained) -> dict[str, Any]:
    return {"model": trained.model.state_dict(), "compression": trained.state.state_dict()}


@pytest.mark.parametrize("compression", [*LOSSY, "ef21[topk:density=0.1]"])
@on_ranks(4)
def test_a_resumed_run_goes_on_bit_for_bit(compression: str):
    case = NARROW
    whole = hybrid(case, compression, 2)
    go_on(whole, case, range(3))
    folder = shared_folder()
    dcp.save(parts(whole), checkpoint_id=folder)
    go_on(whole, case, range(3, 6))
    second = hybrid(case, compression, 2)
    state = parts(second)
    dcp.load(state, checkpoint_id=folder)
    second.model.load_state_dict(state["model"])
    second.state.load_state_dict(state["compression"])
    go_on(second, case, range(3, 6))
    assert second.losses == whole.losses[3:]
    assert all(torch.equal(a, b) for a, b in zip(shards(second.model), shards(whole.model), strict=True))


@pytest.mark.parametrize("compression", LOSSY)
@on_ranks(4)
def test_residuals_are_cut_into_other_shards(compression: str):
    """Two shards of two replicas become one: r' = r + 2 s, for residuals r and server-side errors s."""
    ours = hybrid(NARROW, compression, 2)
    go_on(ours, NARROW, range(3))
    folder, saved = shared_folder(), parts(ours)
    dcp.save(saved, checkpoint_id=folder)
    of_two = saved["compression"]["replicas"]["tensors"]
    number = str(gc.rank() // 2)
    expected = {
        name: value.full_tensor() + 2 * of_two["server_error"][number][name].full_tensor()
        for name, value in of_two["residual"][number].items()
    }
    members = [0, 2]
    group = dist.new_group(members)
    singles = [dist.new_group([rank]) for rank in range(4)]
    if gc.rank() in members:
        mesh = DeviceMesh.from_group(singles[gc.rank()], "cpu")
        model = build(replace(NARROW, mesh=lambda: mesh))
        state = gc.compress_fsdp(
            model, "none", "none", process_set=gc.ProcessSet(members), replicas=(compression, group)
        )
        other = Trained(model, optimizer_of(model, 0.5), state)
        loaded = parts(other)
        dcp.load(loaded, checkpoint_id=folder, process_group=group)
        model.load_state_dict(loaded["model"])
        state.load_state_dict(loaded["compression"])
        assert state.replicas.checkpoint_manager.step == 3
        found = residuals(other)
        assert found
        for name, value in found.items():
            assert torch.equal(value, expected[name]), name
        loss_of(model, 3).backward()
    dist.barrier()


@on_ranks(4)
def test_states_that_do_not_fit_are_refused():
    ours = hybrid(BLOCKS, NEAREST, 2)
    state = ours.state.state_dict()
    for bad in (None, {}, state["replicas"] | {"parts": "[]"}, state["replicas"] | {"tensors": {}}):
        with pytest.raises(gc.StateError, match="no state of an exchange between replicas"):
            ours.state.load_state_dict(state | {"replicas": bad})
    four = hybrid(BLOCKS, NEAREST, 4)
    with pytest.raises(gc.StateError, match="of 2 replicas, this job has 4"):
        four.state.load_state_dict(state | {"units": four.state.state_dict()["units"]})


@on_ranks(4)
def test_the_examples_of_the_page_run():
    make, save = (code for heading, code in blocks(PAGE) if heading == "Hybrid sharding")
    folder, program = shared_folder(), {"model": Net()}
    exec("import torch\nimport gradcomp.torch as gc\nfrom torch.distributed.fsdp import fully_shard", program)
    exec("from torch.distributed.device_mesh import init_device_mesh", program)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(gc, "local_size", lambda: 2)  # as on two hosts
        exec(make, program)
    trained = Trained(program["model"], program["optimizer"], program["state"])
    go_on(trained, BLOCKS, range(2))
    before = residuals(trained)
    exec(save.replace('"checkpoint"', repr(str(folder))), program)
    assert all(torch.equal(value, before[name]) for name, value in residuals(trained).items())
    go_on(trained, BLOCKS, range(2, 3))
    assert_replicas_are_equal(trained.model, 2)


# --- what is refused -------------------------------------------------------------------------------------------


def one_dimension() -> tuple[nn.Module, DeviceMesh]:
    mesh = mesh_of(2)
    return build(replace(BLOCKS, mesh=lambda: mesh["shards"])), mesh


def on_meta() -> tuple[nn.Module, DeviceMesh]:
    mesh = mesh_of(2)
    with torch.device("meta"):
        model = Net()
    by_blocks(model, mesh["shards"])
    return model, mesh


def on_two_dimensions() -> tuple[nn.Module, DeviceMesh]:
    mesh = mesh_of(2)
    return build(replace(BLOCKS, mesh=lambda: mesh)), mesh


REFUSED = {
    "a mesh of two dimensions": (
        on_two_dimensions,
        lambda mesh: ("none", mesh["replicas"]),
        r'mesh=mesh\["shards"\]',
    ),
    "no pair": (one_dimension, lambda mesh: "none", r"\(compression, group\)"),
    "the shards themselves": (
        one_dimension,
        lambda mesh: ("none", mesh["shards"]),
        "the other dimension of the mesh",
    ),
    "all ranks": (one_dimension, lambda mesh: ("none", None), "different shards of one replica"),
    "no group": (one_dimension, lambda mesh: ("none", "replicas"), "process_set must be"),
    "no compressor": (one_dimension, lambda mesh: ("nothing", mesh["replicas"]), "nothing"),
    "no controller": (one_dimension, lambda mesh: ("none", mesh["replicas"], 3), "controller must be"),
    "the learning rate": (
        one_dimension,
        lambda mesh: ("error_feedback[quantize:bits=4]:follow_rate=true", mesh["replicas"]),
        "give optimizer=",
    ),
    "values that are not there": (on_meta, lambda mesh: ("none", mesh["replicas"]), "meta device"),
}


@pytest.mark.parametrize("case", REFUSED)
@on_ranks(4)
def test_what_cannot_work_is_refused_on_every_rank(case: str):
    make, replicas, says = REFUSED[case]
    model, mesh = make()
    with pytest.raises(gc.ConfigError, match=says):
        gc.compress_fsdp(model, replicas=replicas(mesh))


@on_ranks(4)
def test_ranks_that_ask_for_different_things_all_raise():
    model, mesh = one_dimension()
    bits = 4 if gc.rank() < 2 else 8
    with pytest.raises(gc.PlanMismatchError, match="replicas"):
        gc.compress_fsdp(model, replicas=(gc.Quantize(bits=bits), mesh["replicas"]))


@on_ranks(4)
def test_replicas_of_other_shards_are_no_replicas():
    model = nn.Linear(8, 8)
    fully_shard(model, mesh=mesh_of(2)["shards"])
    across = gc.ProcessSet([0, 3] if gc.rank() in (0, 3) else [1, 2])
    with pytest.raises(gc.PlanMismatchError, match="shard"):
        gc.compress_fsdp(model, replicas=("none", across))


def _one_replica_stops() -> None:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import gradcomp.torch as gc

    gc.init(timeout_seconds=3, log_level="error")
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards"))
    model = torch.nn.Linear(64, 64)
    fully_shard(model, mesh=mesh["shards"])
    gc.compress_fsdp(model, replicas=("quantize:bits=4", mesh["replicas"]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        for step in range(4):
            if gc.rank() == 1 and step == 2:
                break
            model(torch.ones(1, 64)).sum().backward()
            optimizer.step()
    except gc.TransportError as error:
        print(error)


def test_a_replica_that_stops_is_named():
    ranks = run_ranks(_one_replica_stops, 2, imported=preloaded.TORCH)
    assert "rank 1" in ranks[0].stdout
