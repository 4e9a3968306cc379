"""Ranks that finish, leave or stop at different times: nobody is ended by another's good end, and nobody hangs."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import preloaded
import pytest
from launching import Finished, run_ranks
from transport_engines import no_mpi, under_mpiexec

#: Set behind init(), which a busy machine may need longer for.
BEGIN = """
import os, signal, subprocess, sys, time
from dataclasses import replace
import torch
import gradcomp.torch as gc
from gradcomp.job import runtime

gc.init(timeout_seconds=60)
rank = gc.rank()

def patience(timeout, warning=1.0):
    state = runtime.current()
    state.config = replace(state.config, timeout_seconds=timeout, stall_warning_seconds=warning)

def stop_for(seconds):
    subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)

def optimizer():
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    return model, gc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())

def train(steps):
    model, opt = optimizer()
    for step in range(steps):
        opt.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        opt.step()

class SlowEnd:
    def __del__(self, sleep=time.sleep):
        sleep(4)

def attempt(what):
    try:
        print(what().tolist())
    except gc.GradcompError as error:
        print(type(error).__name__, error)
"""

PROGRAMS = {
    "out of data": """
patience(60.0)
train(3 if rank == 1 else 6)
""",
    "a metric at the end": """
patience(2.5)
train(3 if rank == 1 else 6)
gc.allreduce(torch.ones(1))
""",
    "never built": """
patience(2.5)
if rank == 1:
    time.sleep(5)
else:
    optimizer()
""",
    "ended without an optimizer": """
patience(60.0)
if rank == 0:
    optimizer()
""",
    "ended without a collective": """
patience(60.0)
if rank == 0:
    gc.allreduce(torch.ones(1))
""",
    "a collective that outlives the interpreter": """
import atexit

def keep_the_lock():
    # Rank 1 ends meanwhile, and with it the farewell's collective, on a thread that then waits for the interpreter.
    sys.setswitchinterval(60)
    until = time.monotonic() + 4
    while time.monotonic() < until:
        pass

patience(20.0)
atexit.register(keep_the_lock if rank == 0 else lambda: time.sleep(2))
atexit.unregister(runtime.shutdown)
atexit.register(runtime.shutdown)
if rank == 0:
    slow = SlowEnd()
else:
    raise ValueError("it fails while rank 0 takes leave")
""",
    "a silent store": """
patience(20.0)
gc.barrier()
if rank == 0:
    stop_for(4)
attempt(lambda: gc.allreduce(torch.ones(1)))
if rank == 0:
    stop_for(6)
else:
    slow = SlowEnd()  # the store answers while the interpreter ends
    time.sleep(0.2)
    try:
        runtime.current().watchdog.control.lookup("nothing")
    except gc.TransportError:
        raise ValueError("it is silent")
""",
}

ON_MPI = """
import sys, time
from gradcomp.job import network, runtime
from gradcomp.transport import mpi_process

mpi_process.FAREWELL_SECONDS = 1.0
runtime.begin(lambda config: network.join(config.timeout_seconds), (), {"timeout_seconds": 60.0,
              "stall_warning_seconds": 1.0})
if runtime.rank() == 0:
    time.sleep(3)  # it saves its model
    print("saved", flush=True)
"""


def launch(name: str) -> list[Finished]:
    if name == "over MPI":
        return [under_mpiexec(ON_MPI, 2)]
    return run_ranks(BEGIN + PROGRAMS[name], 2, timeout=100, imported=preloaded.TORCH)


@pytest.fixture(scope="module")
def ended() -> Callable[[str], list[Finished]]:
    """How the ranks of a program ended; all programs run beside each other, for they mostly wait."""
    names = [*PROGRAMS, *([] if no_mpi() else ["over MPI"])]
    with ThreadPoolExecutor(len(names)) as pool:
        running: dict[str, Future[list[Finished]]] = {name: pool.submit(launch, name) for name in names}
        yield lambda name: running[name].result()


def last_line(end: Finished) -> str:
    return end.stderr.strip().splitlines()[-1]


# ---------------------------------------------------------------------------------------- leaving


def test_a_rank_that_waits_for_one_that_has_ended_says_so_long_before_the_deadline(ended):
    waiting, done = ended("out of data")
    assert (waiting.returncode, done.returncode) == (1, 0), waiting.stderr
    assert "TransportError: rank 0 waited " in last_line(waiting)
    assert "rank 1 (host " in last_line(waiting)
    assert "has left the training loop after 3 steps: it is in shutdown()" in last_line(waiting)


def test_the_error_is_not_buried_in_the_frames_of_libraries(ended):
    waiting, _ = ended("out of data")
    frames = [line for line in waiting.stderr.splitlines() if 'File "' in line]
    assert frames
    assert all("program.py" in line for line in frames)


def test_the_rank_that_has_ended_says_for_whom_it_waits(ended):
    _, done = ended("out of data")
    assert "shutdown: rank 1 is done and waits for rank 0 (host " in done.stderr


def test_a_rank_that_averages_a_metric_instead_of_a_step_is_named_with_its_call(ended):
    training, averaging = ended("a metric at the end")
    assert (training.returncode, averaging.returncode) == (1, 1)
    assert "is not in the training loop: after 3 steps it waits in allreduce, call 1" in training.stderr
    assert "did not call it: it waits in step 3, bucket 0" in averaging.stderr


def test_a_rank_that_does_not_build_its_optimizer_is_named_before_and_at_the_deadline(ended):
    waiting, _ = ended("never built")
    assert waiting.returncode == 1
    lines = [line for line in waiting.stderr.splitlines() if "has not built its optimizer" in line]
    assert [("TransportError" in line, "rank 1 (host " in line) for line in lines] == [
        (False, True),
        (True, True),
    ]


def test_a_rank_that_ended_instead_of_building_its_optimizer_is_not_waited_for(ended):
    waiting, done = ended("ended without an optimizer")
    assert (waiting.returncode, done.returncode) == (1, 0)
    assert "has not built its optimizer; rank 1 (host " in last_line(waiting)
    assert "has left, and is in shutdown()" in last_line(waiting)


def test_a_rank_that_ended_before_its_first_collective_is_not_waited_for(ended):
    waiting, done = ended("ended without a collective")
    assert (waiting.returncode, done.returncode) == (1, 0)
    assert re.search(
        r"no end after 2\.\d s; rank 1 \(host \S+\) did not call it: it has left", last_line(waiting)
    )


# ---------------------------------------------------------------------------------------- slow, not dead


@pytest.mark.skipif(bool(no_mpi()), reason=no_mpi())
def test_over_mpi_a_rank_that_has_finished_does_not_end_one_that_still_works(ended):
    (end,) = ended("over MPI")
    assert end.returncode == 0, end.stderr
    assert end.stdout == "saved\n"
    assert end.stderr.count("rank 1 is done and waits for rank 0") == 1


def test_a_collective_outlasts_a_store_that_is_silent_for_a_while(ended):
    for end in ended("a silent store"):
        assert end.stdout.splitlines()[0] == "[1.0]", end.stderr


def test_a_process_ends_without_a_signal_while_the_store_is_silent(ended):
    _, end = ended("a silent store")
    assert "ValueError: it is silent" in end.stderr
    assert end.returncode == 1


def test_a_process_ends_without_a_signal_while_a_collective_of_its_own_still_fails(ended):
    left, failed = ended("a collective that outlives the interpreter")
    assert "it fails while rank 0 takes leave" in failed.stderr
    assert left.returncode == 0, left.stderr
