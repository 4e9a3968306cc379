"""What compress_fsdp refuses, on every rank; and where parameters lie in what fully_shard hands over."""

from __future__ import annotations

import preloaded
import pytest
import torch
from batch import on_ranks
from hypothesis import given
from hypothesis import strategies as st
from launching import run_ranks
from sharded_models import CASES, EXACT, Case, Trained, build, go_on, loss_of, train, two_hosts
from tiers import examples
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import gradcomp.torch as gc
from gradcomp.torch.sharded.exchange import ReduceGradients
from gradcomp.torch.sharded.units import Sharded, find_units

BLOCKS = CASES["by blocks"]


def blocks() -> nn.Module:
    return build(BLOCKS)


def compressed(part: bool = False) -> nn.Module:
    model = blocks()
    gc.compress_fsdp(model.blocks[0] if part else model)
    return model


def beside_tensor_parallelism() -> nn.Module:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    model = nn.Sequential(nn.Linear(16, 16))
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    return model


REFUSED = {
    "not sharded": (lambda: nn.Linear(3, 4), {}, "fully_shard on it first"),
    "FSDP1": (
        lambda: FullyShardedDataParallel(nn.Linear(8, 4), device_id=torch.device("cpu")),
        {},
        "FSDP1.*fully_shard instead",
    ),
    "compressed before": (compressed, {}, "before"),
    "compressed in part": (lambda: compressed(part=True), {}, "a part of it"),
    "part of compressed": (lambda: compressed().blocks[0], {}, "compress_fsdp was called"),
    "tensor parallelism": (beside_tensor_parallelism, {}, "'0.weight'.*tensor.*tensor parallelism"),
    "auto": (blocks, {"weights": "auto"}, "name a compressor"),
    "reuse": (blocks, {"reuse": "weights"}, "reuse must be"),
    "learned without an optimizer": (blocks, {"learn_levels": (400,)}, "pass optimizer="),
    "learned at no steps": (blocks, {"learn_levels": 400}, "ascending numbers of steps"),
    "learned twice at a step": (blocks, {"learn_levels": (400, 400)}, "ascending numbers of steps"),
    "redraw": (blocks, {"redraw": "never"}, "redraw must be"),
    "both": (blocks, {"reuse": "codes", "redraw": "gather"}, "choose one"),
    "optimizer": (blocks, {"optimizer": "adam"}, "torch.optim.Optimizer, got str"),
    "levels": (blocks, {"hierarchical": "both"}, "hierarchical must be"),
    "votes in two levels": (
        blocks,
        {"gradients": gc.Signum(momentum=0.0), "hierarchical": True},
        "votes of single ranks",
    ),
    "scaler": (blocks, {"grad_scaler": 4.0}, "torch.amp.GradScaler"),
    "residuals": (blocks, {"gradients": gc.Quantize(bits=4, rounding="nearest")}, "feedback=False"),
    "weights by TopK": (blocks, {"weights": gc.TopK(density=0.1)}, "no codes"),
    "gradients by PowerSGD": (blocks, {"gradients": gc.PowerSGD(rank=2)}, "no codes"),
}


@pytest.mark.parametrize("case", REFUSED)
@on_ranks(2)
def test_what_cannot_work_is_refused_on_every_rank(case: str):
    make, arguments, says = REFUSED[case]
    model = make()
    with pytest.raises(gc.StateError if "compressed" in case else gc.ConfigError, match=says):
        gc.compress_fsdp(model, **arguments)


def _one_does_not_call() -> None:
    import os

    import torch
    from torch.distributed.fsdp import fully_shard

    import gradcomp.torch as gc

    gc.init(timeout_seconds=3, log_level="error")
    model = torch.nn.Linear(64, 64)
    fully_shard(model)
    try:
        if gc.rank() != int(os.environ["MISSING"]):
            gc.compress_fsdp(model)
        model(torch.ones(1, 64))
    except gc.TransportError as error:
        print(error)


@pytest.mark.parametrize("missing", [1, pytest.param(0, marks=pytest.mark.full)])
def test_a_rank_that_never_calls_and_those_that_do_end_in_typed_errors(missing: int):
    """Its own all-gather is torch's, which nobody joins; rank 0 has the store in which ranks look each other up."""
    ranks = run_ranks(_one_does_not_call, 2, env={"MISSING": str(missing)}, imported=preloaded.TORCH)
    calls = 1 - missing
    assert f"rank {calls} waits to compress its sharded model: rank {missing}" in ranks[calls].stdout
    assert "torch's all-gather of a sharded model failed" in ranks[missing].stdout
    assert f"rank {calls} waits to compress its sharded model" in ranks[missing].stdout


def _one_is_lost_between_hosts() -> None:
    import os

    import torch
    from torch.distributed.fsdp import fully_shard

    import gradcomp.torch as gc
    from gradcomp.reduce.host_halves import HostReduceScatter

    gc.init(timeout_seconds=20, log_level="error")
    model = torch.nn.Linear(64, 64)
    fully_shard(model)
    gc.compress_fsdp(model, hierarchical=True)
    if gc.rank() == 1:  # after its last message inside its host
        HostReduceScatter._add = lambda *_: os._exit(3)
    try:
        model(torch.ones(1, 64)).sum().backward()
    except gc.TransportError as error:
        print("TransportError", error)


def test_a_rank_that_is_lost_between_the_two_levels_is_a_typed_error_on_all_others():
    ranks = run_ranks(_one_is_lost_between_hosts, 3, env=two_hosts(0, 0, 1), imported=preloaded.TORCH)
    assert ranks[1].returncode == 3
    for rank in (0, 2):
        assert "TransportError" in ranks[rank].stdout, ranks[rank].stderr[-2000:]


@on_ranks(2)
def test_if_one_rank_cannot_take_part_all_raise():
    model = build(BLOCKS)
    own = nn.Linear(3, 4) if gc.rank() == 1 else model
    expected = gc.ConfigError if gc.rank() == 1 else gc.PlanMismatchError
    with pytest.raises(expected, match="fully_shard on it first"):
        gc.compress_fsdp(own)


DIFFERENT = {
    "weights": ("weights", [gc.Quantize(bits=4), gc.Quantize(bits=8)]),
    "gradients": ("gradients", [gc.Quantize(bits=4), gc.Quantize(bits=8)]),
    "reuse": ("reuse", ["codes", None]),
    "hierarchical": ("hierarchical", [True, None]),
    "scale of the loss": ("grad_scaler", [torch.amp.GradScaler("cpu", init_scale=s) for s in (4.0, 8.0)]),
    "units": (None, ["by blocks", "as a whole"]),
}


@pytest.mark.parametrize("what", DIFFERENT)
@on_ranks(2)
def test_settings_and_models_that_differ_are_an_error_on_every_rank(what: str):
    argument, values = DIFFERENT[what]
    value = values[gc.rank()]
    model, arguments = (build(CASES[value]), {}) if argument is None else (blocks(), {argument: value})
    with pytest.raises(gc.PlanMismatchError, match=what):
        gc.compress_fsdp(model, **arguments)


@on_ranks(2)
def test_an_optimizer_of_sharded_parameters_names_what_to_call():
    model = build(BLOCKS)
    with pytest.raises(gc.ConfigError, match=r"compress_fsdp\(model\)"):
        gc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())


def predicts(trained: Trained) -> bool:
    """Whether this rank knows which collective comes next."""
    (exchanger,) = trained.state._exchangers.values()
    return exchanger._order.predicted is not None


@pytest.mark.full
@pytest.mark.parametrize("steps", [1, 4])
@on_ranks(2, "apart")
def test_gradients_that_only_some_ranks_have_are_an_error_on_every_rank(steps: int):
    trained = train(BLOCKS, steps, EXACT)
    assert predicts(trained) == (steps > 1)
    trained.model.use_spare = gc.rank() == 0
    with pytest.raises(gc.PlanMismatchError, match="spare"):
        loss_of(trained.model, 1).backward()


#: What rank 1 does where rank 0 steps once and clears its gradients, and how the two are named then.
OTHERWISE = {
    "skips": (lambda optimizer: optimizer.zero_grad(), "threw the means away"),
    "keeps its gradients": (lambda optimizer: None, "went on accumulating"),
    "steps twice": (
        lambda optimizer: (optimizer.step(), optimizer.step(), optimizer.zero_grad()),
        "stepped more than once",
    ),
}


@pytest.mark.parametrize("steps", [1, pytest.param(5, id="predicted")])
@pytest.mark.parametrize("what", OTHERWISE)
@on_ranks(2, "steps")
def test_a_rank_that_steps_otherwise_is_an_error_on_every_rank_that_names_it(what: str, steps: int):
    does, named = OTHERWISE[what]
    for with_optimizer, reuse in ((True, None), (False, None), (True, "codes")):
        trained = train(BLOCKS, steps, with_optimizer=with_optimizer, reuse=reuse, compress=EXACT)
        loss_of(trained.model, steps).backward()
        if gc.rank() == 1:
            does(trained.optimizer)
        else:
            trained.optimizer.step()
            trained.optimizer.zero_grad()
        for _ in range(2):  # and it stays one
            told = rf"different ways: rank 0 applied the means \(step\(\)\); rank 1 {named}"
            with pytest.raises(gc.StateError, match=rf"before the all_gather of .* {told}"):
                loss_of(trained.model, steps + 1)


@pytest.mark.parametrize("reuse", [None, "codes"])
@on_ranks(2, "steps")
def test_a_learning_rate_of_ones_own_is_named_in_the_next_collective(reuse: str | None):
    trained = train(BLOCKS, 5, reuse=reuse, compress=EXACT)
    if gc.rank() == 1:
        trained.optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(gc.StateError, match=r"learning rate 0\.5 on rank 1, 0\.01 on rank 0"):
        loss_of(trained.model, 5)


@on_ranks(2, "steps")
def test_weights_that_one_rank_decodes_otherwise_are_noticed_in_the_next_collective():
    """As from a message that was altered before its checksum: shards cannot be compared, what is gathered can."""
    trained = train(BLOCKS, 5, EXACT)
    decoded = trained.state._settings.decoded
    assert all(decoded.values())
    if gc.rank() == 1:
        decoded.update(dict.fromkeys(decoded, 1))
    with pytest.raises(
        gc.StateError, match="what rank 1 decoded in the last exchange is not what rank 0 did"
    ):
        loss_of(trained.model, 5)


@on_ranks(2, "steps")
def test_gradients_that_one_rank_drops_between_two_micro_batches_are_an_error_on_every_rank():
    trained = train(BLOCKS, 1, EXACT)
    loss_of(trained.model, 1).backward()
    if gc.rank() == 1:
        trained.optimizer.zero_grad()
    with pytest.raises(gc.StateError, match=r"rank 1 threw the means away .*; rank 0 went on accumulating"):
        loss_of(trained.model, 1, 1)


@on_ranks(2, "steps")
def test_ranks_that_do_the_same_may_step_as_they_like():
    """Evaluate before a step, step twice, skip one, by two optimizers, on a model that was on the meta device."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40))
    for part in (*model, model):
        fully_shard(part)
    gc.compress_fsdp(model)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    optimizers = [torch.optim.SGD(part.parameters(), lr=1e-4) for part in model]
    for step in range(8):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for _ in range(1 + step % 2):
            model(torch.ones(2, 40)).sum().backward()
        with torch.no_grad():
            model(torch.ones(2, 40))
        for optimizer in optimizers[: step % 3] * (1 + step // 6):
            optimizer.step()
    loss = model(torch.ones(2, 40)).sum()
    if gc.rank() == 1:
        optimizers[1].step()
    with pytest.raises(gc.StateError, match=r"rank 1 applied the means .*; rank 0 went on"):
        loss.backward()


@on_ranks(2)
def test_ranks_may_use_different_parameters_where_zeros_stand_for_the_others():
    trained = train(BLOCKS, 1, EXACT)
    trained.model.set_reduce_scatter_unused_params(True)
    trained.model.use_spare = gc.rank() == 0
    loss_of(trained.model, 1).backward()
    gradient = trained.model.spare.weight.grad.full_tensor()
    assert gradient.abs().max() > 0


@pytest.mark.full
@pytest.mark.parametrize("steps", [1, 4])
@on_ranks(2, "exact here")
def test_exact_weights_on_one_rank_alone_are_an_error_on_every_rank(steps: int):
    trained = train(BLOCKS, steps, (gc.Quantize(bits=8), "none"))
    assert predicts(trained) == (steps > 1)
    trained.state._settings.exact = gc.rank() == 0
    with pytest.raises(gc.PlanMismatchError, match=r"embedding\.weight.*none"):
        loss_of(trained.model, 1)


@on_ranks(2, "layout")
def test_a_layout_that_shapes_do_not_explain_is_an_error_on_every_rank():
    trained = train(BLOCKS, 4, EXACT)
    assert predicts(trained)  # the other rank does not compare before it waits for data
    if gc.rank() == 0:
        exchange = trained.state._units[0]
        call = ReduceGradients(exchange)
        group = torch.distributed.group.WORLD
        with pytest.raises(gc.ConfigError, match="elements of gradients on 2 ranks, where compress_fsdp"):
            call(torch.zeros(7), torch.zeros(14), group, torch.distributed.ReduceOp.AVG)
    else:
        with pytest.raises(gc.TransportError, match="elements of gradients"):
            go_on(trained, BLOCKS, range(4, 5))


@on_ranks(2)
def test_a_multiplied_sum_is_what_its_factor_says():
    trained = train(CASES["as a whole"], 1, EXACT)
    exchange = trained.state._units[0]
    unit = exchange.unit
    size = unit.blocks(range(len(unit.parameters)), 2).size
    whole, sums, scaled = torch.ones(2 * size) * (gc.rank() + 1), torch.zeros(size), torch.zeros(size)
    group = torch.distributed.group.WORLD
    ReduceGradients(exchange)(sums, whole, group, torch.distributed.ReduceOp.SUM)
    ReduceGradients(exchange)(scaled, whole, group, torch.distributed._make_nccl_premul_sum(0.25))
    assert sums.max() == 3.0
    assert torch.equal(scaled, 0.25 * sums)
    with pytest.raises(gc.ConfigError, match="AVG, SUM or PREMUL_SUM"):
        ReduceGradients(exchange)(sums, whole, group, torch.distributed.ReduceOp.MAX)


@on_ranks(1)
def test_a_world_of_one_exchanges_nothing():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    model = nn.Linear(64, 32)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    state = gc.compress_fsdp(model)
    model(torch.randn(3, 64)).sum().backward()
    assert state.statistics().gathers == 0
    assert model.weight.grad is not None
    torch.distributed.destroy_process_group()


# --- where parameters lie --------------------------------------------------------------------------------------


@examples(200)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.integers(1, 7))
def test_shards_are_those_of_torchs_chunks(shape: list[int], world: int):
    one = Sharded("x", nn.Linear(1, 1), "weight", tuple(shape), 0, world)
    values = torch.arange(torch.Size(shape).numel()).view(shape)
    chunks = [chunk.reshape(-1) for chunk in values.chunk(world)]
    chunks += [values[:0].reshape(-1)] * (world - len(chunks))
    borders = one.borders(world)
    for rank, chunk in enumerate(chunks):
        assert torch.equal(values.reshape(-1)[borders[rank] : borders[rank + 1]], chunk)
    assert one.room(world) == len(chunks[0])


@on_ranks(2)
def test_units_have_the_parameters_that_fully_shard_gives_them():
    units = find_units(build(CASES["modules together"]))
    assert [unit.name for unit in units] == ["the root module", "embedding", "norm"]
    assert [one.name for one in units[1].parameters][:2] == ["embedding.weight", "blocks.0.norm.weight"]
    assert [one.name for one in units[2].parameters] == ["norm.weight", "norm.bias", "head.weight"]
    tied = find_units(build(Case(tied=True)))
    assert sum(one.name == "head.weight" for unit in tied for one in unit.parameters) == 0
