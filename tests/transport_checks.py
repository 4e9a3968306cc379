"""What every transport must do. A check runs on all ranks at once; see ``contract``."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from contract import Rank, wait_until

from gradcomp.core.errors import TransportError
from gradcomp.transport.base import Rooted, wait

CHECKS: dict[str, Callable[[Rank], None]] = {}

LARGE_BYTES = 4 << 20


def check(function: Callable[[Rank], None]) -> Callable[[Rank], None]:
    CHECKS[function.__name__] = function
    return function


def pattern(length: int, source: int, to: int = 0, number: int = 0) -> np.ndarray:
    """Bytes that only this message has."""
    return np.random.default_rng([length, source, to, number]).integers(0, 256, length, dtype=np.uint8)


def same_on_all(r: Rank, array: np.ndarray) -> bool:
    return len(set(r.meet(array.tobytes()))) == 1


# ------------------------------------------------------------------------------------------ allreduce


def sums(r: Rank, dtype: str, length: int, spread: float) -> None:
    values = []
    for rank in range(r.size):
        rng = np.random.default_rng([rank, length])
        values.append(
            (rng.standard_normal(length) * 10 ** rng.uniform(-spread, spread, length)).astype(dtype)
        )
    array = values[r.rank].copy()
    r.settle(r.transport.allreduce(array))
    exact = np.sum([value.astype(np.longdouble) for value in values], axis=0)
    bound = 2 * r.size * np.finfo(dtype).eps * np.sum([np.abs(value) for value in values], axis=0)
    assert np.all(np.abs(array - exact) <= bound)
    assert same_on_all(r, array)


@check
def sums_are_correct_and_the_same_bits_on_all_ranks(r: Rank) -> None:
    """Also of values that are far apart."""
    for dtype in ("float32", "float64"):
        for spread, lengths in ((0, (0, 1, 2, 3, 7, 64, 1000, 4097, 100_003)), (6, (5, 2048, 300_001))):
            for length in lengths:
                sums(r, dtype, length, spread)


@check
def sums_of_infinity_and_not_a_number_are_so_everywhere(r: Rank) -> None:
    array = np.ones(5, np.float32)
    array[0] = np.inf if r.rank == 0 else 1
    array[1] = np.nan if r.rank == r.size - 1 else 1
    array[2] = -np.inf if r.rank == 0 else np.inf
    r.settle(r.transport.allreduce(array))
    several = r.size > 1
    assert array[0] == np.inf
    assert np.isnan(array[1])
    assert np.isnan(array[2]) if several else array[2] == -np.inf
    assert array[3:].tolist() == [r.size] * 2


@check
def a_root_gets_sums_and_sends_its_bytes(r: Rank) -> None:
    """Of two levels those of the ranks of a host, of which all hosts take turns alike."""
    ours, members = r.transport, list(range(r.size))
    assert (isinstance(ours, Rooted) or ours.reduces_inside) == r.engine.rooted
    if not r.engine.rooted:
        return
    if not isinstance(ours, Rooted):
        members = list(ours.topology.members(r.rank))
    reduce = ours.reduce if isinstance(ours, Rooted) else ours.reduce_inside
    broadcast = ours.broadcast if isinstance(ours, Rooted) else ours.broadcast_inside
    for turn, length in enumerate((0, 1, 7, 1000, 100_003)):
        root, before = members[turn % len(members)], ours.bytes_sent
        values = [
            np.random.default_rng([turn, rank]).standard_normal(length).astype(np.float32) for rank in members
        ]
        array, buffer = values[members.index(r.rank)].copy(), pattern(length, r.rank)
        r.settle(reduce(array, root), broadcast(buffer, root))
        exact = np.sum([value.astype(np.float64) for value in values], axis=0)
        bound = len(members) * np.finfo(np.float32).eps * np.sum([np.abs(value) for value in values], axis=0)
        if r.rank == root:
            assert np.all(np.abs(array - exact) <= bound)
        else:
            np.testing.assert_array_equal(array, values[members.index(r.rank)])
        np.testing.assert_array_equal(buffer, pattern(length, root))
        sent = (len(members) - 1) * length if r.rank == root else 4 * length
        assert ours.bytes_sent - before == sent


# ------------------------------------------------------------------------------------------ alltoallv, allgatherv


def all_to_all(r: Rank, counts: Sequence[Sequence[int]], spare: int = 0) -> None:
    """``counts[i][j]``: bytes from i to j."""
    send = np.concatenate(
        [pattern(n, r.rank, to) for to, n in enumerate(counts[r.rank])] + [np.zeros(spare, np.uint8)]
    )
    kept = send.copy()
    received = [row[r.rank] for row in counts]
    recv = np.zeros(sum(received) + spare, np.uint8)
    r.settle(r.transport.alltoallv(send, counts[r.rank], recv, received))
    wanted = np.concatenate(
        [pattern(n, source, r.rank) for source, n in enumerate(received)] + [np.zeros(spare, np.uint8)]
    )
    np.testing.assert_array_equal(recv, wanted)
    np.testing.assert_array_equal(send, kept)


@check
def alltoallv_delivers_parts_of_any_length(r: Rank) -> None:
    all_to_all(r, [[3 * i + 5 * j + 1 for j in range(r.size)] for i in range(r.size)])
    all_to_all(r, [[1000 * (i + 1) * (j + 2) for j in range(r.size)] for i in range(r.size)])
    all_to_all(r, [[7 * ((i + j) % 2) for j in range(r.size)] for i in range(r.size)])
    all_to_all(r, [[9 if i == 0 else 0] * r.size for i in range(r.size)])
    all_to_all(r, [[9 if j == r.size - 1 else 0 for j in range(r.size)] for i in range(r.size)])
    all_to_all(r, [[0] * r.size] * r.size)


@check
def alltoallv_takes_buffers_longer_than_their_parts(r: Rank) -> None:
    all_to_all(r, [[11] * r.size] * r.size, spare=5)


def all_gather(r: Rank, counts: Sequence[int]) -> None:
    starts = np.concatenate(([0], np.cumsum(counts)))
    buffer = np.zeros(sum(counts), np.uint8)
    buffer[starts[r.rank] : starts[r.rank + 1]] = pattern(counts[r.rank], r.rank)
    r.settle(r.transport.allgatherv(buffer, counts))
    wanted = [pattern(n, source) for source, n in enumerate(counts)]
    np.testing.assert_array_equal(buffer, np.concatenate(wanted))


@check
def allgatherv_fills_parts_of_any_length(r: Rank) -> None:
    all_gather(r, [10 + 3 * i for i in range(r.size)])
    all_gather(r, [5000 * (r.size - i) for i in range(r.size)])
    for full in range(r.size):
        all_gather(r, [6 if i == full else 0 for i in range(r.size)])
    all_gather(r, [4 * (i % 2) for i in range(r.size)])
    all_gather(r, [0] * r.size)


@check
def allgather_bytes_returns_every_ranks_bytes_of_any_length(r: Rank) -> None:
    assert r.transport.allgather_bytes(b"x" * r.rank) == [b"x" * i for i in range(r.size)]
    assert r.transport.allgather_bytes(b"") == [b""] * r.size
    assert r.transport.allgather_bytes(b"y" * 70_000, wait) == [b"y" * 70_000] * r.size


# ------------------------------------------------------------------------------------------ exchange


def exchange(r: Rank, lengths: dict[tuple[int, int], int], number: int = 0) -> tuple:
    """Issue it; ``lengths[i, j]``: bytes from i to j. The handle, and a function that looks at what arrived."""
    sends = [(j, pattern(n, i, j, number)) for (i, j), n in lengths.items() if i == r.rank]
    recvs = [(i, np.zeros(n, np.uint8)) for (i, j), n in lengths.items() if j == r.rank]
    random.Random(r.rank).shuffle(sends)
    random.Random(-r.rank).shuffle(recvs)

    def look() -> None:
        for source, array in recvs:
            np.testing.assert_array_equal(array, pattern(len(array), source, r.rank, number))

    return r.transport.exchange(sends, recvs), look


def shapes(size: int) -> dict[str, dict[tuple[int, int], int]]:
    ranks = range(size)
    return {
        "nobody": {},
        "ring": {(i, (i + 1) % size): 100 + i for i in ranks if size > 1},
        "ring, backwards": {(i, (i - 1) % size): 100 + i for i in ranks if size > 1},
        "pairs": {(i, i ^ 1): 50 + i for i in ranks if i ^ 1 < size},
        "one to all": {(0, i): 30 * i for i in ranks if i},
        "all to one": {(i, size - 1): 70 * i for i in ranks if i != size - 1},
        "one to one": {(0, size - 1): 9} if size > 1 else {},
        "all to all": {(i, j): 20 + i + 3 * j for i in ranks for j in ranks if i != j},
        "no bytes": {(i, j): 0 for i in ranks for j in ranks if i != j},
    }


@check
def exchange_delivers_in_every_shape(r: Rank) -> None:
    for lengths in shapes(r.size).values():
        handle, look = exchange(r, lengths)
        r.settle(handle)
        look()


@check
def exchanges_under_way_together_do_not_mix(r: Rank) -> None:
    under_way = [
        exchange(r, lengths, number) for number, lengths in enumerate(list(shapes(r.size).values()) * 3)
    ]
    r.settle(*(handle for handle, _ in reversed(under_way)))
    for _, look in under_way:
        look()


# ------------------------------------------------------------------------------------------ under way together


@check
def operations_complete_in_whatever_order_they_are_polled(r: Rank) -> None:
    handles, looks = [], []
    for number in range(12):
        array = np.full(1 + 997 * number, float(r.rank + number), np.float32)
        handles.append(r.transport.allreduce(array))
        total = sum(range(r.size)) + r.size * number
        looks.append(lambda a=array, t=total: np.testing.assert_array_equal(a, t))
        count = 1 + 501 * number
        send = np.concatenate([pattern(count, r.rank, to, number) for to in range(r.size)])
        recv = np.zeros_like(send)
        handles.append(r.transport.alltoallv(send, [count] * r.size, recv, [count] * r.size))
        wanted = np.concatenate([pattern(count, source, r.rank, number) for source in range(r.size)])
        looks.append(lambda a=recv, w=wanted: np.testing.assert_array_equal(a, w))
        del send  # the handle keeps it
        buffer = np.zeros(count * r.size, np.uint8)
        buffer[r.rank * count : (r.rank + 1) * count] = number
        handles.append(r.transport.allgatherv(buffer, [count] * r.size))
        looks.append(lambda a=buffer, n=number: np.testing.assert_array_equal(a, n))
        handle, look = exchange(r, shapes(r.size)["ring"], number)
        handles.append(handle)
        looks.append(look)
    order = list(range(len(handles)))
    random.Random(r.rank).shuffle(order)
    for index in order:  # one to its end before the next: another rank may be at any other
        r.settle(handles[index])
    for look in looks:
        look()
    assert all(handle.poll() for handle in handles), "a complete operation stays complete"


@check
def large_messages_arrive_whole(r: Rank) -> None:
    part = LARGE_BYTES // r.size
    array = np.arange(LARGE_BYTES // 4, dtype=np.float32) + r.rank
    send = np.repeat(np.arange(r.size, dtype=np.uint8) + 10 * r.rank, part)
    recv, buffer = np.zeros_like(send), np.zeros_like(send)
    buffer[r.rank * part : (r.rank + 1) * part] = 1 + r.rank
    handles = [
        r.transport.allreduce(array),
        r.transport.alltoallv(send, [part] * r.size, recv, [part] * r.size),
        r.transport.allgatherv(buffer, [part] * r.size),
    ]
    whole, arrived = np.full(LARGE_BYTES, 1 + r.rank, np.uint8), np.zeros(LARGE_BYTES, np.uint8)
    if r.size > 1:
        left, right = (r.rank - 1) % r.size, (r.rank + 1) % r.size
        handles.append(r.transport.exchange([(right, whole)], [(left, arrived)]))
    r.settle(*handles)
    assert np.all(np.abs(array - (r.size * np.arange(len(array)) + sum(range(r.size)))) <= r.size)
    assert np.array_equal(recv, np.repeat(10 * np.arange(r.size, dtype=np.uint8) + r.rank, part))
    assert np.array_equal(buffer, np.repeat(1 + np.arange(r.size, dtype=np.uint8), part))
    assert r.size == 1 or np.all(arrived == 1 + left)
    assert same_on_all(r, array)


@check
def polling_does_not_wait_for_a_late_rank(r: Rank) -> None:
    """The last rank comes when the others have polled often; none of them would, had one poll waited."""
    late = r.size - 1
    arrays = [np.ones(length, np.float32) for length in (10, LARGE_BYTES // 4)]
    parts = [np.zeros(1000 * r.size, np.uint8) for _ in range(3)]
    counts = [1000] * r.size
    handles = []
    if r.rank == late:
        r.meet()
    handles += [r.transport.allreduce(array) for array in arrays]
    handles.append(r.transport.alltoallv(parts[0], counts, parts[1], counts))
    handles.append(r.transport.allgatherv(parts[2], counts))
    if r.rank != late:
        for _ in range(50):
            assert not any(handle.poll() for handle in handles)
        r.meet()
    r.settle(*handles)
    assert all(array[-1] == r.size for array in arrays)


# ------------------------------------------------------------------------------------------ several, some, and the end


@check
def bytes_sent_are_those_to_other_ranks(r: Rank) -> None:
    ours, rank, size = r.transport, r.rank, r.size
    own = 10 * (rank + 1)
    seen = []
    for issue in (
        lambda: ours.allreduce(np.zeros(60 * size, np.float32)),
        lambda: ours.alltoallv(
            np.zeros(sum(10 * (i + 1) for i in range(size)), np.uint8),
            [10 * (i + 1) for i in range(size)],
            np.zeros(size * own, np.uint8),
            [own] * size,
        ),
        lambda: ours.allgatherv(
            np.zeros(sum(10 * (i + 1) for i in range(size)), np.uint8), [10 * (i + 1) for i in range(size)]
        ),
        lambda: exchange(r, shapes(size)["all to one"])[0],
    ):
        before = ours.bytes_sent
        r.settle(issue())
        seen.append(ours.bytes_sent - before)
    others = sum(10 * (i + 1) for i in range(size)) - own
    assert seen[1:] == [others, (size - 1) * own, 70 * rank if rank < size - 1 else 0]
    if r.engine.flat:
        assert seen[0] == 2 * 240 * (size - 1)


@check
def transports_of_one_process_do_not_mix(r: Rank) -> None:
    pair = r.make(), r.make()
    arrays = [np.full(1000, r.rank + n, np.float32) for n in range(2)]
    first, second = (0, 1) if r.rank % 2 else (1, 0)  # ranks need not begin in the same order
    handles = [pair[first].allreduce(arrays[first]), pair[second].allreduce(arrays[second])]
    r.settle(*handles)
    ranks = sum(range(r.size))
    assert [array.tolist() for array in arrays] == [[ranks] * 1000, [ranks + r.size] * 1000]
    r.meet()
    for transport in pair:
        transport.close()


@check
def some_ranks_have_a_transport_of_their_own(r: Rank) -> None:
    if r.size < 3:
        return
    members = [0, r.size - 1]
    array = np.full(10, float(r.rank), np.float32)
    if r.rank in members:
        ours = r.make(members)
        assert (ours.rank, ours.size) == (members.index(r.rank), 2)
        r.settle(ours.allreduce(array))
        assert array.tolist() == [r.size - 1] * 10
        arrived = np.zeros(3, np.uint8)
        r.settle(ours.exchange([(1 - ours.rank, pattern(3, ours.rank))], [(1 - ours.rank, arrived)]))
        np.testing.assert_array_equal(arrived, pattern(3, 1 - ours.rank))
        r.meet(ranks=members)
        ours.close()
    r.settle(r.transport.allreduce(array))


@check
def closing_twice_is_closing_once(r: Rank) -> None:
    ours = r.make()
    r.settle(ours.allreduce(np.ones(3, np.float32)))
    r.meet()
    ours.close()
    ours.close()


@check
def a_rank_that_leaves_is_an_error_on_the_others(r: Rank) -> None:
    """The last check: a rank is gone. All who have something to do with it hear of that."""
    if r.size == 1 or r.engine.leave is None:
        return
    ours = r.make()
    r.settle(ours.allreduce(np.ones(3, np.float32)))
    r.meet()
    if r.rank == r.size - 1:
        r.judge("a_rank_that_leaves_is_an_error_on_the_others", "")
        r.engine.leave(r)
        return
    part = np.ones(100_000 * r.size, np.uint8)
    counts = [100_000] * r.size

    def completes() -> None:
        wait_until(ours.alltoallv(part, counts, np.zeros_like(part), counts).poll, "the transport fails")

    with pytest.raises(TransportError):
        completes()
    ours.abandon()
