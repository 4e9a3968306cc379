"""How ranks that only serve end: with the trainers, whoever of them leaves."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import preloaded
import pytest
from launching import Finished, run_ranks
from transport_engines import no_mpi, under_mpiexec

pytestmark = pytest.mark.alone

PROGRAM = """
import json, os, signal, sys, time
import torch
import gradcomp.torch as gc

scenario, transport = sys.argv[1:] or ("", os.environ["OVER"])
rank = int(os.environ["RANK"])

def say(**what):
    print(json.dumps(dict(what, at=time.time())) + "\\n", end="", flush=True)  # one write: mpiexec mixes them

gc.init(reduction="parameter_server:dedicated=true", timeout_seconds=20, slice_elements=64, log_level="info",
        transport=transport)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8))
opt = gc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(),
                              gc.Policy("quantize:bits=4", filter=gc.Filter(min_elements=8)))
try:
    if scenario == "server does not serve" and opt.serves:
        sys.exit(0)
    if opt.serves:
        def update():
            opt.step()
            if scenario == "server killed" and opt.statistics().steps == 5:
                say(event="fault")
                os.kill(os.getpid(), signal.SIGKILL)
        say(event="served", steps=opt.serve(update))
    else:
        for step in range(10):
            if scenario in ("trainer killed", "all trainers killed") and step == 5:
                if rank == 2 or scenario == "all trainers killed":
                    say(event="fault")
                    os.kill(os.getpid(), signal.SIGKILL)
            opt.zero_grad()
            model(torch.ones(4, 8) * rank).square().mean().backward()
            opt.step()
    say(event="end", sum=sum(p.double().sum().item() for p in model.parameters()))
except gc.TransportError as error:
    say(event="error", text=str(error))
    raise
"""


Run = tuple[list[Finished], list[dict[str, dict]]]
SCENARIOS = [
    *[("trainer killed", "torch"), ("all trainers killed", "torch"), ("server killed", "torch")],
    *[("", "torch"), ("", "shm"), ("server does not serve", "torch")],
]


def launch(scenario: str, transport: str) -> Run:
    ended = run_ranks(PROGRAM, 3, arguments=(scenario, transport), timeout=50, imported=preloaded.TORCH)
    said = [{one["event"]: one for one in map(json.loads, end.stdout.splitlines())} for end in ended]
    return ended, said


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[..., Run]]:
    """``run(scenario, transport)``: how its ranks ended. Three run beside each other, for they mostly wait."""
    with ThreadPoolExecutor(3) as pool:
        running = {case: pool.submit(launch, *case) for case in SCENARIOS}
        yield lambda scenario, transport="torch": running[scenario, transport].result()


@pytest.mark.parametrize("transport", ["torch", "shm"])
def test_the_end_of_the_trainers_program_ends_a_servers(run, transport: str):
    """Nobody calls done(), or shutdown()."""
    ended, said = run("", transport)
    assert [end.returncode for end in ended] == [0, 0, 0], ended
    assert said[0]["served"]["steps"] == 10
    assert len({one["end"]["sum"] for one in said}) == 1
    assert "the first 1 of 3 ranks only serve" in ended[0].stderr
    assert max(one["end"]["at"] for one in said) - min(one["end"]["at"] for one in said) < 8


@pytest.mark.full
@pytest.mark.skipif(bool(no_mpi()), reason=no_mpi())
def test_under_mpi_servers_hear_of_the_end_before_mpi_ends():
    end = under_mpiexec(
        PROGRAM.replace('int(os.environ["RANK"])', 'int(os.environ["PMI_RANK"])'), 3, {"OVER": "mpi"}
    )
    assert end.returncode == 0, end.stderr[-3000:]
    said = [json.loads(line) for line in end.stdout.splitlines()]
    assert [one["steps"] for one in said if one["event"] == "served"] == [10]
    sums = [one["sum"] for one in said if one["event"] == "end"]
    assert sums == [sums[0]] * 3


@pytest.mark.parametrize(
    ("scenario", "victims"),
    [
        ("trainer killed", [2]),
        ("all trainers killed", [1, 2]),
        ("server killed", [0]),
    ],
)
def test_who_is_left_raises_soon(run, scenario: str, victims: list[int]):
    ended, said = run(scenario)
    fault = max(said[victim]["fault"]["at"] for victim in victims)
    for rank in {0, 1, 2} - set(victims):
        error = said[rank]["error"]
        assert error["at"] - fault < 8
        assert any(f"rank {victim}" in error["text"] for victim in victims), error
        assert ended[rank].returncode == 1
    for victim in victims:
        assert ended[victim].returncode == -signal.SIGKILL


def test_a_server_that_ends_without_serving_says_so_to_the_trainers(run):
    ended, said = run("server does not serve")
    assert ended[0].returncode == 0
    for rank in (1, 2):
        assert "only serves, and ended without opt.serve()" in said[rank]["error"]["text"]
        assert ended[rank].returncode == 1
