"""The store of torch.distributed as a control channel, on real ranks. The transport: tests/transport."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
import torch.distributed as dist
from batch import on_ranks

import gradcomp.torch as gc
from gradcomp.job import runtime
from gradcomp.transport.control import StoreSilentError
from gradcomp.transport.torch import TorchControl

pytestmark = pytest.mark.alone


@on_ranks(2)
def test_what_one_rank_publishes_the_others_look_up():
    control = runtime.current().make_control()
    assert control.lookup("nothing") is None
    if gc.rank() == 1:
        control.publish("key", b"first")
        control.publish("key", b"last")
    dist.barrier()
    assert control.lookup("key") == b"last"


# ---------------------------------------------------------------------------------------- a store in trouble


SERVER = """
import sys, time
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(100)
"""


def control_of_a_server_of_its_own() -> tuple[subprocess.Popen, TorchControl]:
    server = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    port = int(server.stdout.readline())
    store = dist.TCPStore("127.0.0.1", port, None, is_master=False, wait_for_workers=False)
    get_default = dist.distributed_c10d._get_default_store
    dist.distributed_c10d._get_default_store = lambda: store
    try:
        return server, TorchControl("test", 10.0, "a server")
    finally:
        dist.distributed_c10d._get_default_store = get_default


@on_ranks(1)
def test_a_stopped_store_is_waited_for_three_seconds_then_not_at_all_and_used_again_when_it_answers():
    server, control = control_of_a_server_of_its_own()
    try:
        control.publish("key", b"value")
        os.kill(server.pid, signal.SIGSTOP)
        begin = time.monotonic()
        with pytest.raises(StoreSilentError, match="served by a server, does not answer"):
            control.lookup("key")
        assert time.monotonic() - begin < 8
        begin = time.monotonic()
        with pytest.raises(StoreSilentError):
            control.lookup("key")
        assert time.monotonic() - begin < 1
        os.kill(server.pid, signal.SIGCONT)
        time.sleep(1)
        assert control.lookup("key") == b"value"
    finally:
        server.kill()
        server.wait()


@on_ranks(1)
def test_a_dead_store_is_gone():
    server, control = control_of_a_server_of_its_own()
    server.kill()
    server.wait()
    with pytest.raises(gc.TransportError, match="served by a server, is gone"):
        _use(control)


def _use(control: TorchControl) -> None:
    for _ in range(3):  # what is sent first may still fit into a buffer
        control.publish("key", b"value")
        control.lookup("key")
