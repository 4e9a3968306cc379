"""The user's collectives: Horovod's meanings, and a typed error on every rank where there is no meaning.

All checks of a world run in one job, see ``collective_checks`` and ``torch_collectives``; faults get jobs of their own.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import preloaded
import pytest
import torch
import torch_collective_checks  # noqa: F401 - adds its checks
import torch_state_checks  # noqa: F401 - the same
from launching import Finished, run_ranks
from torch_collectives import ALONE, CHECKS

import gradcomp.torch as gc

PROGRAM = """
import torch_collective_checks, torch_state_checks
from torch_collectives import main
main()
"""


@functools.cache
def outcomes(world: int) -> list[dict[str, str]]:
    """What a job of this world finds that runs all checks."""
    results = run_ranks(PROGRAM, world, timeout=110, imported=preloaded.TORCH)
    for result in results:
        assert result.returncode == 0, result.stderr
    return [json.loads(result.stdout) for result in results]


def assert_right(name: str, world: int) -> None:
    found = [outcome[name] for outcome in outcomes(world)]
    wrong = [f"rank {rank}: {text}" for rank, text in enumerate(found) if text]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("name", CHECKS)
def test_in_a_world(name: str, world: int) -> None:
    assert_right(name, world)


@pytest.mark.full
@pytest.mark.parametrize("name", ALONE)
def test_alone(name: str) -> None:
    assert_right(name, 1)


# --------------------------------------------------------------------------------------------- world of one


def test_in_a_world_of_one_broadcasts_change_nothing_and_handles_are_done() -> None:
    """All values: ``collective_checks``, with ``--full``."""
    gc.init()
    try:
        anything, model = object(), torch.nn.Linear(2, 2)
        assert gc.broadcast_object(anything) is anything
        before = {name: value.clone() for name, value in model.state_dict().items()}
        gc.broadcast_parameters(model.state_dict())
        gc.broadcast_optimizer_state(torch.optim.SGD(model.parameters(), lr=0.1))
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
        value = torch.ones(3)
        assert gc.allreduce(value, op=gc.Sum).data_ptr() != value.data_ptr()
        gc.barrier()
        handle = gc.allreduce_async(torch.ones(1))
        assert gc.poll(handle)
        assert gc.synchronize(handle) == 1
        assert gc.allreduce_(value, op=gc.Sum) is value
        for call in (gc.allreduce, gc.allgather):
            given = torch.ones(2, 3, requires_grad=True)
            result = call(given)
            result.sum().backward()
            assert torch.equal(result, given)
            assert torch.equal(given.grad, torch.ones(2, 3))
        for bad in (
            lambda: gc.allreduce(torch.ones(1, dtype=torch.bool)),
            lambda: gc.broadcast_object(1, root_rank=1),
            lambda: gc.broadcast(torch.ones(1), 1),
            lambda: gc.alltoall(torch.ones(3), [2]),
            lambda: gc.allgather(torch.tensor(1.0)),
        ):
            with pytest.raises(gc.ConfigError):
                bad()
    finally:
        gc.shutdown()


# --------------------------------------------------------------------------------------------------- faults

FAULT = """
import os, sys, time, torch
import gradcomp.torch as gc
gc.init(timeout_seconds={timeout}, stall_warning_seconds=1)
gc.barrier()
try:
    if gc.rank() == {culprit}:
        {fault}
    gc.allreduce(torch.ones(100000))
    print("no error")
except gc.GradcompError as error:
    print(type(error).__name__, error)
    try:
        gc.barrier()
        print("no second error")
    except gc.TransportError:
        print("still unusable")
"""


def survivors(fault: str, culprit: int, timeout: float) -> list[Finished]:
    program = FAULT.format(fault=fault, culprit=culprit, timeout=timeout)
    results = run_ranks(program, 3, timeout=100, imported=preloaded.TORCH)
    return [result for rank, result in enumerate(results) if rank != culprit]


FAULTS = {
    "stays away": ("time.sleep(4)", 1, 2.0),
    "dies": ("os._exit(1)", 2, 60.0),
    "rank 0, which holds the store, dies": ("os._exit(1)", 0, 60.0),
    "raises": ("raise RuntimeError('mine')", 1, 60.0),
}


@pytest.fixture(scope="module")
def lost() -> Iterator[Callable[[str], list[Finished]]]:
    """``lost(name)``: how the others ended. Two faults run beside each other, for they mostly wait."""
    with ThreadPoolExecutor(2) as pool:
        running = {name: pool.submit(survivors, *fault) for name, fault in FAULTS.items()}
        yield lambda name: running[name].result()


@pytest.mark.parametrize("name", list(FAULTS)[1:])
def test_lost_rank_is_a_transport_error_on_all_others(lost, name: str) -> None:
    for result in lost(name):
        assert result.returncode == 0, result.stderr
        assert result.stdout.startswith("TransportError"), result.stdout
        assert "still unusable" in result.stdout
        assert "no end after" not in result.stdout  # they did not wait for the deadline


def test_rank_that_stays_away_is_named_by_all_others(lost) -> None:
    for result in lost("stays away"):
        assert result.returncode == 0, result.stderr
        assert result.stdout.startswith("TransportError"), result.stdout
        for said in (result.stdout, result.stderr):  # the warning before
            assert re.search(r"rank 1 \(host \S+\) did not call it", said)


def test_mismatch_leaves_the_channel_usable() -> None:
    program = """
        import torch, gradcomp.torch as gc
        gc.init(timeout_seconds=30)
        for size in (1, 2, 3):
            try:
                gc.allreduce(torch.ones(size + gc.rank()))
            except gc.PlanMismatchError:
                print(gc.allreduce(torch.ones(1), op=gc.Sum).item(), end=" ")
    """
    results = run_ranks(program, 2, imported=preloaded.TORCH)
    assert [(r.returncode, r.stdout) for r in results] == [(0, "2.0 2.0 2.0 ")] * 2, results[0].stderr


def test_threads_may_make_their_first_calls_at_once() -> None:
    """In three lives of a job, and over three sets of its ranks, which threads use in one order or the other."""
    program = """
        import threading
        from concurrent.futures import ThreadPoolExecutor
        import torch, gradcomp.torch as gc

        CALLS = [
            lambda name, ranks: gc.allreduce(torch.ones(5000), op=gc.Sum, name=name, process_set=ranks)[0].item(),
            lambda name, ranks: gc.allgather(torch.ones(2), name=name, process_set=ranks).numel() / 2,
            lambda name, ranks: gc.broadcast(torch.ones(3), ranks.ranks[-1], name=name, process_set=ranks).sum().item(),
            lambda name, ranks: float(gc.allgather_object([1], name=name, process_set=ranks)[-1][0]),
        ]

        def first_calls(sets_of):
            # A thread for each call and set; sets_of says in which order threads make theirs.
            together = threading.Barrier(len(CALLS))

            def work(place):
                together.wait()
                sets = sets_of(place)
                return {ranks.ranks: CALLS[place](f"first {place}", ranks) for ranks in sets}

            with ThreadPoolExecutor(len(CALLS)) as pool:
                return list(pool.map(work, range(len(CALLS))))

        for life in range(3):
            gc.init(timeout_seconds=20)
            everyone = gc.global_process_set
            print(*[found[everyone.ranks] for found in first_calls(lambda place: [everyone])])
            pairs = [gc.ProcessSet(pair) for pair in ((0, 1), (0, 2), (1, 2)) if gc.rank() in pair]
            for found in first_calls(lambda place: pairs if place % 2 else pairs[::-1]):
                assert len(found) == 2, found
                print(*sorted(found.values()))
            gc.shutdown()
    """
    results = run_ranks(program, 3, timeout=100, imported=preloaded.TORCH)
    life = "3.0 3.0 3.0 1.0\n2.0 2.0\n2.0 2.0\n3.0 3.0\n1.0 1.0\n"
    assert [(r.returncode, r.stdout) for r in results] == [(0, life * 3)] * 3, results[0].stderr
