"""The program of the page is preempted under launchers, starts again, and ends as without an interruption."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import preloaded
import pytest
from documented import ROOT, blocks
from launching import TORCHRUN, Finished, clean_environment, run_command, run_ranks

from gradcomp.exchange import checkpoint

#: What the page's program does more: who is named by STRIKE, "rank" (1) or "agent" (the launcher), gets SIGTERM in the
#: first life. A save takes SLOW seconds longer. What leaves by itself leaves a file.
PROLOGUE = """
import atexit, json, os, random, signal, threading, time
import gradcomp.exchange.checkpoint as written
place = os.environ.get("RANK") or os.environ["SLURM_PROCID"]
first_life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
strike = os.environ.get("STRIKE") if first_life else None
write_files, slow = written.write_files, float(os.environ.get("SLOW", 0))
written.write_files = lambda *given: (time.sleep(slow), write_files(*given))[1]
atexit.register(lambda: open(f"left-{place}", "a").write("1"))

def hit():
    while "loss" not in globals():  # it trains
        time.sleep(0.01)
    time.sleep(random.uniform(0, 0.15))
    os.kill(os.getpid() if strike == "rank" else os.getppid(), signal.SIGTERM)

if (strike, place) in (("rank", "1"), ("agent", "0")):
    threading.Thread(target=hit, daemon=True).start()
"""
EPILOGUE = """
import hashlib
flat = torch.cat([p.detach().flatten() for p in model.parameters()]).numpy().tobytes()
with open(f"result-{place}", "w") as file:
    json.dump([hashlib.sha256(flat).hexdigest(), first], file)
"""


def program(directory: Path, replaced: Mapping[str, str] = MappingProxyType({})) -> Path:
    code = blocks(ROOT / "docs/preemption.md")[0][1]
    for old, new in replaced.items():
        assert code.count(old) == 1
        code = code.replace(old, new)
    directory.mkdir(exist_ok=True)
    path = directory / "train.py"
    path.write_text(f"import os; os.chdir({str(directory)!r})\n{PROLOGUE}\n{code}\n{EPILOGUE}")
    return path


def plain(directory: Path, **env: str) -> list[Finished]:
    return run_ranks(program(directory).read_text(), 2, env=env, imported=preloaded.TORCH)


def results(directory: Path) -> list[Any]:
    return [json.loads((directory / f"result-{rank}").read_text()) for rank in range(2)]


def lives(directory: Path) -> list[int]:
    """How often each rank has left by itself."""
    paths = [directory / f"left-{rank}" for rank in range(2)]
    return [len(path.read_text()) if path.exists() else 0 for path in paths]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A digest of the parameters without an interruption."""
    directory = tmp_path_factory.mktemp("whole")
    assert [one.returncode for one in plain(directory)] == [0, 0]
    (digest, first), other = results(directory)
    assert other == [digest, first] == [digest, 0]
    return digest


def check_resumed(directory: Path, whole: str) -> None:
    """It went on from a checkpoint in the middle."""
    for digest, first in results(directory):
        assert 0 < first < 300
        assert digest == whole


def torchrun(directory: Path, *options: str, forks: bool = True, **env: str) -> Finished:
    path = program(directory)
    command = (
        preloaded.program(preloaded.TORCH, clean_environment(), path)
        if forks
        else [sys.executable, str(path)]
    )
    return run_command([*TORCHRUN[:-1], *options, TORCHRUN[-1], *command], env=env)


def test_plain_processes_leave_together_and_go_on(tmp_path: Path, whole: str):
    ended = plain(tmp_path, STRIKE="rank")
    assert [one.returncode for one in ended] == [75, 75], ended[1].stderr
    assert not (tmp_path / "result-0").exists()
    assert [one.returncode for one in plain(tmp_path)] == [0, 0]
    check_resumed(tmp_path, whole)


def test_torchrun_restarts_all_when_one_rank_is_preempted(tmp_path: Path, whole: str):
    done = torchrun(tmp_path, "--max-restarts=3", STRIKE="rank")
    assert done.returncode == 0, done.stderr
    check_resumed(tmp_path, whole)


@pytest.mark.full
@pytest.mark.parametrize(
    ("options", "seconds"),
    [
        pytest.param(["--shutdown-timeout=8"], 5.0, id="a shorter period"),
        pytest.param([], 25.0, id="the default"),
    ],
)
def test_a_save_of_most_of_torchruns_period_is_complete(
    tmp_path: Path, whole: str, options: list[str], seconds: float
):
    done = torchrun(tmp_path, *options, forks=False, STRIKE="agent", SLOW=str(seconds))
    assert done.returncode == 1, done.stderr
    assert lives(tmp_path) == [1, 1]
    assert len(checkpoint.complete(tmp_path / "checkpoint")) == 1
    assert [one.returncode for one in plain(tmp_path)] == [0, 0]
    check_resumed(tmp_path, whole)


@pytest.mark.full
def test_a_save_that_is_longer_than_the_period_leaves_the_checkpoint_before(tmp_path: Path, whole: str):
    ended = plain(tmp_path, STRIKE="rank")
    assert [one.returncode for one in ended] == [75, 75]
    before = checkpoint.complete(tmp_path / "checkpoint")
    done = torchrun(tmp_path, "--shutdown-timeout=2", forks=False, STRIKE="agent", SLOW="60")
    assert done.returncode == 1, done.stderr
    assert lives(tmp_path) == [1, 1]  # none in this life
    assert checkpoint.complete(tmp_path / "checkpoint") == before
    assert [one.returncode for one in plain(tmp_path)] == [0, 0]
    check_resumed(tmp_path, whole)


@pytest.mark.full
@pytest.mark.network
def test_slurm_signals_before_the_time_limit(tmp_path: Path, slurm):
    """Slurm looks every 30 s whether a signal is due, and gives notice up to 60 s early."""
    path = program(
        tmp_path,
        {"STEPS = 300": "STEPS = 1_000_000", "    opt.step()\n": "    opt.step()\n    time.sleep(0.01)\n"},
    )
    options = ["-N", "1", "-n", "2", "--time=1", "--signal=TERM@10"]
    done = run_command([*slurm.srun(), *options, sys.executable, str(path)], env=slurm.environment())
    assert done.returncode == 75, done.stdout + done.stderr
    assert lives(tmp_path) == [1, 1]
    assert len(checkpoint.complete(tmp_path / "checkpoint")) == 1
