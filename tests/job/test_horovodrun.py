"""What an elastic process asks horovodrun's driver. A job of its is in tests/launchers/test_elastic.py."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from gradcomp.core.errors import ConfigError
from gradcomp.job.horovodrun import HorovodDriver, is_elastic


class Server(ThreadingHTTPServer):
    """Answers once it may."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[str] = []
        self.may_answer = threading.Event()
        self.answer = "0,2,0,1,0,2"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        self.server.may_answer.wait(20)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.server.answer.encode())

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield made
    made.may_answer.set()
    made.shutdown()


def environment(port: int) -> dict[str, str]:
    return {
        "HOROVOD_ELASTIC": "1", "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_HOSTNAME": "a", "HOROVOD_LOCAL_RANK": "1",
    }  # fmt: skip


def until(condition) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_process_asks_once_and_does_not_wait(server) -> None:
    driver = HorovodDriver(environment(server.server_port))
    driver.ask()
    until(lambda: server.asked)
    driver.on_hosts_updated(0, 1)
    assert not driver.hosts_changed, (
        "while an answer is due, a second question would be counted as another process's"
    )
    driver.ask()
    server.may_answer.set()
    until(lambda: driver.hosts_changed)
    assert server.asked == ["/rank_and_size/a:1"]
    assert not driver.removed
    server.answer = "-1,-1,-1,-1,-1,-1"
    driver.ask()
    until(lambda: driver.removed)
    assert not driver.hosts_changed
    assert len(server.asked) == 2


def test_a_driver_that_is_gone_is_said_once(caplog) -> None:
    driver = HorovodDriver(environment(1))
    driver.ask()
    until(lambda: "does not answer" in caplog.text)
    assert not driver.removed


def test_a_half_set_environment_is_an_error() -> None:
    given = environment(1)
    assert is_elastic(given)
    assert not is_elastic({"HOROVOD_ELASTIC": "1"})
    del given["HOROVOD_HOSTNAME"]
    with pytest.raises(ConfigError, match="has not set HOROVOD_HOSTNAME"):
        HorovodDriver(given)
