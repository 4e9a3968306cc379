"""torch.distributed as a transport, and its store as a control channel, on real ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch.distributed as dist
from batch import on_ranks

import gradcomp.torch as gc
from gradcomp.torch import runtime
from gradcomp.transport.base import wait
from gradcomp.transport.control import StoreSilentError
from gradcomp.transport.torch import TorchControl


def gathered(value) -> list:
    everyone = [None] * gc.size()
    dist.all_gather_object(everyone, value)
    return everyone


def transport():
    return runtime.current().make_group(runtime.current().everyone)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@on_ranks(3)
def test_sums_are_the_same_bits_on_all_ranks_and_correct(dtype):
    ours = transport()
    for length in (1, 2, 7, 1000, 100_003):
        values = [np.random.default_rng(rank).standard_normal(length).astype(dtype) for rank in range(3)]
        array = values[gc.rank()].copy()
        wait(ours.allreduce(array))
        np.testing.assert_allclose(array, sum(values), rtol=1e-5, atol=1e-5)
        assert len(set(gathered(array.tobytes()))) == 1


@on_ranks(3)
def test_alltoallv_delivers_parts_of_unequal_length():
    ours, rank = transport(), gc.rank()
    counts = [[0, 3, 1], [5, 0, 0], [2, 0, 4]]  # by sender, by receiver
    send = np.concatenate([np.full(n, 10 * rank + to, np.uint8) for to, n in enumerate(counts[rank])])
    recv = np.zeros(sum(row[rank] for row in counts), np.uint8)
    wait(ours.alltoallv(send, counts[rank], recv, [row[rank] for row in counts]))
    assert recv.tolist() == [10 * sender + rank for sender in range(3) for _ in range(counts[sender][rank])]


@on_ranks(3)
def test_allgatherv_fills_every_part():
    ours, rank = transport(), gc.rank()
    counts = [4, 0, 3]
    starts = np.concatenate(([0], np.cumsum(counts)))
    buffer = np.zeros(sum(counts), np.uint8)
    buffer[starts[rank] : starts[rank + 1]] = rank + 1
    wait(ours.allgatherv(buffer, counts))
    assert buffer.tolist() == [1, 1, 1, 1, 3, 3, 3]


@on_ranks(3)
def test_allgather_bytes_returns_every_ranks_bytes_of_any_length():
    ours = transport()
    assert ours.allgather_bytes(b"x" * gc.rank()) == [b"", b"x", b"xx"]
    assert ours.allgather_bytes(b"") == [b"", b"", b""]


@on_ranks(3)
def test_bytes_sent_are_those_to_other_ranks():
    ours, rank = transport(), gc.rank()
    seen = []
    for issue in (
        lambda: ours.allreduce(np.zeros(300, np.float32)),
        lambda: ours.alltoallv(
            np.zeros(60, np.uint8),
            [10, 20, 30],
            np.zeros(3 * 10 * (rank + 1), np.uint8),
            [10 * (rank + 1)] * 3,
        ),
        lambda: ours.allgatherv(np.zeros(6, np.uint8), [1, 2, 3]),
    ):
        before = ours.bytes_sent
        wait(issue())
        seen.append(ours.bytes_sent - before)
    assert seen == [1600, 60 - 10 * (rank + 1), 2 * (rank + 1)]


@on_ranks(3)
def test_transports_of_one_process_do_not_mix():
    first, second = transport(), transport()
    arrays = [np.full(1000, gc.rank() + n, np.float32) for n in range(2)]
    pair = [first.allreduce(arrays[0]), second.allreduce(arrays[1])]
    for handle in reversed(pair) if gc.rank() == 1 else pair:
        wait(handle)
    assert arrays[0].tolist() == [3.0] * 1000
    assert arrays[1].tolist() == [6.0] * 1000


@on_ranks(3)
def test_close_is_idempotent():
    ours = transport()
    ours.close()
    ours.close()


@on_ranks(3)
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
def test_a_stopped_store_is_waited_for_three_seconds_and_then_not_at_all():
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
    finally:
        server.kill()
        server.wait()


@on_ranks(1)
def test_a_store_that_answers_again_is_used_again():
    server, control = control_of_a_server_of_its_own()
    try:
        control.publish("key", b"value")
        os.kill(server.pid, signal.SIGSTOP)
        with pytest.raises(StoreSilentError):
            control.lookup("key")
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
