"""Optimizers and collectives of some of the ranks."""

from __future__ import annotations

import inspect
import textwrap

import preloaded
import pytest
import torch
import torch.distributed as dist
from batch import on_ranks
from launching import run_ranks
from small_torch import net, residuals, same, shared_folder, small, train, wrap
from torch.distributed.device_mesh import init_device_mesh
from transport_engines import no_horovod, under_horovodrun

import gradcomp.torch as gc
from gradcomp.job.membership import set_of

COMPRESSION = "quantize:bits=4,bucket_size=64"


def linear(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Linear(40, 30)


def trained(process_set) -> torch.nn.Module:
    """Every rank has other data."""
    model = net()
    train(model, wrap(model, small(COMPRESSION), process_set=process_set))
    return model


def everyones(model: torch.nn.Module) -> list[list[float]]:
    return gc.allgather(torch.cat([p.detach().reshape(-1) for p in model.parameters()])[None]).tolist()


@on_ranks(4)
def test_sets_come_and_go_and_one_holds_all_ranks():
    half = gc.add_process_set([0, 1] if gc.rank() < 2 else gc.ProcessSet([3, 2]))
    assert gc.allreduce(torch.tensor(gc.rank()), op=gc.Sum, process_set=half) == (1 if gc.rank() < 2 else 5)
    assert gc.allreduce(torch.tensor(gc.rank()), op=gc.Sum, process_set=gc.global_process_set) == 6
    assert gc.global_process_set.size() == 4
    assert gc.global_process_set.rank() == gc.rank()
    assert gc.remove_process_set(half)
    with pytest.raises(gc.StateError, match="was removed"):
        gc.allreduce(torch.zeros(1), process_set=half)
    assert not gc.remove_process_set(gc.global_process_set)
    again = gc.add_process_set([0, 1] if gc.rank() < 2 else [2, 3])
    assert gc.allreduce(torch.tensor(1), op=gc.Sum, process_set=again) == 2
    with pytest.raises(gc.ConfigError, match="the job has ranks 0"):
        gc.add_process_set([4])


HALVES = {
    "ranks": lambda: gc.ProcessSet([0, 1] if gc.rank() < 2 else [3, 2]),
    "groups": lambda: [dist.new_group([0, 1]), dist.new_group([2, 3])][gc.rank() // 2],
    "mesh": lambda: init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "data"))["data"],
}


@pytest.mark.parametrize("given", HALVES)
@on_ranks(4)
def test_each_half_trains_on_its_own_given_as_ranks_as_a_group_or_as_a_dimension_of_a_mesh(given):
    half = HALVES[given]()
    found = everyones(trained(half))
    assert found[0] == found[1]
    assert found[2] == found[3]
    assert found[0] != found[2]
    if given == "ranks":
        assert half.included()
        assert half.size() == 2
        assert half.rank() == gc.rank() % 2


@on_ranks(4)
def test_a_mesh_of_two_dimensions_is_no_process_set():
    with pytest.raises(gc.ConfigError, match="2 dimensions"):
        trained(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "data")))


@on_ranks(4)
def test_a_rank_that_is_no_member_steps_alone_and_takes_no_part_in_broadcasts():
    pair, model = gc.ProcessSet([0, 2]), linear(seed=gc.rank())
    gc.broadcast_parameters(model.state_dict(), root_rank=2, process_set=pair)
    seed = 2 if pair.included() else gc.rank()
    assert torch.equal(model.weight, linear(seed=seed).weight)
    optimizers = {
        op: wrap(model, lr=gc.rank() + 1.0, process_set=pair, op=op) for op in (gc.Average, gc.Adasum)
    }
    opt = optimizers[gc.Average]
    gc.broadcast_optimizer_state(opt, root_rank=0, process_set=pair)
    assert opt.param_groups[0]["lr"] == (1.0 if pair.included() else gc.rank() + 1.0)
    before = model.weight.detach().clone()
    model(torch.ones(1, 40) * (gc.rank() + 1)).sum().backward()
    opt.step()
    mean = (1 + 3) / 2 if pair.included() else (gc.rank() + 1) ** 2
    torch.testing.assert_close(before - model.weight.detach(), torch.full_like(before, mean))
    model.zero_grad()
    optimizers[gc.Adasum].step()
    found = everyones(model)
    assert found[0] == found[2]
    assert found[1] not in (found[0], found[3])
    assert found[3] != found[0]


@on_ranks(4)
def test_a_set_of_one_exchanges_nothing_and_the_others_go_on():
    found = everyones(trained(gc.ProcessSet([3] if gc.rank() == 3 else [0, 1, 2])))
    assert found[0] == found[1] == found[2]
    assert found[3] != found[0]


@on_ranks(4)
def test_overlapping_sets_serve_different_optimizers():
    left, right = gc.ProcessSet([0, 1, 2]), gc.ProcessSet([2, 3])
    first = trained(left) if gc.rank() in left.ranks else net()
    second = trained(right) if gc.rank() in right.ranks else net()
    firsts, seconds = everyones(first), everyones(second)
    assert firsts[0] == firsts[1] == firsts[2] != firsts[3]
    assert seconds[0] == seconds[1] != seconds[2] == seconds[3]


@on_ranks(4)
def test_the_hook_takes_the_ranks_of_its_model():
    group = [dist.new_group([0, 2]), dist.new_group([1, 3])][gc.rank() % 2]
    ddp = torch.nn.parallel.DistributedDataParallel(net(), process_group=group)
    ddp.register_comm_hook(*gc.ddp_comm_hook(ddp, small(COMPRESSION)))
    train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1))
    found = everyones(ddp.module)
    assert found[0] == found[2]
    assert found[1] == found[3]
    assert found[0] != found[1]


@on_ranks(4)
def test_collectives_of_some_of_the_ranks():
    some = gc.ProcessSet([1, 2, 3])
    if gc.rank() == 0:
        with pytest.raises(gc.ConfigError, match="rank 0 is not a member"):
            gc.allreduce(torch.ones(3), process_set=some)
    else:
        assert gc.allreduce(torch.full((3,), float(gc.rank())), process_set=some).tolist() == [2.0] * 3
        rows = gc.allgather(torch.full((gc.rank(), 2), gc.rank()), process_set=some)
        assert rows[:, 0].tolist() == [1, 2, 2, 3, 3, 3]
        assert gc.broadcast_object(gc.rank() * 10, root_rank=2, process_set=some) == 20
        model = linear(seed=gc.rank())
        gc.broadcast_parameters(model.state_dict(), root_rank=3, process_set=some)
        assert torch.equal(model.weight, linear(seed=3).weight)
        with pytest.raises(gc.ConfigError, match="root_rank must be a member"):
            gc.broadcast_object(1, root_rank=0, process_set=some)
        gc.barrier(process_set=some)
    gc.barrier()


@on_ranks(4)
def test_checkpoints_are_of_the_members():
    half = gc.ProcessSet([0, 1] if gc.rank() < 2 else [2, 3])
    model = net()
    opt = wrap(model, small("topk:density=0.1"), process_set=half)
    train(model, opt, 1)
    directory = shared_folder() / str(half.ranks[0])
    gc.save(directory, opt)
    before = residuals(opt)
    train(model, opt, 1, first=1)
    assert not same(residuals(opt), before)
    gc.load(directory, opt)
    assert same(residuals(opt), before)


@on_ranks(4)
def test_what_is_no_process_set_is_refused():
    for call, says in (
        (lambda: gc.ProcessSet([]), "needs ranks"),
        # a communicator of MPI's, under Horovod
        (lambda: gc.ProcessSet(object()), "a list of ranks of the job, got object"),
        (lambda: gc.ProcessSet([1, 1]), "each rank only once"),
        (lambda: gc.ProcessSet([-1]), "at least 0"),
        (lambda: gc.barrier(process_set=gc.ProcessSet([0, 9])), r"ranks 0 \.\. 3"),
        (lambda: gc.barrier(process_set=[0, 1]), "must be a ProcessSet"),
    ):
        with pytest.raises(gc.ConfigError, match=says):
            call()


@on_ranks(4)
def test_places_on_the_hosts():
    assert (gc.local_rank(), gc.local_size()) == (gc.rank(), 4)
    assert (gc.cross_rank(), gc.cross_size()) == (0, 1)


# --- sets that init() is told of ----------------------------------------------------------------------------


@pytest.mark.parametrize("given", [[], [0, 0], [-1], [0, 4], [True], 3, "01", None])
def test_a_set_that_is_none_is_refused(given):
    with pytest.raises(gc.ConfigError, match=r"is not a list of some of the ranks 0 \.\. 3"):
        set_of(given, 4)


def test_a_set_may_be_a_list_or_a_process_set():
    assert set_of([3, 1], 4) == set_of(gc.ProcessSet([1, 3]), 4) == (1, 3)


def test_ranks_that_name_other_sets_are_refused():
    def program():
        import os

        import gradcomp.torch as gc

        sets = [[[0, 1], [1]], [[1, 0]]][int(os.environ["RANK"])]
        gc.init(process_sets=sets, timeout_seconds=20)

    for end in run_ranks(program, 2, imported=preloaded.TORCH):
        assert end.returncode != 0
        assert "rank 0 has process_sets=[(0, 1), (1,)], rank 1 has [(0, 1)]" in end.stderr


@pytest.mark.full
def test_over_horovod_the_sets_that_init_was_told_of_train():
    if missing := no_horovod():
        pytest.skip(missing)

    def program():
        import pytest
        import torch

        import gradcomp.torch as gc

        gc.init(transport="horovod", process_sets=[gc.ProcessSet([2, 3]), [0, 1]], timeout_seconds=30)
        torch.manual_seed(0)
        net = torch.nn.Linear(40, 30)
        sgd = torch.optim.SGD(net.parameters(), lr=0.1)
        half = gc.ProcessSet([0, 1] if gc.rank() < 2 else [2, 3])
        names = net.named_parameters()
        opt = gc.DistributedOptimizer(sgd, names, "quantize:bits=4", process_set=half)
        data = torch.Generator().manual_seed(gc.rank())
        for _ in range(3):
            opt.zero_grad()
            net(torch.randn(8, 40, generator=data)).square().mean().backward()
            opt.step()
        found = gc.allgather(torch.cat([p.detach().reshape(-1) for p in net.parameters()])[None])
        assert torch.equal(found[0], found[1])
        assert torch.equal(found[2], found[3])
        assert not torch.equal(found[0], found[2])
        if gc.rank() in (0, 2):
            with pytest.raises(gc.ConfigError, match=r"gc\.init\(process_sets"):
                gc.DistributedOptimizer(
                    torch.optim.SGD(net.parameters(), lr=0.1), process_set=gc.ProcessSet([0, 2])
                )

    (end,) = under_horovodrun(textwrap.dedent(inspect.getsource(program)) + "\nprogram()\n", 4)
    assert end.returncode == 0, end.stdout + end.stderr
