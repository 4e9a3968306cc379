"""Measure the time from the loss of one of three ranks, by SIGKILL or with its host, to the others' next step.

python benchmarks/elastic.py --kills 5
python benchmarks/elastic.py --kills 3 --launcher torchrun --out elastic.json
python benchmarks/elastic.py --kills 3 --lose host      # its link goes down instead; needs root
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import hosts

from gradcomp.job.jobstore import serve_alone

WORLD = 3
#: Every rank writes the time of each step to a file of its own.
PROGRAM = """
    import os, sys, time
    import torch
    import gradcomp.torch as gc

    gc.init(log_level="error")
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8)))
    opt = torch.optim.SGD(model.parameters(), lr=0.001)
    opt = gc.DistributedOptimizer(opt, model.named_parameters(), compression="quantize:bits=4,feedback=true")
    directory = sys.argv[2] if len(sys.argv) > 2 else None
    state = gc.elastic.TorchState(model, opt, directory=directory, directory_every=10, step=0)


    @gc.elastic.run
    def train(state):
        with open(f"{sys.argv[1]}/{os.getpid()}", "a") as steps:
            while True:
                opt.zero_grad()
                model(torch.randn(16, 512)).square().mean().backward()
                opt.step()
                state.step += 1
                steps.write(f"{time.time()} {gc.size()} {state.step}\\n")
                steps.flush()
                if state.step % 10 == 0:
                    state.commit()


    train(state)
"""


def _steps(directory: Path) -> dict[int, list[list[float]]]:
    found = {}
    for path in directory.iterdir():
        lines = [line.split() for line in path.read_text().splitlines()]
        found[int(path.name)] = [[float(item) for item in line] for line in lines if len(line) == 3]
    return found


def _wait(directory: Path, since: float, ranks: int, size: int) -> float:
    """Return when ``ranks`` processes had completed a step in a job of ``size`` after a moment."""
    for _ in range(12_000):
        firsts = [
            min((at for at, world, _ in lines if at > since and world == size), default=0.0)
            for lines in _steps(directory).values()
        ]
        if len(there := [at for at in firsts if at]) >= ranks:
            return max(there)
        time.sleep(0.01)
    raise SystemExit("no step was completed within two minutes")


def measure_plain(program: Path, directory: Path) -> float:
    """Return the seconds from a kill to the next step, without a launcher."""
    store = serve_alone("127.0.0.1", 0)
    environment = {
        **os.environ,
        "GRADCOMP_STORE": f"127.0.0.1:{store.port}",
        "GRADCOMP_MIN_RANKS": str(WORLD - 1),
    }
    command = [sys.executable, str(program), str(directory)]
    ranks = [subprocess.Popen(command, env={**environment, "OMP_NUM_THREADS": "1"}) for _ in range(WORLD)]
    try:
        _wait(directory, 0.0, WORLD, WORLD)
        time.sleep(1.0)
        killed = time.time()
        ranks[0].kill()
        return _wait(directory, killed, WORLD - 1, WORLD - 1) - killed
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def measure_host(program: Path, directory: Path) -> float:
    """Return the seconds from the loss of a host's link to the next step of the others; the store has a host too."""
    with hosts.Hosts(WORLD + 1) as made:
        store = f"{made.addresses[0]}:{hosts.PORT}"
        serve = ["-m", "gradcomp", "store", "--host", made.addresses[0], "--port", str(hosts.PORT)]
        made.start(0, [sys.executable, *serve], stdout=subprocess.DEVNULL)
        environment = {"GRADCOMP_STORE": store, "GRADCOMP_MIN_RANKS": str(WORLD - 1), "OMP_NUM_THREADS": "1"}
        # What torchrun would set makes no elastic job; the interface stays.
        told = made.environment(0).keys() - {"GLOO_SOCKET_IFNAME"}
        plain = ["env", *(f"--unset={name}" for name in told)]
        time.sleep(5.0)  # until the store listens
        for host in range(1, WORLD + 1):
            made.start(host, [*plain, sys.executable, str(program), str(directory)], environment)
        _wait(directory, 0.0, WORLD, WORLD)
        time.sleep(1.0)
        lost = time.time()
        subprocess.run(["ip", "-n", made.names[WORLD], "link", "set", hosts.INTERFACE, "down"], check=True)
        return _wait(directory, lost, WORLD - 1, WORLD - 1) - lost


def measure_horovodrun(program: Path, directory: Path) -> float:
    """Return the seconds from a kill to the next step under horovodrun, whose driver then gives the host up."""
    store, script = serve_alone("127.0.0.1", 0), directory.with_name("discover.sh")
    script.write_text("#!/bin/sh\necho localhost:2; echo 127.0.0.1:1\n", encoding="utf-8")
    script.chmod(0o755)
    command = [
        Path(sys.executable).with_name("horovodrun"),
        "--disable-cache",
        "--gloo",
        "-np",
        WORLD,
        "--min-np",
    ]
    command += [WORLD - 1, "--host-discovery-script", script, sys.executable, program, directory]
    environment = {"GRADCOMP_STORE": f"127.0.0.1:{store.port}", "GRADCOMP_MIN_RANKS": str(WORLD - 1)}
    job = subprocess.Popen(
        [str(part) for part in command],
        env={**os.environ, **environment, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        _wait(directory, 0.0, WORLD, WORLD)
        time.sleep(1.0)
        alone = b"HOROVOD_HOSTNAME=127.0.0.1"
        victim = next(pid for pid in _steps(directory) if alone in Path(f"/proc/{pid}/environ").read_bytes())
        killed = time.time()
        os.kill(victim, signal.SIGKILL)
        return _wait(directory, killed, WORLD - 1, WORLD - 1) - killed
    finally:
        for pid in _steps(directory):
            if Path(f"/proc/{pid}").exists():
                os.kill(pid, signal.SIGKILL)
        job.kill()
        job.wait()


def measure_torchrun(program: Path, directory: Path) -> float:
    """Return the seconds from a kill to the next step, where torchrun restarts all workers."""
    options = ["--nnodes=1:4", f"--nproc-per-node={WORLD}", "--max-restarts=3", "--rdzv-backend=c10d"]
    options += ["--rdzv-endpoint=127.0.0.1:0", "--rdzv-conf=last_call_timeout=2"]
    commits = directory.with_name("commits")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        *options,
        str(program),
        str(directory),
        str(commits),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    torchrun = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        _wait(directory, 0.0, WORLD, WORLD)
        time.sleep(3.0)
        before = _steps(directory)
        killed = time.time()
        os.kill(min(before), signal.SIGKILL)
        while True:
            fresh = {pid: lines for pid, lines in _steps(directory).items() if pid not in before and lines}
            if len(fresh) == WORLD:
                return max(lines[0][0] for lines in fresh.values()) - killed
            time.sleep(0.01)
    finally:
        os.killpg(torchrun.pid, signal.SIGTERM)
        torchrun.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=5, help="how many jobs lose a rank (default: 5)")
    parser.add_argument("--launcher", choices=("none", "torchrun", "horovodrun"), default="none")
    parser.add_argument("--lose", choices=("process", "host"), default="process", help="what is lost")
    parser.add_argument("--out", type=Path, help="JSON of all times")
    given = parser.parse_args()
    by_launcher = {"none": measure_plain, "torchrun": measure_torchrun, "horovodrun": measure_horovodrun}
    measure = by_launcher[given.launcher]
    if given.lose == "host":
        if given.launcher != "none":
            parser.error("--lose host starts its processes itself: leave --launcher away")
        measure = measure_host
    times = []
    for _ in range(given.kills):
        with tempfile.TemporaryDirectory(prefix="gradcomp-elastic-") as directory:
            program, steps = Path(directory) / "program.py", Path(directory) / "steps"
            program.write_text(textwrap.dedent(PROGRAM), encoding="utf-8")
            steps.mkdir()
            times.append(measure(program, steps))
    print("| launcher, lost | times | least s | median s | most s |")
    print("|---|---|---|---|---|")
    row = [min(times), statistics.median(times), max(times)]
    print(
        f"| {given.launcher}, a {given.lose} | {len(times)} | "
        + " | ".join(f"{value:.2f}" for value in row)
        + " |"
    )
    if given.out:
        told = {
            "launcher": given.launcher,
            "lost": given.lose,
            "seconds": times,
            "machine": platform.processor() or platform.machine(),
        }
        given.out.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
