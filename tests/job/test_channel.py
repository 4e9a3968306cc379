"""The user's own collectives over any transport, here in one process: a thread for each rank."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gradcomp.core.config import Config
from gradcomp.core.errors import ConfigError, PlanMismatchError, StateError, WireFormatError
from gradcomp.exchange.request_group import Call
from gradcomp.exchange.watchdog import Watchdog
from gradcomp.job.call_matching import inline_bytes
from gradcomp.job.channel import Channel
from gradcomp.transport.control import LocalControl
from gradcomp.transport.inprocess import World

WORLDS = [2, 3, 4, 7]


def everywhere(world: int, body: Callable[[Channel], Any]) -> list[Any]:
    """What ``body`` returns on each rank."""
    control = LocalControl()
    config = Config(timeout_seconds=20.0)
    watchdogs = [Watchdog(control, rank) for rank in range(world)]
    channels = [Channel(t, watchdogs[t.rank], config, "all") for t in World(world).transports()]
    try:
        with ThreadPoolExecutor(world) as ranks:
            return list(ranks.map(body, channels))
    finally:
        for channel in channels:
            channel.close()
        for watchdog in watchdogs:
            watchdog.stop()


def submit(channel: Channel, work: Callable[[list[int]], Any], call: Call | None = None) -> Any:
    return channel.submit(call or Call("test", ["test()"]), work).result(30)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("elements", [0, 1, 1000])
def test_everyone_gets_the_roots_bytes_whoever_is_root(world: int, elements: int):
    def body(channel: Channel) -> list[np.ndarray]:
        got = []
        for root in range(world):
            array = np.full(elements, channel.rank, dtype=np.uint8)
            submit(channel, lambda _, array=array, root=root: channel.broadcast(array, root))
            got.append(array)
        return got

    for arrays in everywhere(world, body):
        for root, array in enumerate(arrays):
            np.testing.assert_array_equal(array, np.full(elements, root, dtype=np.uint8))


@pytest.mark.parametrize("world", WORLDS)
def test_a_broadcast_sends_the_bytes_once_to_each_other_rank(world: int):
    def body(channel: Channel) -> int:
        before = channel._group.bytes_sent
        submit(channel, lambda _: channel.broadcast(np.zeros(1000, dtype=np.uint8), world - 1))
        header_bytes = (48 + inline_bytes(world)) * (world - 1)
        return channel._group.bytes_sent - before - header_bytes

    sent = everywhere(world, body)
    assert sum(sent) == 1000 * (world - 1)
    assert max(sent) <= 1000 * world.bit_length()  # along a tree: no rank sends to all in large worlds


@pytest.mark.parametrize("world", WORLDS)
def test_parts_of_any_length_are_gathered_in_rank_order(world: int):
    def body(channel: Channel) -> np.ndarray:
        part = np.full(channel.rank * 3, channel.rank, dtype=np.uint8)
        return submit(
            channel,
            lambda lengths: channel.allgather(part, lengths),
            Call("test", ["test()"], number=len(part)),
        )

    expected = np.concatenate([np.full(rank * 3, rank, dtype=np.uint8) for rank in range(world)])
    for whole in everywhere(world, body):
        np.testing.assert_array_equal(whole, expected)


@pytest.mark.parametrize("world", WORLDS)
def test_parts_go_to_their_ranks(world: int):
    def body(channel: Channel) -> np.ndarray:
        send_counts = [(channel.rank + to) % 3 for to in range(world)]
        recv_counts = [(other + channel.rank) % 3 for other in range(world)]
        send = np.full(sum(send_counts), channel.rank, dtype=np.uint8)
        return submit(channel, lambda _: channel.alltoall(send, send_counts, recv_counts))

    for rank, got in enumerate(everywhere(world, body)):
        expected = [np.full((other + rank) % 3, other, dtype=np.uint8) for other in range(world)]
        np.testing.assert_array_equal(got, np.concatenate(expected))


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64])
def test_sums_are_exact_and_equal(dtype: Any):
    def body(channel: Channel) -> np.ndarray:
        array = np.arange(5, dtype=dtype) * (channel.rank + 1)
        submit(channel, lambda _: channel.allreduce(array))
        return array

    for array in everywhere(3, body):
        np.testing.assert_array_equal(array, np.arange(5, dtype=dtype) * 6)


def test_ranks_that_call_different_things_hear_which_and_can_go_on():
    def body(channel: Channel) -> int:
        own = Call("test", ["shape", f"of rank {min(channel.rank, 1)}"])
        with pytest.raises(PlanMismatchError, match="rank 0 has of rank 0, rank 1 has of rank 1"):
            submit(channel, lambda _: None, own)
        problem = "it is odd" if channel.rank == 2 else None
        with pytest.raises(ConfigError, match="test: rank 2: it is odd"):
            submit(channel, lambda _: None, Call("test", ["test()"], problem=problem))
        return submit(channel, sum, Call("test", ["test()"], number=channel.rank))

    assert everywhere(3, body) == [3, 3, 3]


def test_a_call_that_is_queued_as_the_channel_closes_is_an_error_and_does_not_wait_for_ever():
    (transport,) = World(1).transports()
    watchdog = Watchdog(LocalControl(), 0)
    channel = Channel(transport, watchdog, Config(timeout_seconds=20.0), "all")
    channel.close()
    watchdog.stop()
    channel._thread = SimpleNamespace(is_alive=lambda: True)  # as a caller saw it that looked before the end
    with pytest.raises(StateError, match="test: gradcomp was shut down"):
        channel.submit(Call("test", ["test()"]), lambda _: None).result(5)


def test_work_that_fails_gives_the_channel_up_on_all_ranks():
    def body(channel: Channel) -> str:
        def work(_: list[int]) -> None:
            if channel.rank == 1:
                raise WireFormatError("nonsense came")
            channel.allreduce(np.zeros(3))

        with pytest.raises((WireFormatError, ConnectionError), match="rank 1: nonsense came") as caught:
            submit(channel, work)
        assert channel.failure is not None
        return type(caught.value).__name__

    assert everywhere(3, body) == ["TransportError", "WireFormatError", "TransportError"]
