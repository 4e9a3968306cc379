"""Ranks that wait for each other hear it together, and ranks that only wait long do not.

The proof takes 30 s, which no test can wait: programs set a shorter time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import preloaded
import pytest
from launching import Finished, run_ranks

BEGIN = """
import tempfile, time
from concurrent.futures import ThreadPoolExecutor
import torch
import gradcomp.torch as gc
from gradcomp.exchange import deadlock, watchdog
from gradcomp.job import runtime
from gradcomp.transport.control import count_of

def optimizer():
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    return model, gc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())

def step(model, opt):
    opt.zero_grad()
    model(torch.ones(2, 8)).sum().backward()
    opt.step()

def begin():
    gc.init(timeout_seconds=60)
    pair = optimizer()
    step(*pair)
    return gc.rank(), pair
"""

#: Each in a life of its own, on two ranks.
DEADLOCKS = """
deadlock.PROOF_SECONDS = 1.0

def checkpoint(rank, pair):
    step(*pair) if rank else gc.save(tempfile.mkdtemp(), pair[1])

def object(rank, pair):
    gc.broadcast_object({"lr": 0.1}) if rank else step(*pair)

def early_stopping(rank, pair):
    for epoch in range(3):
        step(*pair)
        if rank == 0 and epoch == 1:
            break
    gc.allreduce(torch.ones(1), name="accuracy")

def uneven_loop(rank, pair):
    for batch in range(2 + rank):
        gc.allreduce(torch.ones(1))
    step(*pair)

def another_optimizer(rank, pair):
    handle = gc.allreduce_async(torch.ones(1), name="other")
    optimizer() if rank else step(*pair)

for program in (checkpoint, object, early_stopping, uneven_loop, another_optimizer):
    try:
        program(*begin())
        print("no error")
    except gc.GradcompError as error:
        print(program.__name__, type(error).__name__, error, flush=True)
    gc.shutdown()
"""

#: What each rank is said to wait for.
PLACES = {
    "checkpoint": ("gc.save", "step 1, bucket 0"),
    "object": ("step 1, bucket 0", "broadcast_object"),
    "early_stopping": ("allreduce 'accuracy'", "step 3, bucket 0"),
    "uneven_loop": ("step 1, bucket 0", "allreduce"),
    "another_optimizer": ("step 1, bucket 0", r"a call in which ranks \[0, 1\] meet to build its optimizer"),
}

#: On three ranks: longer waits than two accounts take. At the end they wait for each other, and shall hear it.
HEALTHY = """
deadlock.PROOF_SECONDS = 0.4
rank, pair = begin()
pairs = {two: gc.ProcessSet(two) for two in ((0, 1), (0, 2), (1, 2))}
directory = gc.broadcast_object(tempfile.mkdtemp())

def late(who, seconds=1.6):
    if rank == who:
        time.sleep(seconds)

def in_set(*ranks):
    if rank in ranks:
        gc.allreduce(torch.ones(1), process_set=pairs[ranks])

def a_long_evaluation():
    late(1)
    step(*pair)

def a_slow_rank_0():
    late(0)
    step(*pair)

def a_rank_that_is_elsewhere_while_others_save():
    late(2)
    gc.save(directory, pair[1])

def asynchronous_calls_in_different_orders():
    names = "abc"[rank:] + "abc"[:rank]
    handles = {}
    for name in names:
        late(1, 0.6)
        handles[name] = gc.allreduce_async(torch.ones(1), name=name)
    for name in names[::-1]:
        gc.synchronize(handles[name])

def an_asynchronous_call_around_a_step():
    handle = gc.allreduce_async(torch.ones(1), name="x")
    late(2)
    if rank:
        gc.synchronize(handle)
    step(*pair)
    if not rank:
        gc.synchronize(handle)

def a_chain_of_process_sets():
    late(2)
    in_set(1, 2)
    in_set(0, 1)

def a_set_that_goes_on_while_a_rank_waits():
    in_set(0, 1)
    late(1)
    in_set(0, 1)
    gc.barrier()

def several_threads():
    def beside():
        late(1)
        gc.allreduce(torch.ones(1), name="beside")

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(beside)
        if rank == 0:
            other.result()
        gc.allreduce(torch.ones(1), name="before")
        other.result()

def a_rank_that_has_joined():
    if rank:
        late(1)
        step(*pair)
        gc.allreduce(torch.ones(1))
        late(2)
    gc.join()

def an_optimizer_that_is_built_late():
    late(1)
    step(*optimizer())

for program in (
    a_long_evaluation, a_slow_rank_0, a_rank_that_is_elsewhere_while_others_save,
    asynchronous_calls_in_different_orders, an_asynchronous_call_around_a_step, a_chain_of_process_sets,
    a_set_that_goes_on_while_a_rank_waits, several_threads, a_rank_that_has_joined, an_optimizer_that_is_built_late,
):
    program()
gc.barrier()
questions = count_of(runtime.current().watchdog.control.lookup(watchdog.QUESTION))
print("all went on, and were asked", "often" if questions > 7 else f"{questions} times", flush=True)
in_set(*((0, 1), (1, 2), (0, 2))[rank])
"""


@pytest.fixture(scope="module")
def ended() -> Iterator[Callable[[str], list[Finished]]]:
    """How the ranks ended; both jobs run beside each other, for they mostly wait."""
    with ThreadPoolExecutor(2) as pool:
        running: dict[str, Future[list[Finished]]] = {
            source: pool.submit(run_ranks, BEGIN + source, world, timeout=100, imported=preloaded.TORCH)
            for source, world in ((DEADLOCKS, 2), (HEALTHY, 3))
        }
        yield lambda source: running[source].result()


@pytest.mark.parametrize("name", PLACES)
def test_all_ranks_hear_who_waits_where(ended, name: str) -> None:
    for rank, end in enumerate(ended(DEADLOCKS)):
        assert end.returncode == 0, end.stderr
        (said,) = [line for line in end.stdout.splitlines() if line.startswith(f"{name} ")]
        assert said.startswith(
            f"{name} TransportError the ranks wait for each other, and none can go on: "
        ), rank
        for other, place in enumerate(PLACES[name]):
            assert re.search(rf"rank {other} \(host \S+\) waits in {place}", said), said


def test_programs_that_only_wait_long_go_on_and_a_circle_of_sets_is_found_behind_them(ended) -> None:
    for end in ended(HEALTHY):
        assert end.stdout == "all went on, and were asked often\n", end.stderr
        assert end.returncode == 1
        assert re.search(
            r"TransportError: the ranks wait for each other.*rank 2 \(host \S+\) waits in ", end.stderr
        )
