"""Ten planted faults, each of which `gradcomp doctor` must name, and ten healthy jobs, on which it must find nothing.

    python benchmarks/doctor_faults.py
    python benchmarks/doctor_faults.py --only "blocked port" --json doctor.json
    python benchmarks/doctor_faults.py --accelerate PYTHON    # and what `accelerate test` says, of that interpreter

Jobs run on hosts made of network namespaces, for which it needs root. Into build/doctor it installs another NumPy,
CuPy, and gradcomp built without AVX2, for which it needs a package index and a C++ compiler; the next run finds them
there.

Columns
    found     whether a finding is about the fault, and its exit code, the same on all ranks
    others    warnings and errors that are not about the fault
    seconds   from the start of the ranks to the end of the last
    sentence  the finding
    accelerate test    how the script that it runs ends on the same hosts: its last line if it fails
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hosts
import report

import gradcomp
from gradcomp import _native
from gradcomp.kernels import dispatch
from gradcomp.version import __version__

ROOT = Path(__file__).resolve().parents[1]
SIDE = ROOT / "build" / "doctor"
NUMPY, CUPY = "2.3.5", "cupy-cuda13x>=14"
OLD_VERSION = "0.0.9"
DOCTOR = [sys.executable, "-m", "gradcomp", "doctor", "--json"]
#: One thread per rank, as torchrun sets it. The source tree, if ranks import that, is on PYTHONPATH, not beside them.
COMMON = {"OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}
_LONGEST_SECONDS, _ACCELERATE_SECONDS = 150.0, 90.0


@dataclass(frozen=True)
class Planted:
    """How one fault is planted.

    ``ranks``: variables by rank. ``plant``: a context in which the hosts have the fault. ``about`` and ``says``: the
    subject of the finding, and what its text must contain.
    """

    about: str
    says: str
    ranks: Callable[[int], Mapping[str, str]] = lambda rank: {}
    plant: Callable[[hosts.Hosts], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    hosts: int = 2
    per_host: int = 1
    absent: tuple[int, ...] = ()
    timeout: int = 30


@dataclass
class Run:
    """What one job said."""

    seconds: float
    codes: list[int]
    told: list[dict[str, Any]] = field(default_factory=list)

    @property
    def alarms(self) -> list[dict[str, Any]]:
        return [each for one in self.told for each in one["findings"] if each["level"] != "ok"]


# ------------------------------------------------------------------------------------------ what is installed


def _pip(target: Path, *arguments: str) -> Path:
    if not target.is_dir():
        print(f"installing {arguments[-1]} into {target}", file=sys.stderr)
        partial = target.with_name(f"{target.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(partial)]
        subprocess.run([*command, *arguments], check=True, stdout=sys.stderr)
        partial.rename(target)
    return target


def other_numpy() -> Path:
    return _pip(SIDE / f"numpy-{NUMPY}", f"numpy=={NUMPY}")


def cupy() -> Path:
    return _pip(SIDE / "cupy", CUPY)


def without_avx2() -> Path:
    """The package that ranks import, with the compiled module of a build whose compiler is not for x86-64."""
    defines = {"CMAKE_SYSTEM_NAME": "Linux", "CMAKE_SYSTEM_PROCESSOR": "generic"}
    settings = [f"--config-settings=cmake.define.{name}={value}" for name, value in defines.items()]
    settings.append(f"--config-settings=build-dir={SIDE / 'cmake'}")
    built = _pip(SIDE / f"built-{dispatch.digest(ROOT)[:12]}", "--no-build-isolation", *settings, str(ROOT))
    (module,) = (built / "gradcomp").glob("_native*.so")
    return _copy("baseline", __version__, module)


def old_version() -> Path:
    """The package that ranks import, of an earlier version by its metadata."""
    return _copy("old", OLD_VERSION, Path(str(_native.__file__)))


def _copy(name: str, version: str, module: Path) -> Path:
    target = SIDE / name
    shutil.rmtree(target, ignore_errors=True)
    ignored = shutil.ignore_patterns("__pycache__", "_native*.so")
    shutil.copytree(gradcomp.__path__[0], target / "gradcomp", ignore=ignored)
    shutil.copy(module, target / "gradcomp")
    metadata = target / f"gradcomp-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: gradcomp\nVersion: {version}\n")
    return target


def first_on_path(directory: Path) -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(directory), os.environ.get("PYTHONPATH")]))}


# ------------------------------------------------------------------------------------------ faults


def _in(made: hosts.Hosts, host: int, *command: str) -> None:
    subprocess.run(["ip", "netns", "exec", made.names[host], *command], check=True)


@contextlib.contextmanager
def another_interface(made: hosts.Hosts) -> Iterator[None]:
    """The second host is in a network that no other host is in. Of two ranks Gloo's lower address is connected to."""
    _in(made, 1, "ip", "link", "add", "eth1", "type", "veth", "peer", "name", "eth1-peer")
    _in(made, 1, "ip", "address", "add", "10.7.7.2/24", "dev", "eth1")
    for name in ("eth1", "eth1-peer"):
        _in(made, 1, "ip", "link", "set", name, "up")
    yield


@contextlib.contextmanager
def slow_link(made: hosts.Hosts) -> Iterator[None]:
    made.limit(2, hosts.LINKS["10mbit"])
    yield


@contextlib.contextmanager
def blocked_port(made: hosts.Hosts) -> Iterator[None]:
    """The first host's answers from the port of the store are dropped."""
    _in(made, 0, "ip", "rule", "add", "ipproto", "tcp", "sport", str(hosts.PORT), "blackhole")
    yield


@contextlib.contextmanager
def blocked_ports(made: hosts.Hosts) -> Iterator[None]:
    """The second host may connect to the store, and its answers from all other ports are dropped."""
    port = str(hosts.PORT)
    _in(made, 1, "ip", "rule", "add", "pref", "100", "ipproto", "tcp", "dport", port, "lookup", "main")
    _in(made, 1, "ip", "rule", "add", "pref", "101", "ipproto", "tcp", "sport", "1024-65534", "blackhole")
    yield


@contextlib.contextmanager
def full_disk(_: hosts.Hosts) -> Iterator[None]:
    disk = SIDE / "full"
    disk.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "full", str(disk)], check=True)
    try:
        with contextlib.suppress(OSError), (disk / "filler").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        yield
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def on_rank_1(variables: Callable[[], Mapping[str, str]]) -> Callable[[int], Mapping[str, str]]:
    return lambda rank: variables() if rank == 1 else {}


FAULTS = {
    "wrong interface": Planted(
        "interface", r"rank 1 .*10\.7\.7\.2 of eth1.*reach 10\.77\.0\.2 of eth0",
        on_rank_1(lambda: {"GLOO_SOCKET_IFNAME": "eth1"}), another_interface,
    ),
    "one link of 10 Mbit/s": Planted("links", r"the link of rank 2 .*is slow", plant=slow_link, hosts=4),
    "blocked port": Planted(
        "ports", rf"10\.77\.0\.1:{hosts.PORT}.*this port is blocked", plant=blocked_port, timeout=15
    ),
    "mismatched versions": Planted(
        "versions", rf"gradcomp {OLD_VERSION}.*on rank 1", on_rank_1(lambda: first_on_path(old_version()))
    ),
    "oversubscribed threads": Planted(
        "threads", "threads compute on", lambda rank: {"OMP_NUM_THREADS": str(os.cpu_count())}, per_host=2
    ),
    "kernels without AVX2": Planted(
        "kernels", "built without AVX2", on_rank_1(lambda: first_on_path(without_avx2()))
    ),
    "unequal libraries": Planted(
        "libraries", rf"NumPy: .*{re.escape(NUMPY)} on rank 1", on_rank_1(lambda: first_on_path(other_numpy()))
    ),
    "full disk for logs": Planted(
        "disk", "run log: .*No space left", lambda rank: {"GRADCOMP_RUN_LOG": str(SIDE / "full" / "run.jsonl")},
        full_disk,
    ),
    "a rank that never comes": Planted("ranks", "rank 1 of 2 did not come", absent=(1,), timeout=15),
    "CuPy without a device": Planted(
        "gpus", "CuPy .*no CUDA device", lambda rank: first_on_path(cupy())
    ),
    "blocked ports but the store's": Planted("ports", r"rank 0 .*cannot connect to rank 1", plant=blocked_ports),
}  # fmt: skip


def faulty(planted: Planted) -> Run:
    with hosts.Hosts(planted.hosts, "1gbit", planted.per_host) as made, planted.plant(made):
        command = [*DOCTOR, "--timeout", str(planted.timeout)]
        ranks = [rank for rank in range(made.ranks) if rank not in planted.absent]
        return job(made, ranks, command, planted.ranks)


def named(run: Run, planted: Planted) -> list[dict[str, Any]]:
    """The warnings and errors that are about the fault."""
    return [
        one for one in run.alarms if one["about"] == planted.about and re.search(planted.says, one["found"])
    ]


def job(
    made: hosts.Hosts,
    ranks: Sequence[int],
    command: Sequence[str],
    variables: Callable[[int], Mapping[str, str]],
) -> Run:
    """Start these ranks, wait for them, and read what they print."""
    environments = [{**COMMON, **variables(rank)} for rank in ranks]
    with tempfile.TemporaryDirectory(prefix="gradcomp-doctor-") as directory:
        began = time.monotonic()
        started = []
        for rank, environment in zip(ranks, environments, strict=True):
            with (
                Path(directory, f"{rank}.out").open("wb") as out,
                Path(directory, f"{rank}.err").open("wb") as err,
            ):
                started.append(made.start(rank, command, environment, stdout=out, stderr=err, cwd=directory))
        codes = [process.wait(_LONGEST_SECONDS) for process in started]
        run = Run(time.monotonic() - began, codes)
        return read(run, sorted(Path(directory).glob("*.out")))


def read(run: Run, outputs: Sequence[Path]) -> Run:
    run.told = [json.loads(text) for path in outputs if (text := path.read_text()).startswith("{")]
    if not run.told:
        errors = "\n".join(path.with_suffix(".err").read_text() for path in outputs)
        raise SystemExit(f"no rank printed anything; exit codes {run.codes}\n{errors}")
    return run


def accelerate(planted: Planted, python: str) -> str:
    """How the script of `accelerate test` ends where the same fault is planted."""
    command = [python, "-m", "accelerate.test_utils.scripts.test_script"]
    with (
        hosts.Hosts(planted.hosts, "1gbit", planted.per_host) as made,
        planted.plant(made),
        tempfile.TemporaryDirectory(prefix="gradcomp-accelerate-") as directory,
    ):
        started = []
        for rank in (rank for rank in range(made.ranks) if rank not in planted.absent):
            environment = {**COMMON, "ACCELERATE_USE_CPU": "true", **planted.ranks(rank)}
            with Path(directory, f"{rank}.txt").open("wb") as out:
                options = {"stdout": out, "stderr": subprocess.STDOUT, "cwd": directory}
                started.append(made.start(rank, command, environment, **options))
        deadline, ends = time.monotonic() + _ACCELERATE_SECONDS, []
        for rank, process in enumerate(started):
            try:
                code = process.wait(max(deadline - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                ends.append(f"runs after {_ACCELERATE_SECONDS:.0f} s")
                continue
            lines = Path(directory, f"{rank}.txt").read_text(errors="replace").strip().splitlines()
            ends.append(f"fails: {lines[-1][-100:]}" if code and lines else "passes")
        return "; ".join(dict.fromkeys(ends))


# ------------------------------------------------------------------------------------------ healthy jobs


def on_hosts(count: int, link: str, ranks_per_host: int = 1) -> Callable[[], Run]:
    def run() -> Run:
        with hosts.Hosts(count, link, ranks_per_host) as made:
            return job(made, range(made.ranks), DOCTOR, lambda rank: {})

    return run


def here(*launcher: str) -> Callable[[], Run]:
    """On this machine, alone or by a launcher."""

    def run() -> Run:
        with tempfile.TemporaryDirectory(prefix="gradcomp-doctor-") as directory:
            began, out = time.monotonic(), Path(directory, "0.out")
            with out.open("wb") as stdout, out.with_suffix(".err").open("wb") as stderr:
                environment = {**os.environ, **COMMON}
                command = [*launcher, *(DOCTOR if "torch" not in " ".join(launcher) else DOCTOR[1:])]
                done = subprocess.run(
                    command, stdout=stdout, stderr=stderr, env=environment, cwd=directory, check=False,
                    timeout=_LONGEST_SECONDS,
                )  # fmt: skip
            return read(Run(time.monotonic() - began, [done.returncode]), [out])

    return run


TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
MPIEXEC = (str(Path(sys.executable).with_name("mpiexec")), "-n", "2")
HEALTHY = {
    "2 hosts, 1 Gbit/s": on_hosts(2, "1gbit"),
    "2 hosts, 1 Gbit/s, again": on_hosts(2, "1gbit"),
    "2 hosts, 100 Mbit/s": on_hosts(2, "100mbit"),
    "2 hosts, unshaped": on_hosts(2, "unshaped"),
    "2 hosts of 2 ranks, 1 Gbit/s": on_hosts(2, "1gbit", 2),
    "3 hosts, 10 Gbit/s": on_hosts(3, "10gbit"),
    "4 hosts, 1 Gbit/s": on_hosts(4, "1gbit"),
    "torchrun, 2 ranks of this machine": here(*TORCHRUN),
    "mpiexec, 2 ranks of this machine": here(*MPIEXEC),
    "alone": here(),
}


def measure(options: argparse.Namespace) -> int:
    faults = {name: one for name, one in FAULTS.items() if options.only in (None, name)}
    healthy = {} if options.only else HEALTHY
    for planted in faults.values():  # what it installs is no part of the time
        for rank in range(planted.hosts):
            planted.ranks(rank)
    machine = report.machine()
    heads = [
        "fault",
        "found",
        "others",
        "seconds",
        "sentence",
        *["accelerate test"] * bool(options.accelerate),
    ]
    rows: list[list[object]] = []
    results = []
    for name, planted in faults.items():
        run = faulty(planted)
        about = named(run, planted)
        others = [one for one in run.alarms if one not in about]
        ok = bool(about) and len(set(run.codes)) == 1
        said = f"{about[0]['found']}. {about[0]['advice']}" if about else None
        rows.append(
            [name, f"{'yes' if ok else 'NO'}, {run.codes[0]}", len(others), f"{run.seconds:.0f}", said]
        )
        results.append({"fault": name, "found": ok, "sentence": said, "others": others, **_times(run)})
        if options.accelerate:
            results[-1]["accelerate"] = accelerate(planted, options.accelerate)
            rows[-1].append(results[-1]["accelerate"])
        print(report.table(heads, rows[-1:]), flush=True)
    healthy_rows: list[list[object]] = []
    jobs = []
    for name, start in healthy.items():
        run = start()
        healthy_rows.append([name, len(run.alarms), ", ".join(map(str, run.codes)), f"{run.seconds:.0f}"])
        jobs.append({"job": name, "alarms": run.alarms, **_times(run)})
        for alarm in run.alarms:
            print(f"{name}: {alarm['found']}", file=sys.stderr)
    print(f"\n{report.describe(machine)}\n")
    print(report.table(heads, rows))
    if healthy:
        print()
        print(report.table(["healthy job", "alarms", "exit codes", "seconds"], healthy_rows))
    report.write_json(options.json, {"machine": machine, "faults": results, "healthy": jobs})
    missed = sum(not one["found"] for one in results)
    return int(bool(missed or any(one["alarms"] for one in jobs)))


def _times(run: Run) -> dict[str, Any]:
    kept = dataclasses.asdict(run)
    del kept["told"]
    return kept


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=FAULTS, help="one fault, and no healthy job")
    parser.add_argument("--accelerate", metavar="PYTHON", help="an interpreter that has accelerate")
    parser.add_argument("--json", type=Path, help="write all figures here")
    options = parser.parse_args()
    return hosts.exit_code(lambda: measure(options))


if __name__ == "__main__":
    sys.exit(main())
