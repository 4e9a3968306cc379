"""Every launcher's environment is understood, or refused by name."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from launching import clean_environment, plain_variables

from gradcomp.core.errors import ConfigError
from gradcomp.job.jobstore import listening_socket, own_address
from gradcomp.job.launch import Launch, discover, placed

# ----------------------------------------------------------------------------------------- what launchers say

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "node0", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_USE_AGENT_STORE": "True",
}  # fmt: skip
SERVER = {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": "4711"}
HOROVODRUN = {
    "HOROVOD_RANK": "3", "HOROVOD_SIZE": "4", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_CROSS_RANK": "1", "HOROVOD_CROSS_SIZE": "2", "HOROVOD_HOSTNAME": "node1", "HOROVOD_CONTROLLER": "gloo",
    **SERVER,
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "PMIX_NAMESPACE": "prterun-1",
}  # fmt: skip
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SLURM = {
    "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_PROCID": "4", "SLURM_NTASKS": "5", "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2", "SLURM_NNODES": "3", "SLURM_TASKS_PER_NODE": "2(x2),1",
}  # fmt: skip
MASTER = {"MASTER_ADDR": "node0", "MASTER_PORT": "29500"}


def places(launch: Launch) -> tuple[int, ...]:
    of_job = (launch.rank, launch.size, launch.local_rank, launch.local_size)
    return (*of_job, launch.cross_rank, launch.cross_size)


#: An environment, its launcher, (rank, size, local rank, local size, cross rank, cross size), and the host.
PLACES = {
    "nothing": ({}, "single", (0, 1, 0, 1, 0, 1), "here"),
    "torchrun": (TORCHRUN, "torchrun", (3, 4, 1, 2, 1, 2), "1"),
    "horovodrun": (HOROVODRUN, "horovodrun", (3, 4, 1, 2, 1, 2), "node1"),
    "open mpi": (OPEN_MPI, "mpirun", (3, 4, 3, 4, 0, 1), "here"),
    "left over from torchrun": ({**OPEN_MPI, "GROUP_RANK": "7"}, "mpirun", (3, 4, 3, 4, 0, 1), "here"),
    "hydra": (HYDRA, "mpirun", (3, 4, 1, 2, 1, 2), "here"),
    "srun": (SLURM, "slurm", (4, 5, 0, 1, 2, 3), "2"),
    "srun with names": ({**SLURM, "SLURMD_NODENAME": "n12"}, "slurm", (4, 5, 0, 1, 2, 3), "n12"),
    "by hand": (plain_variables(1, 2, "1"), "torchrun", (1, 2, 1, 2, 0, 1), "here"),
    "one rank": ({"RANK": "0", "WORLD_SIZE": "1"}, "torchrun", (0, 1, 0, 1, 0, 1), "here"),
    "torchrun per node of srun": (
        {**TORCHRUN, "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"},
        "torchrun", (3, 4, 1, 2, 1, 2), "1",
    ),
    "torchrun per node of mpirun": (
        {**TORCHRUN, "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
        "torchrun", (3, 4, 1, 2, 1, 2), "1",
    ),
    "mpirun, exported by hand": (
        {**OPEN_MPI, "RANK": "3", "WORLD_SIZE": "4"}, "mpirun", (3, 4, 3, 4, 0, 1), "here",
    ),
    "srun --mpi=pmi2": ({**SLURM, "PMI_RANK": "4", "PMI_SIZE": "5"}, "slurm", (4, 5, 0, 1, 2, 3), "2"),
    "mpiexec in a step of srun": ({**SLURM, **HYDRA}, "mpirun", (3, 4, 1, 2, 1, 2), None),
    "batch script": (
        {"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_JOB_ID": "7"}, "single", (0, 1, 0, 1, 0, 1), "here",
    ),
    "shell of salloc": (
        {"SLURM_STEP_ID": "4294967290", "SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "1"},
        "single", (0, 1, 0, 1, 0, 1), "here",
    ),
    "explicit world of one": ({**SLURM, "RANK": "0", "WORLD_SIZE": "1"}, "torchrun", (0, 1, 0, 1, 0, 1), None),
    "a left-over address is no rank": ({"MASTER_PORT": "1"}, "single", (0, 1, 0, 1, 0, 1), "here"),
}  # fmt: skip


@pytest.mark.parametrize("case", PLACES)
def test_a_launchers_environment_says_where_a_rank_is(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "here")
    environ, launcher, expected, host = PLACES[case]
    launch = discover(environ)
    assert (launch.launcher, places(launch)) == (launcher, expected)
    assert host in (None, launch.host)
    assert Launch.existing(0, 2).host == "here"


#: An environment, and what its error names.
BAD = {
    "rank without size": ({"RANK": "0"}, ["RANK", "WORLD_SIZE"]),
    "size without rank": ({"WORLD_SIZE": "2"}, ["WORLD_SIZE", "RANK"]),
    "local only": ({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}, ["LOCAL_RANK", "RANK"]),
    "half local": ({**TORCHRUN, "LOCAL_WORLD_SIZE": ""}, ["LOCAL_RANK", "LOCAL_WORLD_SIZE"]),
    "rank too large": ({**TORCHRUN, "RANK": "4"}, ["RANK=4", "WORLD_SIZE=4"]),
    "negative rank": ({**TORCHRUN, "RANK": "-1"}, ["RANK=-1"]),
    "no number": ({**TORCHRUN, "RANK": "one"}, ["RANK", "'one'"]),
    "more local than there are": ({**TORCHRUN, "LOCAL_WORLD_SIZE": "8"}, ["LOCAL_WORLD_SIZE=8"]),
    "address without port": ({**HYDRA, "MASTER_ADDR": "x"}, ["MASTER_ADDR", "MASTER_PORT"]),
    "port 0": ({**HYDRA, **MASTER, "MASTER_PORT": "0"}, ["MASTER_PORT"]),
    "port too large": ({**HYDRA, **MASTER, "MASTER_PORT": "70000"}, ["MASTER_PORT"]),
    "half open mpi": ({"OMPI_COMM_WORLD_RANK": "0"}, ["OMPI_COMM_WORLD_SIZE"]),
    "half hydra": ({"PMI_SIZE": "2"}, ["PMI_RANK"]),
    "half horovodrun": ({"HOROVOD_SIZE": "2"}, ["HOROVOD_RANK"]),
    "elastic": ({**HOROVODRUN, "HOROVOD_ELASTIC": "1"}, ["HOROVOD_ELASTIC"]),
    "half a server": (
        {**HOROVODRUN, "HOROVOD_GLOO_RENDEZVOUS_PORT": ""},
        ["HOROVOD_GLOO_RENDEZVOUS_ADDR is set", "HOROVOD_GLOO_RENDEZVOUS_PORT"],
    ),
    "a server without ranks": (
        {name: "" if "RANK" in name or "SIZE" in name else value for name, value in HOROVODRUN.items()},
        ["HOROVOD_GLOO_RENDEZVOUS_ADDR is set", "HOROVOD_RANK", "HOROVOD_SIZE"],
    ),
    "a server that is not mpirun's": ({**HYDRA, **SERVER}, ["HOROVOD_GLOO_RENDEZVOUS_ADDR is set", "HOROVOD_RANK"]),
    "ranks without a server": (
        {**HOROVODRUN, **dict.fromkeys(SERVER, "")}, ["HOROVOD_RANK", "HOROVOD_GLOO_RENDEZVOUS_ADDR", "MASTER_ADDR"],
    ),
    "mpi without mpirun": (
        {**HOROVODRUN, **dict.fromkeys(SERVER, ""), "HOROVOD_CONTROLLER": "mpi"},
        ["HOROVOD_CONTROLLER=mpi", "OMPI_COMM_WORLD_RANK", "HOROVOD_GLOO_RENDEZVOUS_ADDR"],
    ),
    "half srun": ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "0"}, ["SLURM_NTASKS"]),
    "bad srun rank": ({**SLURM, "SLURM_PROCID": "5"}, ["SLURM_PROCID=5", "SLURM_NTASKS=5"]),
    "two ranks": ({**OPEN_MPI, "RANK": "0", "WORLD_SIZE": "4"}, ["RANK=0", "OMPI_COMM_WORLD_RANK=3"]),
    "two sizes": ({**HOROVODRUN, "PMI_RANK": "3", "PMI_SIZE": "5"}, ["HOROVOD_SIZE=4", "PMI_SIZE=5"]),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_environment_is_named(case: str) -> None:
    environ, named = BAD[case]
    with pytest.raises(ConfigError) as error:
        discover(environ)
    assert all(name in str(error.value) for name in named), str(error.value)


def test_what_else_an_environment_says() -> None:
    assert all(discover({**form, **MASTER}).master == ("node0", 29500) for form in (HYDRA, OPEN_MPI, SLURM))
    assert discover(TORCHRUN).served_attempt == "2"  # it serves the store itself
    assert discover(plain_variables(0, 2, "1")).served_attempt is None
    horovodruns = discover(HOROVODRUN)
    assert (horovodruns.horovod_server, horovodruns.hostname) == (("10.0.0.1", 4711), "node1")
    assert discover({**OPEN_MPI, "HOROVOD_RANK": "3", "HOROVOD_SIZE": "4"}).launcher == "mpirun"
    with pytest.raises(ConfigError, match="16"):
        discover({**TORCHRUN, "GRADCOMP_SECRET": "short"})


def test_the_users_interface_comes_before_horovodruns() -> None:
    horovods, gloos = {"HOROVOD_GLOO_IFACE": "eth0"}, {"GLOO_SOCKET_IFNAME": "eth1,eth2"}
    for environ, expected in (
        ({}, (None, "")),
        (horovods, ("eth0", "HOROVOD_GLOO_IFACE")),
        ({**horovods, **gloos}, ("eth1", "GLOO_SOCKET_IFNAME")),
    ):
        launch = discover({**HOROVODRUN, **environ})
        assert (launch.interface, launch.interface_variable) == expected


def test_only_told_places_count_as_placed() -> None:
    assert all(discover(form).placed for form in (TORCHRUN, HOROVODRUN, OPEN_MPI, SLURM))
    counts = [{**SLURM, "SLURM_TASKS_PER_NODE": count} for count in ("2(x2", "a", "2(xb)", "2(x9)", "")]
    guessed = [{"PMI_RANK": "0", "PMI_SIZE": "2"}, HYDRA, *counts]
    assert not any(discover(form).placed for form in guessed)


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        pytest.param("aabb", [(0, 2, 0, 2), (1, 2, 0, 2), (0, 2, 1, 2), (1, 2, 1, 2)], id="blocks"),
        pytest.param("abab", [(0, 2, 0, 2), (0, 2, 1, 2), (1, 2, 0, 2), (1, 2, 1, 2)], id="round robin"),
        pytest.param("aab", [(0, 2, 0, 2), (1, 2, 0, 1), (0, 1, 1, 2)], id="uneven"),
    ],
)
def test_place_by_host_names(hosts: str, expected: list[tuple[int, ...]]) -> None:
    found = [placed(Launch.existing(r, len(hosts)), r, list(hosts)) for r in range(len(hosts))]
    assert [places(launch)[2:] for launch in found] == expected
    assert all(launch.placed for launch in found)


#: What is set beside, the address of this host's name, and the address that is published.
PUBLISHED = {
    "interface first": ({"GLOO_SOCKET_IFNAME": "lo"}, "10.0.0.7", "127.0.0.1"),
    "horovodrun's name": ({}, "10.0.0.7", "node1"),
    "no loopback for other hosts": ({"HOROVOD_HOSTNAME": "localhost"}, "10.0.0.7", "10.0.0.7"),
    "this host's name": ({"HOROVOD_HOSTNAME": ""}, "10.0.0.7", "10.0.0.7"),
    "nothing better": ({"HOROVOD_HOSTNAME": ""}, "127.0.1.1", "127.0.0.1"),
    "loopback, and nothing better": ({"HOROVOD_HOSTNAME": "localhost"}, "127.0.1.1", "127.0.0.1"),
    "one host": ({"HOROVOD_LOCAL_RANK": "3", "HOROVOD_LOCAL_SIZE": "4"}, "10.0.0.7", "127.0.0.1"),
}


@pytest.mark.parametrize("case", PUBLISHED)
def test_published_address(
    case: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    environ, resolved, expected = PUBLISHED[case]
    monkeypatch.setattr("socket.gethostbyname", lambda name: resolved)
    assert own_address(discover({**HOROVODRUN, **environ})) == expected
    assert ("GLOO_SOCKET_IFNAME" in caplog.text) == ("nothing better" in case)  # others cannot reach it


ELSEWHERE = "198.51.100.7"  # for documentation: no machine has it


#: An environment, the store's host, its addresses, and that at which the store listens, or None for all.
LISTENS = {
    "one host": (OPEN_MPI, "127.0.0.1", ["127.0.0.1"], "127.0.0.1"),
    "one host, IPv6": (OPEN_MPI, "::1", ["::1"], "::1"),
    "a name with both": (OPEN_MPI, "localhost", ["::1", "127.0.0.1"], "127.0.0.1"),
    "loopback by number": (TORCHRUN, "127.0.0.1", ["127.0.0.1"], "127.0.0.1"),
    "loopback by a name that others know otherwise": (TORCHRUN, "node0", ["127.0.1.1"], None),
    "another machine's": (TORCHRUN, "node0", [ELSEWHERE], None),
    "one of several": (TORCHRUN, "node0", ["127.0.0.1", ELSEWHERE], None),
    "the interface's": (
        {**TORCHRUN, "GLOO_SOCKET_IFNAME": "lo"}, "node0", [ELSEWHERE, "127.0.0.1"], "127.0.0.1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", LISTENS)
def test_address_at_which_the_store_listens(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    environ, host, resolved, expected = LISTENS[case]
    kind = {True: socket.AF_INET6, False: socket.AF_INET}
    answers = [(kind[":" in a], 1, 6, "", (a, 0, 0, 0) if ":" in a else (a, 0)) for a in resolved]
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: answers)
    listening = listening_socket(discover(environ), (host, 0))
    if listening is None:
        assert expected is None
    else:
        with listening:
            assert listening.getsockname()[0] == expected


LAUNCHER = """
import multiprocessing, os
from gradcomp.job.process_end import launcher_of

def say(child=False):
    launcher = launcher_of(os.environ)
    print(None if launcher is None else (launcher.number, launcher.lives), flush=True)

if __name__ == "__main__":
    say()
    process = multiprocessing.get_context("spawn").Process(target=say, args=(True,))
    process.start()
    process.join()
"""


@pytest.mark.parametrize(
    "marks", [{}, {"TORCHELASTIC_RUN_ID": "4711"}, {"PMI_FD": "7", "SLURM_STEP_ID": "0"}]
)
def test_the_launcher_is_the_nearest_ancestor_without_what_it_set(
    marks: dict[str, str], tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(LAUNCHER)
    done = subprocess.run(
        ["sh", "-c", f"{sys.executable} {program}; :"],  # the shell stays between
        env={**clean_environment(), "RANK": "0", "WORLD_SIZE": "2", **marks},
        capture_output=True,
        text=True,
        check=True,
    )
    expected = str((os.getpid(), True)) if marks else "None"
    assert done.stdout.splitlines() == [expected] * 2  # in a process that a rank has spawned too
