"""An elastic job under horovodrun: it outlives a killed process, and takes in what the discovery script finds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from gradcomp.job.jobstore import serve_alone

PROGRAM = """
    import hashlib, json, os, sys, time
    from pathlib import Path
    import torch
    import gradcomp.torch as gc

    said = Path(sys.argv[1], f"{os.getpid()}.jsonl").open("a", buffering=1)
    say = lambda **values: said.write(json.dumps(values) + "\\n")
    say(pid=os.getpid(), host=os.environ["HOROVOD_HOSTNAME"])
    gc.init(timeout_seconds=60, min_ranks=2)
    model = torch.nn.Linear(40, 64)
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    opt = gc.DistributedOptimizer(opt, model.named_parameters(), compression="topk:density=0.05")
    state = gc.elastic.TorchState(model, opt, step=0, sizes=[])


    @gc.elastic.run
    def train(state):
        state.sizes = [*state.sizes, gc.size()]
        say(size=gc.size(), step=state.step)
        # It ends once it has grown again after it had shrunk.
        while state.sizes[-2:] != [2, 3] or state.step < 40:
            opt.zero_grad()
            model(torch.randn(8, 40)).square().sum().backward()
            opt.step()
            state.step += 1
            state.commit()
            time.sleep(0.02)


    train(state)
    say(sizes=state.sizes, digest=hashlib.sha256(model.weight.detach().numpy().tobytes()).hexdigest())
"""


@pytest.mark.full
def test_horovodrun_goes_on_after_a_kill_and_starts_what_its_script_finds(horovodrun, tmp_path) -> None:
    hosts, script, program = tmp_path / "hosts", tmp_path / "discover.sh", tmp_path / "program.py"
    hosts.write_text("localhost:2\n127.0.0.1:1\n")
    script.write_text(f"#!/bin/sh\ncat {hosts}\n")
    script.chmod(0o755)
    program.write_text(textwrap.dedent(PROGRAM))
    store = serve_alone("127.0.0.1", 0)
    limits = ["-np", "3", "--min-np", "2", "--max-np", "3", "--host-discovery-script", str(script)]
    log = (tmp_path / "log").open("w")
    job = subprocess.Popen(
        [*horovodrun, "--gloo", *limits, sys.executable, str(program), str(tmp_path)],
        env={**os.environ, "GRADCOMP_STORE": f"127.0.0.1:{store.port}"}, stdout=log, stderr=log, start_new_session=True,
    )  # fmt: skip
    try:
        _until(tmp_path, lambda said: sum(one.get("size") == 3 for one in said) == 3, job)
        other = next(one for one in _said(tmp_path) if one.get("host") == "127.0.0.1")
        os.kill(other["pid"], signal.SIGKILL)
        _until(tmp_path, lambda said: sum(one.get("size") == 2 for one in said) == 2, job)
        hosts.write_text("localhost:3\n")
        assert job.wait(90) == 0, (tmp_path / "log").read_text()
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    results = [one for one in _said(tmp_path) if "digest" in one]
    assert len(results) == 3, "a process of the driver's has joined"
    assert len({one["digest"] for one in results}) == 1
    assert {tuple(one["sizes"][-2:]) for one in results} == {(2, 3)}


def _said(directory: Path) -> list[dict[str, Any]]:
    lines = [line for path in directory.glob("*.jsonl") for line in path.read_text().splitlines()]
    return [json.loads(line) for line in lines if line.endswith("}")]


def _until(directory: Path, condition: Any, job: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 90
    while not condition(_said(directory)):
        assert time.monotonic() < deadline, (directory / "log").read_text()
        assert job.poll() is None, (directory / "log").read_text()
        time.sleep(0.05)
