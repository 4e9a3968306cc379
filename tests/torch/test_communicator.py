"""``init(comm=, process_sets=)``: Horovod's ways to choose the ranks of a job."""

from __future__ import annotations

import json

import preloaded
import pytest
from batch import on_ranks
from launching import run_ranks

import gradcomp.torch as gc


@pytest.mark.parametrize(
    ("comm", "says"),
    [(3, "comm must be a list of ranks"), ("01", "comm must be a list of ranks"), ([0.5], "at least 0"),
     ([-1], "at least 0"), ([1, 0], "ascending"), ([0, 0], "once"), ([0, 1], "rank 0 of 0 .. 0"),
     ([1], "rank 0 of 0 .. 0")],
)  # fmt: skip
def test_what_names_no_ranks_of_this_job_is_refused(comm, says) -> None:
    with pytest.raises(gc.ConfigError, match=says):
        gc.init(comm)
    with pytest.raises(gc.ConfigError, match="dynamic"):
        gc.init(process_sets="static")
    assert not gc.is_initialized()


@pytest.mark.parametrize(
    "arguments", [(), (None,), ([],), ([0],), (None, "dynamic"), (None, [[0]]), ([0], None)]
)
def test_arguments_for_all_ranks_of_a_world_of_one(arguments) -> None:
    for _ in range(2):
        gc.init(*arguments)
        assert (gc.rank(), gc.size()) == (0, 1)
        gc.shutdown()


@on_ranks(2)
def test_other_ranks_after_init_are_refused():
    with pytest.raises(gc.StateError, match="already initialised"):
        gc.init([0, 1])
    gc.init(process_sets="dynamic")


def _lives() -> None:
    import json

    import torch
    import torch.distributed as dist

    import gradcomp.torch as hvd

    said = []
    try:
        hvd.init([0, 2])
    except hvd.ConfigError as error:
        said.append(str(error))
    dist.init_process_group("gloo")
    for comm in ([0, 2], [0, 1, 2], [0, 1], dist.group.WORLD):
        if comm in ([0, 2], [0, 1]) and dist.get_rank() not in comm:
            try:
                hvd.init(comm)
            except hvd.ConfigError as error:
                said.append(str(error))
            continue
        hvd.init(comm)
        model = torch.nn.Linear(2, 1)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        model(torch.full((1, 2), float(hvd.rank()))).sum().backward()
        optimizer.step()
        said.append([hvd.rank(), hvd.size(), model.weight.grad[0, 0].item()])
        hvd.shutdown()
    print(json.dumps(said))
    dist.barrier()


def test_ranks_that_torch_distributed_has_may_be_some_of_them_life_after_life() -> None:
    finished = run_ranks(_lives, 3, timeout=100, imported=preloaded.TORCH)
    assert [rank.returncode for rank in finished] == [0] * 3, finished[0].stderr
    said = [json.loads(rank.stdout) for rank in finished]
    assert all("give process_set=ProcessSet([0, 2])" in told[0] for told in (said[0], said[2]))
    assert "must be one of those given" in said[1][0]
    pairs = {0: [0, 2, 0.5], 2: [1, 2, 0.5]}
    first = {0: [0, 2, 0.5], 1: [1, 2, 0.5]}
    for rank, told in enumerate(said):
        whole = [rank, 3, 1.0]
        expected = [pairs.get(rank), whole, first.get(rank), whole]
        for one, wanted in zip(told[1:], expected, strict=True):
            assert one == wanted if wanted else "must be one of those given" in one


def _communicators() -> None:
    from mpi4py import MPI

    import gradcomp.torch as hvd

    for comm in (MPI.COMM_WORLD, MPI.COMM_SELF, MPI.COMM_WORLD.Dup()):
        hvd.init(comm)
        assert hvd.size() == 1
        hvd.shutdown()


def test_a_communicator_of_mpi4py_names_its_ranks() -> None:
    pytest.importorskip("mpi4py")
    (finished,) = run_ranks(_communicators, 1, env=lambda _: {}, imported=preloaded.TORCH)
    assert finished.returncode == 0, finished.stderr


def test_a_name_that_is_not_here_says_what_there_is_instead() -> None:
    with pytest.raises(AttributeError, match="no attribute 'another'"):
        gc.another  # noqa: B018
    assert issubclass(gc.HostsUpdatedInterrupt, gc.HorovodInternalError)
    assert issubclass(gc.TransportError, gc.HorovodInternalError)
