"""Ranks meet under every launcher's environment, or say why not; what they leave behind."""

from __future__ import annotations

import functools
import http.server
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import preloaded
import pytest
from launching import Finished, plain_variables, run_ranks
from ports import free_port

from gradcomp.core.errors import ConfigError, TransportError
from gradcomp.job.launch import discover
from gradcomp.job.over_torch import connect
from gradcomp.job.signing import HostSocket

# ---------------------------------------------------------------------------------------- the socket of a host


@pytest.fixture
def offering() -> Iterator[HostSocket]:
    offering = HostSocket(f"job {os.getpid()}")
    yield offering
    offering.close()


def reading() -> HostSocket:
    return HostSocket(f"job {os.getpid()}")


def test_a_host_socket_carries_a_text_to_many_as_long_as_it_is_offered(offering: HostSocket) -> None:
    assert reading().read() is None
    offering.offer("1234")
    with pytest.raises(ConfigError, match="MASTER_ADDR"):
        reading().offer("5678")  # the name is taken
    assert HostSocket("another").read() is None
    with ThreadPoolExecutor(64) as readers:
        assert set(readers.map(lambda _: reading().read(), range(512))) == {"1234"}
    offering.close()
    assert reading().read() is None


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


#: Ranks that are forks: how an interpreter starts is tested in test_life.py.
forks = functools.partial(run_ranks, imported=preloaded.TORCH)


def test_ranks_meet_under_horovodrun() -> None:
    with rendezvous_server() as (port, content):
        assert said(forks(join(), 3, env=lambda rank: horovodrun(rank, 3, port))) == one_host(3)
    assert [path.split("/")[1] for path in content] == ["gradcomp"]


@pytest.mark.parametrize("told", ["places", "an address"])
def test_ranks_meet_under_mpirun_without_mpi_on_one_host_or_at_master_address(told: str) -> None:
    environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    if told == "places":
        environ = {"PMIX_NAMESPACE": f"prterun-{os.getpid()}-1"}
    results = forks(join(), 3, env=lambda rank: {**open_mpi(rank, 3, told == "places"), **environ})
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


def test_ranks_meet_again_after_shutdown() -> None:
    program = """
        import torch, gradcomp.torch as gc
        for cycle in range(10):
            gc.init(timeout_seconds=30)
            print(gc.allreduce(torch.full((1,), float(gc.rank() + cycle)), op=gc.Sum).item(), end=" ")
            gc.shutdown()
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
