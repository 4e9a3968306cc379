"""Every launcher's environment is understood or refused by name, and the ranks meet or say why not."""

from __future__ import annotations

import functools
import http.server
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import preloaded
import pytest
from launching import Finished, clean_environment, plain_variables, run_ranks, run_torchrun
from ports import free_port

from gradcomp.core.errors import ConfigError, TransportError
from gradcomp.job.jobstore import listening_socket, own_address
from gradcomp.job.launch import Launch, discover, placed
from gradcomp.job.over_torch import connect
from gradcomp.job.signing import HostSocket

# ----------------------------------------------------------------------------------------- what launchers say

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "node0", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_USE_AGENT_STORE": "True",
}  # fmt: skip
HOROVODRUN = {
    "HOROVOD_RANK": "3", "HOROVOD_SIZE": "4", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_CROSS_RANK": "1", "HOROVOD_CROSS_SIZE": "2", "HOROVOD_HOSTNAME": "node1", "HOROVOD_CONTROLLER": "gloo",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": "4711",
}  # fmt: skip
NO_SERVER = {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "", "HOROVOD_GLOO_RENDEZVOUS_PORT": ""}
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


@pytest.mark.parametrize(
    ("environ", "launcher", "expected"),
    [
        pytest.param({}, "single", (0, 1, 0, 1, 0, 1), id="nothing"),
        pytest.param(TORCHRUN, "torchrun", (3, 4, 1, 2, 1, 2), id="torchrun"),
        pytest.param(HOROVODRUN, "horovodrun", (3, 4, 1, 2, 1, 2), id="horovodrun"),
        pytest.param(OPEN_MPI, "mpirun", (3, 4, 3, 4, 0, 1), id="open mpi"),
        pytest.param(HYDRA, "mpirun", (3, 4, 1, 2, 1, 2), id="hydra"),
        pytest.param(SLURM, "slurm", (4, 5, 0, 1, 2, 3), id="srun"),
        pytest.param(plain_variables(1, 2, "1"), "torchrun", (1, 2, 1, 2, 0, 1), id="by hand"),
        pytest.param({"RANK": "0", "WORLD_SIZE": "1"}, "torchrun", (0, 1, 0, 1, 0, 1), id="one rank"),
        pytest.param(
            {**TORCHRUN, "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"},
            "torchrun", (3, 4, 1, 2, 1, 2), id="torchrun per node of srun",
        ),
        pytest.param(
            {**TORCHRUN, "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
            "torchrun", (3, 4, 1, 2, 1, 2), id="torchrun per node of mpirun",
        ),
        pytest.param(
            {**OPEN_MPI, "RANK": "3", "WORLD_SIZE": "4"}, "mpirun", (3, 4, 3, 4, 0, 1), id="mpirun, exported by hand"
        ),
        pytest.param({**SLURM, "PMI_RANK": "4", "PMI_SIZE": "5"}, "slurm", (4, 5, 0, 1, 2, 3), id="srun --mpi=pmi2"),
        pytest.param({**SLURM, **HYDRA}, "mpirun", (3, 4, 1, 2, 1, 2), id="mpiexec in a step of srun"),
        pytest.param(
            {"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_JOB_ID": "7"}, "single", (0, 1, 0, 1, 0, 1),
            id="batch script",
        ),
        pytest.param(
            {"SLURM_STEP_ID": "4294967290", "SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "1"},
            "single", (0, 1, 0, 1, 0, 1), id="shell of salloc",
        ),
        pytest.param(
            {**SLURM, "RANK": "0", "WORLD_SIZE": "1"}, "torchrun", (0, 1, 0, 1, 0, 1), id="explicit world of one"
        ),
        pytest.param({"MASTER_PORT": "1"}, "single", (0, 1, 0, 1, 0, 1), id="a left-over address is no rank"),
    ],
)  # fmt: skip
def test_place(environ: dict[str, str], launcher: str, expected: tuple[int, ...]) -> None:
    launch = discover(environ)
    assert (launch.launcher, places(launch)) == (launcher, expected)


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        pytest.param({"RANK": "0"}, ["RANK", "WORLD_SIZE"], id="rank without size"),
        pytest.param({"WORLD_SIZE": "2"}, ["WORLD_SIZE", "RANK"], id="size without rank"),
        pytest.param({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}, ["LOCAL_RANK", "RANK"], id="local only"),
        pytest.param({**TORCHRUN, "LOCAL_WORLD_SIZE": ""}, ["LOCAL_RANK", "LOCAL_WORLD_SIZE"], id="half local"),
        pytest.param({**TORCHRUN, "RANK": "4"}, ["RANK=4", "WORLD_SIZE=4"], id="rank too large"),
        pytest.param({**TORCHRUN, "RANK": "-1"}, ["RANK=-1"], id="negative rank"),
        pytest.param({**TORCHRUN, "RANK": "one"}, ["RANK", "'one'"], id="no number"),
        pytest.param({**TORCHRUN, "LOCAL_WORLD_SIZE": "8"}, ["LOCAL_WORLD_SIZE=8"], id="more local than there are"),
        pytest.param({**HYDRA, "MASTER_ADDR": "x"}, ["MASTER_ADDR", "MASTER_PORT"], id="address without port"),
        pytest.param({**HYDRA, **MASTER, "MASTER_PORT": "0"}, ["MASTER_PORT"], id="port 0"),
        pytest.param({**HYDRA, **MASTER, "MASTER_PORT": "70000"}, ["MASTER_PORT"], id="port too large"),
        pytest.param({"OMPI_COMM_WORLD_RANK": "0"}, ["OMPI_COMM_WORLD_SIZE"], id="half open mpi"),
        pytest.param({"PMI_SIZE": "2"}, ["PMI_RANK"], id="half hydra"),
        pytest.param({"HOROVOD_SIZE": "2"}, ["HOROVOD_RANK"], id="half horovodrun"),
        pytest.param({**HOROVODRUN, "HOROVOD_ELASTIC": "1"}, ["HOROVOD_ELASTIC"], id="elastic"),
        pytest.param(
            {**HOROVODRUN, "HOROVOD_GLOO_RENDEZVOUS_PORT": ""},
            ["HOROVOD_GLOO_RENDEZVOUS_ADDR is set", "HOROVOD_GLOO_RENDEZVOUS_PORT"], id="half a server",
        ),
        pytest.param(
            {**HOROVODRUN, "HOROVOD_RANK": "", "HOROVOD_SIZE": "", "HOROVOD_LOCAL_RANK": "", "HOROVOD_LOCAL_SIZE": ""},
            ["HOROVOD_GLOO_RENDEZVOUS_ADDR is set", "HOROVOD_RANK", "HOROVOD_SIZE"], id="a server without ranks",
        ),
        pytest.param(
            {**HYDRA, "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": "4711"},
            ["HOROVOD_GLOO_RENDEZVOUS_ADDR is set", "HOROVOD_RANK"], id="a server that is not mpirun's",
        ),
        pytest.param(
            {**HOROVODRUN, **NO_SERVER}, ["HOROVOD_RANK", "HOROVOD_GLOO_RENDEZVOUS_ADDR", "MASTER_ADDR"],
            id="ranks without a server",
        ),
        pytest.param(
            {**HOROVODRUN, **NO_SERVER, "HOROVOD_CONTROLLER": "mpi"},
            ["HOROVOD_CONTROLLER=mpi", "OMPI_COMM_WORLD_RANK", "HOROVOD_GLOO_RENDEZVOUS_ADDR"], id="mpi without mpirun",
        ),
        pytest.param({"SLURM_STEP_ID": "0", "SLURM_PROCID": "0"}, ["SLURM_NTASKS"], id="half srun"),
        pytest.param({**SLURM, "SLURM_PROCID": "5"}, ["SLURM_PROCID=5", "SLURM_NTASKS=5"], id="bad srun rank"),
        pytest.param(
            {**OPEN_MPI, "RANK": "0", "WORLD_SIZE": "4"}, ["RANK=0", "OMPI_COMM_WORLD_RANK=3"], id="two ranks"
        ),
        pytest.param(
            {**HOROVODRUN, "PMI_RANK": "3", "PMI_SIZE": "5"}, ["HOROVOD_SIZE=4", "PMI_SIZE=5"], id="two sizes"
        ),
    ],
)  # fmt: skip
def test_bad_environment_is_named(environ: dict[str, str], named: list[str]) -> None:
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


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        pytest.param({}, (None, ""), id="none"),
        pytest.param({"GLOO_SOCKET_IFNAME": "eth1,eth2"}, ("eth1", "GLOO_SOCKET_IFNAME"), id="first of the list"),
        pytest.param({"HOROVOD_GLOO_IFACE": "eth0"}, ("eth0", "HOROVOD_GLOO_IFACE"), id="horovodrun's"),
        pytest.param(
            {"HOROVOD_GLOO_IFACE": "eth0", "GLOO_SOCKET_IFNAME": "eth1"}, ("eth1", "GLOO_SOCKET_IFNAME"),
            id="the user's before horovodrun's",
        ),
    ],
)  # fmt: skip
def test_interface(environ: dict[str, str], expected: tuple[str | None, str]) -> None:
    launch = discover({**HOROVODRUN, **environ})
    assert (launch.interface, launch.interface_variable) == expected


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        pytest.param({}, "here", id="nothing"),
        pytest.param(TORCHRUN, "1", id="torchrun"),
        pytest.param(plain_variables(1, 2, "1"), "here", id="by hand"),
        pytest.param(HOROVODRUN, "node1", id="horovodrun"),
        pytest.param(OPEN_MPI, "here", id="open mpi"),
        pytest.param({**OPEN_MPI, "GROUP_RANK": "7"}, "here", id="left over from torchrun"),
        pytest.param(SLURM, "2", id="srun"),
        pytest.param({**SLURM, "SLURMD_NODENAME": "n12"}, "n12", id="srun with names"),
    ],
)
def test_host(environ: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "here")
    assert discover(environ).host == expected
    assert Launch.existing(0, 2).host == "here"


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


@pytest.mark.parametrize(
    ("environ", "resolved", "expected"),
    [
        pytest.param({"GLOO_SOCKET_IFNAME": "lo"}, "10.0.0.7", "127.0.0.1", id="interface first"),
        pytest.param({}, "10.0.0.7", "node1", id="horovodrun's name"),
        pytest.param({"HOROVOD_HOSTNAME": "localhost"}, "10.0.0.7", "10.0.0.7", id="no loopback for other hosts"),
        pytest.param({"HOROVOD_HOSTNAME": ""}, "10.0.0.7", "10.0.0.7", id="this host's name"),
        pytest.param({"HOROVOD_HOSTNAME": ""}, "127.0.1.1", "127.0.0.1", id="nothing better"),
        pytest.param({"HOROVOD_LOCAL_RANK": "3", "HOROVOD_LOCAL_SIZE": "4"}, "10.0.0.7", "127.0.0.1", id="one host"),
    ],
)  # fmt: skip
def test_published_address(
    environ: dict[str, str], resolved: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.gethostbyname", lambda name: resolved)
    assert own_address(discover({**HOROVODRUN, **environ})) == expected


ELSEWHERE = "198.51.100.7"  # for documentation: no machine has it


@pytest.mark.parametrize(
    ("environ", "host", "resolved", "expected"),
    [
        pytest.param(OPEN_MPI, "127.0.0.1", ["127.0.0.1"], "127.0.0.1", id="one host"),
        pytest.param(OPEN_MPI, "::1", ["::1"], "::1", id="one host, IPv6"),
        pytest.param(OPEN_MPI, "localhost", ["::1", "127.0.0.1"], "127.0.0.1", id="a name with both"),
        pytest.param(TORCHRUN, "127.0.0.1", ["127.0.0.1"], "127.0.0.1", id="loopback by number"),
        pytest.param(
            TORCHRUN, "node0", ["127.0.1.1"], None, id="loopback by a name that others know otherwise"
        ),
        pytest.param(TORCHRUN, "node0", [ELSEWHERE], None, id="another machine's"),
        pytest.param(TORCHRUN, "node0", ["127.0.0.1", ELSEWHERE], None, id="one of several"),
        pytest.param(
            {**TORCHRUN, "GLOO_SOCKET_IFNAME": "lo"},
            "node0",
            [ELSEWHERE, "127.0.0.1"],
            "127.0.0.1",
            id="the interface's",
        ),
    ],
)
def test_address_at_which_the_store_listens(
    environ: dict[str, str],
    host: str,
    resolved: list[str],
    expected: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kind = {True: socket.AF_INET6, False: socket.AF_INET}
    answers = [(kind[":" in a], 1, 6, "", (a, 0, 0, 0) if ":" in a else (a, 0)) for a in resolved]
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: answers)
    listening = listening_socket(discover(environ), (host, 0))
    if listening is None:
        assert expected is None
    else:
        with listening:
            assert listening.getsockname()[0] == expected


def test_unreachable_address_is_warned_about(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("socket.gethostbyname", lambda name: "127.0.1.1")
    own_address(discover({**HOROVODRUN, "HOROVOD_HOSTNAME": "localhost"}))
    assert "GLOO_SOCKET_IFNAME" in caplog.text


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


# ---------------------------------------------------------------------------------------- the socket of a host


@pytest.fixture
def offering() -> Iterator[HostSocket]:
    offering = HostSocket(f"job {os.getpid()}")
    yield offering
    offering.close()


def reading() -> HostSocket:
    return HostSocket(f"job {os.getpid()}")


def test_a_host_socket_carries_a_text_as_long_as_it_is_offered(offering: HostSocket) -> None:
    assert reading().read() is None
    offering.offer("1234")
    assert [reading().read() for _ in range(3)] == ["1234"] * 3
    assert HostSocket("another").read() is None
    offering.close()
    assert reading().read() is None


def test_a_host_socket_serves_many_at_once(offering: HostSocket) -> None:
    offering.offer("1234")
    with ThreadPoolExecutor(64) as readers:
        assert set(readers.map(lambda _: reading().read(), range(512))) == {"1234"}


def test_a_host_socket_is_told_to_nobody_else_and_believed_of_nobody_else(
    offering: HostSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = reading()
    offering.offer("1234")
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    assert mine.read() is None  # as the offer is another user's
    with socket.socket(socket.AF_UNIX) as stranger:  # as this process is to the one that offers
        stranger.connect(f"\0{offering.name}")
        assert stranger.recv(100) == b""


def test_a_name_that_is_taken_is_a_config_error(offering: HostSocket) -> None:
    offering.offer("1234")
    with pytest.raises(ConfigError, match="MASTER_ADDR"):
        reading().offer("5678")


def test_who_offers_and_does_not_answer_is_not_waited_for(offering: HostSocket) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(f"\0{offering.name}")
        silent.listen()
        assert reading().read() is None


# ---------------------------------------------------------------------------------------------- real processes

JOIN = """
import json, torch
import gradcomp.torch as gc
try:
    gc.init(timeout_seconds=TIMEOUT)
    one = gc.allreduce(torch.ones(1), op=gc.Sum).item()
    print(json.dumps([gc.rank(), gc.size(), gc.local_rank(), gc.local_size(), one]))
except gc.GradcompError as error:
    print(json.dumps([type(error).__name__, str(error)]))
"""


def join(timeout: float = 60) -> str:
    return JOIN.replace("TIMEOUT", str(timeout))


def said(results: list[Finished]) -> list[list]:
    for result in results:
        assert result.returncode == 0, result.stderr
        assert result.stdout, result.stderr
    return [json.loads(result.stdout) for result in results]


def one_host(world: int) -> list[list]:
    return [[rank, world, rank, world, float(world)] for rank in range(world)]


def open_mpi(rank: int, world: int, local: bool = True) -> dict[str, str]:
    variables = {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": str(world)}
    if local:
        variables |= {"OMPI_COMM_WORLD_LOCAL_RANK": str(rank), "OMPI_COMM_WORLD_LOCAL_SIZE": str(world)}
    return variables


def horovodrun(rank: int, world: int, port: int) -> dict[str, str]:
    return {
        "HOROVOD_RANK": str(rank), "HOROVOD_SIZE": str(world), "HOROVOD_LOCAL_RANK": str(rank),
        "HOROVOD_LOCAL_SIZE": str(world), "HOROVOD_CROSS_RANK": "0", "HOROVOD_CROSS_SIZE": "1",
        "HOROVOD_HOSTNAME": "localhost", "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
    }  # fmt: skip


@contextmanager
def rendezvous_server(
    answers: dict[str, bytes] | None = None, status: int = 200
) -> Iterator[tuple[int, dict]]:
    """horovodrun's key-value protocol: PUT stores, GET answers 200 or 404. Yields its port and its content."""
    content: dict[str, bytes] = dict(answers or {})

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self.reply(200 if self.path.count("/") == 2 else 400, b"")
            content[self.path] = body

        def do_GET(self) -> None:
            found = content.get(self.path)
            self.reply(404 if found is None else status, found or b"")

        def reply(self, code: int, body: bytes) -> None:
            self.send_response(code)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield server.server_port, content
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.full
def test_ranks_meet_under_torchrun() -> None:
    assert said(run_torchrun(join(), 2)) == one_host(2)


@pytest.mark.full
def test_ranks_meet_by_plain_variables() -> None:
    assert said(run_ranks(join(), 2)) == one_host(2)


#: Ranks that are forks: how an interpreter starts is tested above, and in test_life.py.
forks = functools.partial(run_ranks, imported=preloaded.TORCH)


def test_ranks_meet_under_horovodrun() -> None:
    with rendezvous_server() as (port, content):
        assert said(forks(join(), 3, env=lambda rank: horovodrun(rank, 3, port))) == one_host(3)
    assert [path.split("/")[1] for path in content] == ["gradcomp"]


def test_ranks_meet_under_mpirun_on_one_host_without_mpi() -> None:
    environ = {"PMIX_NAMESPACE": f"prterun-{os.getpid()}-1"}
    results = forks(join(), 3, env=lambda rank: {**open_mpi(rank, 3), **environ})
    assert said(results) == one_host(3)


def test_misspelt_variables_are_said_once_with_what_was_meant_and_where() -> None:
    port = str(free_port())
    program = "import gradcomp.torch as gc; gc.init(timeout_seconds=20.0)"
    first, second = forks(
        program,
        2,
        env=lambda rank: {
            **plain_variables(rank, 2, port),
            "GRADCOMP_TRANSPRT": "shm",
            **({"GRADCOMP_TIMELIN": "x"} if rank else {}),
        },
    )
    begins = "gradcomp WARNING rank 0: unknown variable "
    assert [line.removeprefix(begins) for line in first.stderr.splitlines() if line.startswith(begins)] == [
        "GRADCOMP_TIMELIN is ignored: did you mean GRADCOMP_TIMELINE? (on rank 1)",
        "GRADCOMP_TRANSPRT is ignored: did you mean GRADCOMP_TRANSPORT?",
    ]
    assert "unknown" not in second.stderr


def killed() -> None:
    import os
    import signal
    import sys
    import tempfile
    import threading
    import time

    import torch

    import gradcomp.torch as gc

    tempfile.tempdir = os.environ["TMPDIR"]  # which a fork has asked for already
    directory, alone = sys.argv[1:]

    def kill() -> None:
        time.sleep(1.5)
        os.kill(os.getpid(), signal.SIGKILL)

    if alone == "alone":  # nobody else comes
        threading.Thread(target=kill).start()
    gc.init(transport="shm", timeline=f"{directory}/timeline-{{rank}}", run_log=f"{directory}/log")
    net = torch.nn.Linear(100, 100)
    gc.broadcast_parameters(net.state_dict(), root_rank=0)
    opt = gc.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters(), compression="topk:density=0.1"
    )
    threading.Thread(target=kill).start()
    while True:
        opt.zero_grad()
        net(torch.randn(4, 100)).sum().backward()
        opt.step()
        gc.save(f"{directory}/checkpoint", opt, model=net)  # most of the time is spent here


@pytest.mark.alone
@pytest.mark.parametrize("when", ["alone", "training"])
def test_nothing_outside_of_its_own_files_outlives_a_job_that_is_killed(when: str, tmp_path: Path) -> None:
    temporary, own = tmp_path / "tmp", tmp_path / "own"
    temporary.mkdir()
    own.mkdir()
    environ = {"TMPDIR": str(temporary), "PMIX_NAMESPACE": f"prterun-{os.getpid()}-2"}
    before = set(Path("/dev/shm").iterdir())
    ends = run_ranks(
        killed,
        1 if when == "alone" else 2,
        env=lambda rank: {**open_mpi(rank, 2), **environ},
        arguments=(str(own), when),
        imported=preloaded.TORCH,
    )
    assert [end.returncode for end in ends] == [-9] * len(ends), ends[0].stderr
    assert (own / "checkpoint").exists() == (when == "training")
    assert not list(temporary.iterdir())
    assert not set(Path("/dev/shm").iterdir()) - before


def test_ranks_meet_at_master_address_and_learn_their_hosts() -> None:
    environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    results = forks(join(), 2, env=lambda rank: {**open_mpi(rank, 2, local=False), **environ})
    assert said(results) == one_host(2)


def test_ranks_meet_again_after_shutdown() -> None:
    program = """
        import torch, gradcomp.torch as gc
        for cycle in range(10):
            gc.init(timeout_seconds=30)
            print(gc.allreduce(torch.full((1,), float(gc.rank() + cycle)), op=gc.Sum).item(), end=" ")
            gc.shutdown()
    """
    expected = " ".join(str(1.0 + 2 * cycle) for cycle in range(10))
    results = forks(program, 2, env=lambda rank: open_mpi(rank, 2))
    assert [(r.returncode, r.stdout.strip()) for r in results] == [(0, expected)] * 2, results[0].stderr


def test_plain_python_is_one_rank() -> None:
    assert said(forks(join(), 1, env=lambda rank: {})) == [[0, 1, 0, 1, 1.0]]


def alone(environ: dict[str, str], timeout: float = 1) -> list[str]:
    """What one rank of several says when the others are not there."""
    (answer,) = said(forks(join(timeout), 1, env=lambda rank: environ))
    return answer


def two_of_one_rank() -> list[list]:
    port = str(free_port())
    return said(forks(join(4), 3, env=lambda index: plain_variables(min(index, 1), 3, port)))


def with_secrets(*secrets: str) -> list[list]:
    port = str(free_port())
    ranks = lambda rank: {**plain_variables(rank, 2, port), "GRADCOMP_SECRET": secrets[rank]}  # noqa: E731
    return said(forks(join(), 2, env=ranks))


SECRETS = {"one of two": ("the secret of a job", ""), "two": ("the secret of a job", "another job's secret")}


@pytest.fixture(scope="module")
def waited() -> Iterator[Callable[[str], Any]]:
    """``waited(name)``: what ranks say that wait for others. They run beside each other."""
    port = str(free_port())
    waiting: dict[str, Callable[[], Any]] = {
        "two of one rank": two_of_one_rank,
        "no rank 0": lambda: [port, *alone(plain_variables(1, 2, port))],
        "rank 0 alone": lambda: alone(plain_variables(0, 3, str(free_port()))),
        **{name: functools.partial(with_secrets, *secrets) for name, secrets in SECRETS.items()},
    }
    with ThreadPoolExecutor(3) as pool:
        running = {name: pool.submit(program) for name, program in waiting.items()}
        yield lambda name: running[name].result()


def test_missing_ranks_are_named_and_rank_0_by_its_address(waited) -> None:
    kind, message = waited("rank 0 alone")
    assert kind == "TransportError"
    assert "rank 1, 2 of 3 did not arrive" in message
    port, kind, message = waited("no rank 0")
    assert kind == "TransportError"
    assert f"rank 1 at 127.0.0.1:{port}" in message


def test_port_in_use_is_a_transport_error() -> None:
    with socket.socket() as held:
        held.bind(("0.0.0.0", 0))
        held.listen()
        kind, message = alone(plain_variables(0, 2, str(held.getsockname()[1])))
    assert kind == "TransportError"
    assert "cannot be served" in message


@pytest.mark.parametrize("secrets", SECRETS)
def test_ranks_with_different_secrets_are_refused(waited, secrets: str) -> None:
    for kind, message in waited(secrets):
        assert kind == "ConfigError"
        assert "GRADCOMP_SECRET" in message
        assert "rank 1" in message


def test_two_processes_of_one_rank_are_refused(waited) -> None:
    answers = waited("two of one rank")
    assert {kind for kind, _ in answers} == {"TransportError"}
    assert sum("another process says that it is rank 1" in message for _, message in answers) == 1


def test_horovodruns_server_is_believed_with_the_secret_only_and_gloo_uses_its_interface(
    caplog: pytest.LogCaptureFixture,
) -> None:
    program = "import sys\n" + join() + 'import os; print(os.environ["GLOO_SOCKET_IFNAME"], file=sys.stderr)'
    environ = {"GRADCOMP_SECRET": "a secret of this job", "HOROVOD_GLOO_IFACE": "lo"}
    with rendezvous_server() as (port, content):
        results = forks(program, 2, env=lambda rank: {**horovodrun(rank, 2, port), **environ})
        assert said(results) == one_host(2)
        assert all(result.stderr.splitlines()[-1] == "lo" for result in results)
        signed = content["/gradcomp/store"]
        content["/gradcomp/store"] = signed[: signed.rindex(b":")] + b":4711"
        with pytest.raises(TransportError, match="did not publish"):
            connect(discover({**horovodrun(1, 2, port), **environ}), 0.5)
    assert caplog.text.count("is not signed") == 1


def test_silent_rank_0_under_horovodrun_ends_in_time() -> None:
    with rendezvous_server() as (port, _):
        kind, message = alone(horovodrun(1, 2, port))
    assert kind == "TransportError"
    assert "rank 0 did not publish" in message
    assert f"127.0.0.1:{port}" in message


ANSWERS = [b"", b"no address", b"host:", b"host:99999", b"\xff\xfe:1", b"a" * 5000]


@pytest.mark.parametrize(
    ("answer", "status", "says"), [*((a, 200, "not an address") for a in ANSWERS), (b"x", 500, "HTTP 500")]
)
def test_answers_of_the_server_are_checked(answer: bytes, status: int, says: str) -> None:
    with (
        rendezvous_server({"/gradcomp/store": answer}, status) as (port, _),
        pytest.raises(TransportError, match=says),
    ):
        connect(discover(horovodrun(1, 2, port)), 2.0)


def test_a_server_that_is_not_there_is_named_and_nowhere_to_meet_says_what_to_set() -> None:
    port = free_port()
    with pytest.raises(TransportError, match=f"127.0.0.1:{port}"):
        connect(discover(horovodrun(1, 2, port)), 2.0)
    with pytest.raises(ConfigError, match="MASTER_ADDR and MASTER_PORT"):
        connect(discover({"RANK": "0", "WORLD_SIZE": "2"}), 2.0)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("variable", ["GLOO_SOCKET_IFNAME", "HOROVOD_GLOO_IFACE"])
def test_unknown_interface_is_named_beside_those_that_are_here(variable: str, rank: int) -> None:
    with pytest.raises(ConfigError, match=rf"{variable}=nonet7: .* it has lo\b"):
        connect(discover({**horovodrun(rank, 2, 1), variable: "nonet7"}), 2.0)


def test_mpi_of_another_launcher_is_not_started() -> None:
    """Under Open MPI's PMIx, MPICH would end the process."""
    pytest.importorskip("mpi4py")
    program = "import mpi4py; mpi4py.rc.initialize = False\nfrom mpi4py import MPI; print(MPI.Get_library_version())"
    (probe,) = run_ranks(program, 1, env=lambda rank: {})
    if "MPICH" not in probe.stdout or "pmix" in probe.stdout.lower():
        pytest.skip("needs an MPICH without PMIx")
    kind, message = alone({**open_mpi(0, 2, local=False), "PMIX_NAMESPACE": "prterun-1"})
    assert kind == "ConfigError"
    assert "MPICH" in message
    assert "MASTER_ADDR" in message


def test_mpi_that_srun_did_not_tell_is_named() -> None:
    pytest.importorskip("mpi4py")
    kind, message = alone({"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"})
    assert (kind, "--mpi=pmi2" in message) == ("ConfigError", True)
