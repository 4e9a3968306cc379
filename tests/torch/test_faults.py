"""Ranks that die, raise, stop or sleep: the others say who and where, soon, and every process ends by itself.

Ranks are started without torchrun, which ends the survivors of a dead rank before they can report.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import preloaded
import pytest
from launching import Finished, run_ranks

pytestmark = pytest.mark.alone

WORLD = 3
TIMEOUT = 3.0
#: The promise is 5 s; the rest is for a busy machine.
SOON = 8.0
#: To end an interpreter with torch in it takes seconds where the machine is busy; a hang would last until the deadline.
TEARDOWN = 20.0
VICTIM_STEP = 6

PROGRAM = """
import json, os, signal, subprocess, sys, time
from dataclasses import replace
import torch
import gradcomp.torch as gc
from gradcomp.job import runtime

rank = int(os.environ["RANK"])
victim = {victim}
step = 0

def say(**what):
    print(json.dumps(dict(what, at=time.time(), step=step)), flush=True)

def fault():
    if rank != victim or step != {step}:
        return
    say(event="fault")
    {fault}

def stop_for(seconds):
    subprocess.Popen(["sh", "-c", f"sleep {{seconds}}; kill -CONT {{os.getpid()}}"])
    os.kill(os.getpid(), signal.SIGSTOP)

class Fault(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, g):
        if {where!r} == "backward":
            fault()
        return g

gc.init(timeout_seconds=60, stall_warning_seconds=1, log_level="warning", slice_elements=64)
state = runtime.current()  # a busy machine may need longer for init() than for all that comes behind it
state.config = replace(state.config, timeout_seconds={timeout})
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8))
optimizer = gc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(),
                                    gc.Policy("quantize:bits=4", filter=gc.Filter(min_elements=8)))
if {where!r} == "step":
    optimizer.register_step_post_hook(lambda *_: fault())
try:
    for step in range(10):
        optimizer.zero_grad()
        if {where!r} == "between":
            fault()
        model[2](Fault.apply(model[1](model[0](torch.ones(4, 8))))).square().mean().backward()
        optimizer.step()
    say(event="end")
except gc.TransportError as error:
    say(event="error", text=str(error))
    {after}
"""


class Scenario(NamedTuple):
    fault: str
    where: str = "backward"
    victim: int = 1
    after: str = "raise"
    step: int = VICTIM_STEP
    timeout: float = TIMEOUT
    world: int = WORLD


KILL = "os.kill(os.getpid(), signal.SIGKILL)"

#: Those that take longest come first.
SCENARIOS = {
    "stopped": Scenario("stop_for(8)"),
    "stopped, hosts the store": Scenario("stop_for(8)", victim=0, after="pass", world=2),
    "sleeps too long": Scenario(f"time.sleep({TIMEOUT + 3})", where="between", after="pass"),
    "sleeps": Scenario("time.sleep(2)", where="between"),
    "killed": Scenario(KILL),
    "killed, hosts the store": Scenario(KILL, victim=0, world=2),
    "killed between steps": Scenario(KILL, where="step", step=2, after="pass", world=2),
    "raises": Scenario("raise ValueError('boom')", timeout=60.0, world=2),
    "ends early": Scenario("sys.exit(0)", where="between", world=2),
}


class Ended:
    """How a rank ended, and what it said."""

    def __init__(self, finished: Finished) -> None:
        self.returncode, stdout, self.stderr, self.at = finished
        self.said = [json.loads(line) for line in stdout.splitlines()]

    def event(self, name: str) -> dict:
        found = [line for line in self.said if line["event"] == name]
        assert found, f"no {name}: {self.said}, exit {self.returncode}\n{self.stderr[-3000:]}"
        return found[0]


def run(imported: tuple[str, ...], scenario: Scenario) -> list[Ended]:
    program = PROGRAM.format(**scenario._asdict())
    return [Ended(end) for end in run_ranks(program, scenario.world, imported=imported)]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(preloaded.TORCH, id="fork"),
        pytest.param((), id="interpreter", marks=pytest.mark.full),
    ],
)
def outcome(request: pytest.FixtureRequest) -> Callable[[str], list[Ended]]:
    """Outcomes by scenario; those that the session's tests need run beside each other, for they mostly wait."""
    at_once = 5 if request.param else 3
    wanted = [item for item in request.session.items if item.path == request.path]
    names = [
        name for name in SCENARIOS if any(name == getattr(item.function, "scenario", "") for item in wanted)
    ]
    with ThreadPoolExecutor(at_once) as pool:
        one = partial(run, request.param)
        running: dict[str, Future[list[Ended]]] = {name: pool.submit(one, SCENARIOS[name]) for name in names}
        yield lambda name: running[name].result()


def of(name: str) -> Callable[[Callable], Callable]:
    """Give a test the outcome of a scenario: all ranks, the victim's number, the survivors."""

    def decorate(check: Callable[[list[Ended], int, list[Ended]], None]) -> Callable:
        def test(outcome: Callable[[str], list[Ended]]) -> None:
            ranks, victim = outcome(name), SCENARIOS[name].victim
            check(ranks, victim, [end for rank, end in enumerate(ranks) if rank != victim])

        test.scenario = name
        test.__name__, test.__doc__ = check.__name__, check.__doc__
        return test

    return decorate


def assert_named_soon(ranks, victim, survivors, within=SOON):
    begin = ranks[victim].event("fault")["at"]
    for end in survivors:
        error = end.event("error")
        assert f"rank {victim}" in error["text"]
        assert error["at"] - begin < within, error


def assert_ended_by_themselves(ends, returncode):
    for end in ends:
        assert end.returncode == returncode, end.stderr[-3000:]
        assert end.at - end.event("error")["at"] < TEARDOWN


# ---------------------------------------------------------------------------------------- what the others say


@of("killed")
def test_a_killed_rank_is_named_soon_with_step_bucket_and_layer(ranks, victim, survivors):
    assert_named_soon(ranks, victim, survivors)
    for end in survivors:
        assert f"step {VICTIM_STEP}, bucket " in end.event("error")["text"]
        assert any(
            name in end.event("error")["text"] for name in ("0.weight", "0.bias", "2.weight", "2.bias")
        )


@of("killed")
def test_survivors_of_a_killed_rank_end_by_themselves(ranks, victim, survivors):
    assert_ended_by_themselves(survivors, 1)


@of("killed, hosts the store")
def test_the_rank_that_hosts_the_store_is_named_when_killed_and_the_others_end(ranks, victim, survivors):
    assert_named_soon(ranks, victim, survivors)
    assert_ended_by_themselves(survivors, 1)
    for one in survivors:
        assert one.stderr.count("[c10d]") <= 1, one.stderr  # the store's stack


@of("killed between steps")
def test_a_rank_killed_between_steps_is_named_and_who_caught_the_error_ends_in_good_order(
    ranks, victim, survivors
):
    assert_named_soon(ranks, victim, survivors)
    assert_ended_by_themselves(survivors, 0)


@of("raises")
def test_an_uncaught_exception_is_told_to_all_others_soon_and_all_ranks_end(ranks, victim, survivors):
    assert_named_soon(ranks, victim, survivors)
    for end in survivors:
        assert "ValueError: boom" in end.event("error")["text"]
    assert_ended_by_themselves(survivors, 1)
    assert ranks[victim].returncode == 1
    assert ranks[victim].at - ranks[victim].event("fault")["at"] < TEARDOWN


@of("stopped")
def test_a_stopped_rank_is_named_at_the_deadline_with_step_bucket_and_layer(ranks, victim, survivors):
    assert_named_soon(ranks, victim, survivors, TIMEOUT + SOON)
    for end in survivors:
        assert re.search(rf"step {VICTIM_STEP}, bucket \d+, round \d \([02]\.", end.event("error")["text"])


@of("stopped")
def test_a_stopped_rank_that_goes_on_raises_and_all_ranks_end(ranks, victim, survivors):
    assert_ended_by_themselves(ranks, 1)


@of("stopped, hosts the store")
def test_the_rank_that_hosts_the_store_is_named_when_stopped_and_the_others_end(ranks, victim, survivors):
    assert_named_soon(ranks, victim, survivors, TIMEOUT + SOON)
    assert_ended_by_themselves(survivors, 0)


@of("sleeps")
def test_a_late_rank_is_waited_for_and_it_alone_is_called_late(ranks, victim, survivors):
    for end in ranks:
        assert end.returncode == 0, end.stderr[-3000:]
        end.event("end")
    for end in survivors:
        assert f"at step {VICTIM_STEP}, bucket 0" in end.stderr
        assert re.search(rf"rank {victim} \(host \S+\) has only reached step {VICTIM_STEP}", end.stderr)
        assert set(re.findall(r"rank (\d+) \(host \S+\) has only reached", end.stderr)) == {str(victim)}


@of("sleeps too long")
def test_past_the_deadline_all_ranks_raise_and_name_the_late_one_and_end(ranks, victim, survivors):
    assert_named_soon(ranks, victim, survivors, TIMEOUT + SOON)
    assert f"rank {victim}" in ranks[victim].event("error")["text"]
    assert_ended_by_themselves(ranks, 0)


@of("ends early")
def test_a_rank_that_ends_early_is_named_and_all_ranks_end(ranks, victim, survivors):
    assert_named_soon(ranks, victim, survivors, TIMEOUT + SOON)
    assert_ended_by_themselves(survivors, 1)
    assert ranks[victim].returncode == 0
