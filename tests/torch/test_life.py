"""How processes begin and end, under torchrun and without."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import preloaded
import pytest
from launching import clean_environment, plain_variables, run_ranks, run_torchrun
from ports import free_port

from gradcomp.cli import main

TRAIN = """
import sys
import torch
import gradcomp.torch as gc

gc.init()
model = torch.nn.Linear(64, 64)
gc.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = gc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(),
                                    "quantize:bits=4")
for step in range(12):
    optimizer.zero_grad()
    model(torch.full((2, 64), 1.0 + gc.rank())).square().mean().backward()
    optimizer.step()
print(gc.rank(), gc.size(), gc.local_rank(), gc.local_size(), float(model.weight.detach().sum()))
"""


either = pytest.mark.parametrize(
    "launch",
    [
        pytest.param(functools.partial(run_ranks, imported=preloaded.TORCH), id="forks"),
        pytest.param(run_ranks, id="interpreters", marks=pytest.mark.full),
    ],
)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(preloaded.TORCH, id="forks"),
        pytest.param((), id="interpreters", marks=pytest.mark.full),
    ],
)
def under_torchrun(request, tmp_path_factory):
    """The ends of two ranks, and the folder with their timelines."""
    folder = tmp_path_factory.mktemp("timelines")
    environment = {"GRADCOMP_TIMELINE": str(folder / "{rank}.json")}
    return run_torchrun(TRAIN, 2, imported=request.param, env=environment), folder


def test_torchrun_ranks_end_in_good_order_without_shutdown_and_train_alike(under_torchrun):
    ends, _ = under_torchrun
    assert [end.returncode for end in ends] == [0, 0], ends[0].stderr
    first, second = (end.stdout.split() for end in ends)
    assert (first[:4], second[:4]) == (["0", "2", "0", "2"], ["1", "2", "1", "2"])
    assert first[4] == second[4]


def test_the_banner_is_rank_0s_alone_and_a_whole_run_leaves_timelines(under_torchrun):
    (first, second), folder = under_torchrun
    assert "2 ranks on 1 host by torchrun" in first.stderr
    assert "compressed; exact" in first.stderr
    assert "gradcomp" not in second.stderr
    for rank in range(2):
        events = json.loads((folder / f"{rank}.json").read_text())["traceEvents"]
        spans = [e["args"] for e in events if e["ph"] == "X"]
        assert {args["step"] for args in spans if "step" in args} == set(range(12))


def test_timelines_of_ranks_whose_clocks_differ_become_one_trace(under_torchrun, tmp_path, capsys):
    """Rank 1's clock is changed; in the trace its times are as far from the true ones as the table says, at most."""
    _, folder = under_torchrun
    content = json.loads((folder / "1.json").read_text())
    head = content["traceEvents"][0]["args"]
    head["clock"], head["zero"] = "another host", head["zero"] + 4711.5
    changed = tmp_path / "changed.json"
    changed.write_text(json.dumps(content))
    spans = []
    for number, second in enumerate((folder / "1.json", changed)):
        out = tmp_path / f"{number}.json"
        assert main(["trace", str(folder / "0.json"), str(second), "-o", str(out), "--json"]) == 0
        events = json.loads(out.read_text())["traceEvents"]
        spans.append({
            (e["pid"], e["tid"], e["name"], e["args"]["step"], e["args"].get("round")): e["ts"] + e["dur"]
            for e in events
            if e["ph"] == "X" and "step" in e["args"]
        })  # fmt: skip
        capsys.readouterr()
        bound = json.loads(out.read_text())["otherData"]["ranks"][1]["error_bound_ms"]
    true, aligned = spans
    assert true.keys() == aligned.keys()
    assert {step for *_, step, _ in true} == set(range(12))
    own = {key: aligned[key] - true[key] for key in true}
    zero = own[next(key for key in own if key[0] == 0)]  # the first event may be another rank's
    assert 0 < bound < 1000
    assert max(abs(shift - zero) for shift in own.values()) <= 1e3 * bound + 1


@either
def test_a_plain_python_is_a_world_of_one_and_says_so(launch):
    (end,) = launch(TRAIN, 1, env=lambda _: {})
    assert end.returncode == 0, end.stderr
    assert end.stdout.split()[:4] == ["0", "1", "0", "1"]
    assert "nothing is exchanged, compression is bypassed" in end.stderr


@either
@pytest.mark.parametrize(
    "ending", ["gc.shutdown()", "model(torch.ones(1, 64)).sum().backward(); sys.exit(0)"]
)
def test_every_ending_is_clean(launch, ending):
    for end in launch(TRAIN + ending + "\n", 2):
        assert end.returncode == 0, end.stderr
        assert "Traceback" not in end.stderr
        assert "terminate" not in end.stderr


#: Both ranks step once. Then rank 0 is in code of its own, and rank 1 waits for it in a second step. With "go on" they
#: both step for three seconds more. Each appends to a file of its own what it has come to.
LAUNCHED = """
import os, sys, time
from pathlib import Path
import torch
import gradcomp.torch as gc

gc.init()
file = Path(sys.argv[1], str(gc.rank()))
model = torch.nn.Linear(64, 64)
gc.broadcast_parameters(model.state_dict(), root_rank=0)
opt = gc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), "quantize:bits=4")

def step():
    opt.zero_grad()
    model(torch.randn(2, 64)).square().mean().backward()
    opt.step()

def say(text):
    with file.open("a") as out:
        print(text, file=out)

step()
say(os.getpid())
if sys.argv[2:] == ["go on"]:
    while not Path(sys.argv[1], "gone").exists():
        time.sleep(0.02)
    for _ in range(30):
        time.sleep(0.1)
        step()
    say("done")
elif gc.rank() == 0:
    time.sleep(600)
else:
    try:
        step()
    except gc.TransportError as error:
        say(error)
        raise
"""


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts a command in a session of its own, its output in a file; nothing of it is left behind the test."""
    (tmp_path / "program.py").write_text(LAUNCHED)
    processes = []

    def start(*command: str, **variables: str) -> subprocess.Popen[bytes]:
        environment = {**clean_environment(), "TMPDIR": str(tmp_path), **variables}
        with (tmp_path / "output").open("ab") as output:
            process = subprocess.Popen(
                command, env=environment, stdout=output, stderr=output, cwd=tmp_path, start_new_session=True
            )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.wait()
    for file in (tmp_path / "0", tmp_path / "1"):
        with contextlib.suppress(OSError, ValueError):
            os.kill(int(file.read_text().split()[0]), signal.SIGKILL)


def lines(tmp_path: Path, count: int, seconds: float = 60.0) -> list[list[str]]:
    """What both ranks have written, once these are so many lines."""
    deadline = time.monotonic() + seconds
    files = (tmp_path / "0", tmp_path / "1")
    while True:
        found = [file.read_text().splitlines() if file.exists() else [] for file in files]
        if all(len(of_rank) >= count for of_rank in found):
            return found
        assert time.monotonic() < deadline, (found, (tmp_path / "output").read_text())
        time.sleep(0.05)


def runs(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


@pytest.mark.alone
def test_ranks_end_within_ten_seconds_of_their_launcher(started, tmp_path):
    launcher = started(*TORCHRUN, "program.py", str(tmp_path))
    ranks = [of_rank[0] for of_rank in lines(tmp_path, 1)]
    launcher.kill()  # a zombie from now on, as its parent does not look
    killed = time.monotonic()
    while any(map(runs, ranks)):
        assert time.monotonic() - killed < 10, [runs(rank) for rank in ranks]
        time.sleep(0.1)
    _, (_, told) = lines(tmp_path, 1)
    assert told
    output = (tmp_path / "output").read_text()
    assert "rank 0: torchrun (process " in output  # in no call of ours: by the log, and SIGTERM
    assert not list(tmp_path.glob("gradcomp*"))  # where temporary files would be


@pytest.mark.alone
@pytest.mark.parametrize("how", ["by hand", pytest.param("torchrun", marks=pytest.mark.full)])
def test_what_a_shell_has_started_lives_on_without_it(started, tmp_path, how):
    port = str(free_port())
    rest = f"program.py {tmp_path} 'go on' & wait"
    if how == "torchrun":
        shells = [started("sh", "-c", f"setsid {' '.join(TORCHRUN)} {rest}")]
    else:
        shells = [
            started("sh", "-c", f"{alone} {sys.executable} {rest}", **plain_variables(rank, 2, port))
            for rank, alone in enumerate(["nohup", "setsid"])
        ]
    lines(tmp_path, 1)
    for shell in shells:
        shell.kill()
        shell.wait()
    (tmp_path / "gone").touch()
    assert [of_rank[1] for of_rank in lines(tmp_path, 2)] == ["done", "done"]
