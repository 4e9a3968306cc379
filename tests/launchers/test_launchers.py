"""One script, unchanged, trains under the launchers themselves. What each one sets is in tests/torch/test_launch.py."""

from __future__ import annotations

import os
import shlex
import sys

import pytest
from launching import TORCHRUN

ONE_HOST = [[rank, 2, rank, 2, 0, 1] for rank in range(2)]
TWO_HOSTS = [[rank, 4, rank % 2, 2, rank // 2, 2] for rank in range(4)]


either = pytest.mark.parametrize(
    "forks", [pytest.param(True, id="forks"), pytest.param(False, id="interpreters", marks=pytest.mark.full)]
)


def places(reports) -> list[list[int]]:
    return [report["place"] for report in reports]


def said(reports, what: str) -> list[str]:
    return [report[what] for report in reports]


def on_two_hosts(reports) -> bool:
    assert (places(reports), said(reports, "host")) == (TWO_HOSTS, ["a", "a", "b", "b"])
    return len(set(said(reports, "network"))) == 2


@pytest.mark.full
def test_torchrun(train) -> None:
    reports = train([*TORCHRUN], 2)
    assert (places(reports), said(reports, "launcher")) == (ONE_HOST, ["torchrun"] * 2)


@pytest.mark.full
@pytest.mark.network
def test_torchrun_on_two_hosts(train, named_hosts) -> None:
    """Each host has a torchrun of its own; they meet at the name of the first one."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2"]
    torchrun += ["--rdzv-backend=c10d", "--rdzv-endpoint=a:29400", "--no-python"]
    a, b = (shlex.join([*named_hosts.on(host), *torchrun]) for host in ("a", "b"))
    both = ["sh", "-c", f'{b} "$@" & {a} "$@"; first=$?; wait $! && exit $first', "torchrun"]
    reports = train(both, 4)
    # torchrun names a host by its number.
    assert (places(reports), said(reports, "host")) == (TWO_HOSTS, ["0", "0", "1", "1"])
    assert len(set(said(reports, "network"))) == 2
    assert said(reports, "launcher") == ["torchrun"] * 4


@either
def test_mpich(train, mpich, forks: bool) -> None:
    reports = train([*mpich, "-n", "2"], 2, forks=forks)
    assert (places(reports), said(reports, "launcher")) == (ONE_HOST, ["mpirun"] * 2)


@pytest.mark.full
def test_mpi_carries_the_gradients_too(train, mpich) -> None:
    pytest.importorskip("mpi4py", reason="needs mpi4py: pip install gradcomp[mpi]")
    reports = train([*mpich, "-n", "2"], 2, {"GRADCOMP_TRANSPORT": "mpi"})
    assert said(reports, "transports") == [["MpiTransport"]] * 2


@either
def test_open_mpi(train, open_mpi, forks: bool) -> None:
    launcher = [str(open_mpi), "--allow-run-as-root", "--oversubscribe", "-np", "2"]
    reports = train(launcher, 2, forks=forks)
    assert (places(reports), said(reports, "launcher")) == (ONE_HOST, ["mpirun"] * 2)


@pytest.mark.full
def test_horovodrun(train, horovodrun) -> None:
    reports = train([*horovodrun, "--gloo", "-np", "2"], 2)
    assert (places(reports), said(reports, "launcher")) == (ONE_HOST, ["horovodrun"] * 2)


@pytest.mark.full
def test_horovod_carries_the_gradients_too(train, horovodrun) -> None:
    reports = train([*horovodrun, "--gloo", "-np", "2"], 2, {"GRADCOMP_TRANSPORT": "horovod"})
    assert said(reports, "transports") == [["HorovodTransport"]] * 2


@pytest.mark.full
def test_horovodrun_by_mpi(train, horovodrun_mpi, open_mpi) -> None:
    path = f"{open_mpi.parent}:{os.environ['PATH']}"
    # The options that horovodrun would pass for this are spelled as Open MPI 5 no longer understands them.
    binding = ["--binding-args", "--bind-to none --map-by slot"]
    reports = train([*horovodrun_mpi, *binding, "-np", "2"], 2, {"PATH": path})
    assert (places(reports), said(reports, "launcher")) == (ONE_HOST, ["mpirun"] * 2)


@pytest.mark.full
@pytest.mark.network
def test_horovodrun_on_two_hosts(train, horovodrun, named_hosts) -> None:
    launcher = [*named_hosts.on("a"), *horovodrun, "--gloo", "-np", "4", "-H", "a:2,b:2"]
    reports = train(launcher, 4, named_hosts.environment(os.environ["PATH"]))
    assert on_two_hosts(reports)
    assert set(said(reports, "gloo_interface")) == {"eth0"}  # what horovodrun found that the hosts share


@pytest.mark.full
@pytest.mark.network
def test_mpich_on_two_hosts(train, mpich, named_hosts) -> None:
    launcher = [*named_hosts.on("a"), *mpich, "-n", "4", "-ppn", "2", "-hosts", "a,b"]
    reports = train(launcher, 4, named_hosts.environment(os.environ["PATH"]))
    assert on_two_hosts(reports)


@pytest.mark.full
@pytest.mark.network
def test_open_mpi_on_two_hosts(train, open_mpi, named_hosts) -> None:
    launcher = [*named_hosts.on("a"), str(open_mpi), "--allow-run-as-root", "-np", "4", "-H", "a:2,b:2"]
    # mpirun hands on what it is told to; the ranks have MPICH's mpi4py, which cannot tell them where to meet.
    variables = {"MASTER_ADDR": "a", "MASTER_PORT": "29500"}
    exported = [word for name in ("PYTHONPATH", *variables) for word in ("-x", name)]
    reports = train([*launcher, *exported], 4, {**variables, **named_hosts.environment(os.environ["PATH"])})
    assert on_two_hosts(reports)


@pytest.mark.network
def test_srun(train, slurm) -> None:
    reports = train([*slurm.srun(), "-N", "1", "-n", "2"], 2, slurm.environment())
    assert (places(reports), said(reports, "launcher")) == (ONE_HOST, ["slurm"] * 2)


@pytest.mark.full
@pytest.mark.network
@pytest.mark.parametrize("mpi", ["none", "pmi2"])
def test_srun_on_two_hosts(train, slurm, mpi) -> None:
    if mpi == "pmi2":  # the ranks meet by MPI
        pytest.importorskip("mpi4py")
        variables = {}
    else:
        variables = {"MASTER_ADDR": "a", "MASTER_PORT": "29500"}
    launcher = [*slurm.srun(), f"--mpi={mpi}", "-N", "2", "--ntasks-per-node=2"]
    reports = train(launcher, 4, {**variables, **slurm.environment()})
    assert on_two_hosts(reports)
    assert said(reports, "launcher") == ["slurm"] * 4
