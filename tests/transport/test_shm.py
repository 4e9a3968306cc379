"""Shared memory as a transport: what it computes, in one process."""

from __future__ import annotations

import gc
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shared_memory import join_all, settle, shm_transports, sum_in_rank_order
from tiers import examples

from gradcomp import ConfigError, PlanMismatchError, TransportError
from gradcomp.transport.shm import RINGS_BYTES, ShmTransport, ring_bytes_for


def random_bytes(rng, length: int):
    return rng.integers(0, 256, length, dtype=np.uint8)


def test_special_values_are_summed_to_the_same_bytes_everywhere() -> None:
    values = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 1e-45, 3e38, 1.0], np.float32)
    parts = [np.repeat(values, 9), np.tile(values, 9), np.tile(values[::-1], 9)]
    arrays = [part.copy() for part in parts]
    with shm_transports(3) as ranks:
        settle([rank.allreduce(array) for rank, array in zip(ranks, arrays, strict=True)])
    assert len({array.tobytes() for array in arrays}) == 1
    np.testing.assert_array_equal(arrays[0], sum_in_rank_order(parts))


kinds = st.sampled_from(["allreduce32", "allreduce64", "alltoallv", "allgatherv", "exchange"])
lengths = st.one_of(st.just(0), st.integers(1, 70), st.integers(0, 20_000))


@examples(40)
@given(
    size=st.sampled_from([1, 2, 3, 5, 7]),
    operations=st.lists(st.tuples(kinds, lengths, st.integers(0, 2**32 - 1)), min_size=1, max_size=12),
    late=st.data(),
)
def test_many_at_once_equal_numpy(size: int, operations, late) -> None:
    """All ranks issue all operations, one rank after the other, before any is waited for."""
    wanted, found = [], []
    with shm_transports(size) as ranks:
        issues = [[] for _ in ranks]
        for kind, length, seed in operations:
            rng = np.random.default_rng(seed)
            for r, (issue, result, want) in enumerate(plan_of(kind, length, rng, size)):
                issues[r].append(issue)
                found.append(result)
                wanted.append(want)
        handles = []
        for r in late.draw(st.permutations(range(size))):
            handles += [issue(ranks[r]) for issue in issues[r]]
        settle(handles)
    for result, want in zip(found, wanted, strict=True):
        assert result.tobytes() == want.tobytes()


def plan_of(kind: str, length: int, rng, size: int):
    """Per rank: how to issue, where the result comes, and what it is to be."""
    if kind.startswith("allreduce"):
        parts = [rng.standard_normal(length).astype(f"f{int(kind[-2:]) // 8}") for _ in range(size)]
        arrays = [part.copy() for part in parts]
        return [(lambda t, a=a: t.allreduce(a), a, sum_in_rank_order(parts)) for a in arrays]
    if kind == "allgatherv":
        counts = rng.integers(0, length + 1, size).tolist()
        whole, ends = random_bytes(rng, sum(counts)), np.cumsum(counts)
        buffers = [np.zeros(len(whole), np.uint8) for _ in range(size)]
        for r, buffer in enumerate(buffers):
            buffer[ends[r] - counts[r] : ends[r]] = whole[ends[r] - counts[r] : ends[r]]
        return [(lambda t, b=b: t.allgatherv(b, counts), b, whole) for b in buffers]
    counts = rng.integers(0, length + 1, (size, size))
    if kind == "exchange":
        counts[rng.random((size, size)) < 0.5] = 0
        np.fill_diagonal(counts, 0)
    parts = [[random_bytes(rng, n) for n in row] for row in counts]
    rows = []
    for r in range(size):
        recv = np.zeros(counts[:, r].sum(), np.uint8)
        want = np.concatenate([parts[s][r] for s in range(size)])
        ends = np.cumsum(counts[:, r])
        if kind == "alltoallv":
            send = np.concatenate(parts[r])
            rows.append((
                lambda t, r=r, s=send, b=recv: t.alltoallv(s, counts[r].tolist(), b, counts[:, r].tolist()),
                recv, want,
            ))  # fmt: skip
        else:
            sends = [(j, parts[r][j]) for j in range(size) if counts[r, j]]
            recvs = [(j, recv[ends[j] - counts[j, r] : ends[j]]) for j in range(size) if counts[j, r]]
            rows.append((lambda t, s=sends, b=recvs: t.exchange(s, b), recv, want))
    return rows


def test_arrays_live_until_the_thread_is_done_with_them() -> None:
    with shm_transports(2) as (first, second):
        first.allreduce(np.ones(100_000, np.float32))  # neither the handle nor the array is kept
        gc.collect()
        array = np.full(100_000, 2, np.float32)
        settle([second.allreduce(array)])
    assert (array == 3).all()


def test_polls_do_not_block() -> None:
    with shm_transports(2) as (first, second):
        arrays = [np.ones(4_000_000, np.float32) for _ in range(2)]
        handles = [rank.allreduce(array) for rank, array in zip((first, second), arrays, strict=True)]
        polls = 0
        while not all(handle.poll() for handle in handles):
            polls += 1
        assert polls > 10  # one that waited for the end would have been the last


@pytest.mark.alone
def test_waiting_takes_no_processor_time() -> None:
    with shm_transports(4) as ranks:
        arrays = [np.ones(1000, np.float32) for _ in ranks]
        handles = [rank.allreduce(array) for rank, array in zip(ranks[1:], arrays[1:], strict=True)]
        before = time.process_time()
        time.sleep(1.0)
        assert time.process_time() - before < 0.05  # of three threads that wait
        settle([*handles, ranks[0].allreduce(arrays[0])])


# ------------------------------------------------------------------------------------------ construction


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:gradcomp")


def test_nothing_stays_open_or_mapped() -> None:
    before = descriptors(), mappings()
    with shm_transports(3):
        assert (descriptors(), mappings()) == (before[0], before[1] + 3)
        assert not [file for file in Path("/dev/shm").iterdir() if "gradcomp" in file.name]
    assert (descriptors(), mappings()) == before


def test_a_failed_start_leaves_nothing_and_fails_on_every_rank(monkeypatch) -> None:
    from gradcomp import _native

    before, real = (descriptors(), mappings()), _native.ShmRank

    def refuse(*_: object) -> None:
        raise RuntimeError("no memory for a segment")

    for rank, create, attach in ((0, refuse, real.attach), (1, real.create, refuse)):
        monkeypatch.setattr(_native, "ShmRank", SimpleNamespace(create=create, attach=attach))
        for error in join_all(3, lambda rank, meet: ShmTransport(rank, 3, meet)):
            assert isinstance(error, TransportError)
            assert f"rank {rank} cannot share memory: no memory" in str(error)
    gc.collect()
    assert (descriptors(), mappings()) == before


@pytest.mark.parametrize("ring_bytes", [0, 100, 4097, 2048, 1 << 31, -4096])
def test_ring_bytes_are_checked(ring_bytes: int) -> None:
    with pytest.raises(ConfigError, match="power of two"):
        ShmTransport(0, 2, lambda message: [message] * 2, ring_bytes)


def test_other_settings_are_named() -> None:
    errors = join_all(2, lambda rank, meet: ShmTransport(rank, 2, meet, 4096 << rank))
    for error in errors:
        assert isinstance(error, PlanMismatchError)
        assert "ring_bytes=4096" in str(error)
        assert "ring_bytes=8192" in str(error)


@pytest.mark.parametrize(
    ("replies", "error"),
    [
        ([b"", b""], "does not share memory as"),
        ([b"=short", b"=short"], "does not share memory as"),
        ([b"=" + bytes(48)], "1 replies for 2 ranks"),
        ([b"=" + bytes(48)] * 2, "size=0"),
    ],
)
def test_strange_replies_are_refused(replies: list[bytes], error: str) -> None:
    with pytest.raises((ConfigError, TransportError, PlanMismatchError), match=error):
        ShmTransport(1, 2, lambda message: replies)


def test_a_location_that_is_no_segment_is_refused() -> None:
    import struct

    with Path("/proc/self/exe").open("rb") as other:
        location = (os.getpid(), 0, other.fileno(), 0)
        message = b"=" + struct.pack("<QQqQqQ", 2, ring_bytes_for(2), *location)
        seen = []

        def meet(own: bytes) -> list[bytes]:
            seen.append(own)
            return [message, own] if len(seen) == 1 else [own, own]

        with pytest.raises(TransportError, match="rank 0 cannot share memory"):
            ShmTransport(1, 2, meet)


def test_rings_take_4_mib_until_they_are_small() -> None:
    kib = {2: 1024, 3: 256, 4: 256, 5: 128, 6: 64, 8: 64, 9: 64, 64: 64}
    assert {n: ring_bytes_for(n) >> 10 for n in kib} == kib
    assert all(n * n * ring_bytes_for(n) <= RINGS_BYTES for n in range(2, 9))


# ------------------------------------------------------------------------------------------ failure


def test_a_rank_that_left_is_named_by_those_that_need_it() -> None:
    with shm_transports(3) as (first, second, third):
        third.close()
        handles = [rank.allreduce(np.ones(100, np.float32)) for rank in (first, second)]
        for handle in handles:
            with pytest.raises(TransportError, match="rank 2"):
                settle([handle], 2.0)
        with pytest.raises(TransportError, match="rank 2"):
            settle([first.allgatherv(np.zeros(3, np.uint8), [1, 1, 1])])


def test_a_rank_may_leave_once_its_own_part_is_complete() -> None:
    """What it sent is still to be had, and the others go on without it."""
    with shm_transports(3, 1 << 16) as (first, second, third):
        arrays = [np.ones(1000, np.uint8) for _ in range(3)]
        handle = third.exchange([(0, arrays[2])], [])
        settle([handle])
        third.close()
        received = np.zeros(1000, np.uint8)
        settle([first.exchange([], [(2, received)]), second.exchange([], [])])
        assert received.all()
        back = np.zeros(1000, np.uint8)
        settle([first.exchange([(1, arrays[0])], []), second.exchange([], [(0, back)])])
        assert back.all()


def test_an_abandoned_rank_fails_here_and_there() -> None:
    with shm_transports(2) as ranks:
        for rank in ranks:
            handle = rank.allreduce(np.ones(100, np.float32))
            ranks[0].abandon()
            with pytest.raises(TransportError, match="rank 0 gave up"):
                settle([handle], 2.0)


def test_who_gives_up_because_of_another_names_the_other() -> None:
    with shm_transports(3) as (first, second, third):
        third.close()
        handle = first.allreduce(np.ones(100, np.float32))
        with pytest.raises(TransportError, match="rank 2 left"):
            settle([handle], 2.0)
        first.abandon()
        handle = second.exchange([(0, np.ones(100_000, np.uint8))], [])  # more than fits into the ring
        with pytest.raises(TransportError, match="rank 0 failed because of rank 2"):
            settle([handle], 2.0)


def test_a_closed_transport_refuses() -> None:
    with shm_transports(2) as (first, _):
        waiting = first.allreduce(np.ones(100, np.float32))
        first.close()
        first.close()
        for handle in (waiting, first.allreduce(np.ones(100, np.float32))):
            with pytest.raises(TransportError, match="closed"):
                handle.poll()


@pytest.mark.parametrize("end", ["close", "abandon"])
def test_a_transport_may_end_while_another_thread_uses_it(end: str) -> None:
    for _ in range(30):
        with shm_transports(2) as ranks:
            errors = []

            def use(rank: ShmTransport, errors: list[Exception] = errors) -> None:
                try:
                    while True:
                        settle([rank.allreduce(np.ones(3000, np.float32)) for _ in range(3)])
                except TransportError as error:
                    errors.append(error)

            threads = [threading.Thread(target=use, args=(rank,)) for rank in ranks]
            for thread in threads:
                thread.start()
            time.sleep(2e-3)
            getattr(ranks[0], end)()
            for thread in threads:
                thread.join(10)
                assert not thread.is_alive()
            assert len(errors) == 2


def test_different_lengths_are_named() -> None:
    with shm_transports(2) as (first, second):
        first.alltoallv(np.zeros(5, np.uint8), [0, 5], np.zeros(0, np.uint8), [0, 0])
        handle = second.alltoallv(np.zeros(0, np.uint8), [0, 0], np.zeros(9, np.uint8), [9, 0])
        with pytest.raises(TransportError, match="rank 0 sent 5 bytes in collective 0, rank 1 expects 9"):
            settle([handle], 2.0)


def test_different_orders_are_named() -> None:
    with shm_transports(2) as (first, second):
        first.exchange([], [])
        first.exchange([(1, np.zeros(5, np.uint8))], [])
        handle = second.exchange([], [(0, np.zeros(5, np.uint8))])
        with pytest.raises(TransportError, match="rank 0 sent a message of collective 1 where collective 0"):
            settle([handle], 2.0)


def test_a_forked_child_is_not_a_rank() -> None:
    with shm_transports(2) as (first, second):
        waiting = first.allreduce(np.ones(3, np.float32))
        child = os.fork()
        if child == 0:
            try:
                with pytest.raises(TransportError, match="forked"):
                    waiting.poll()
                first.allreduce(np.ones(3, np.float32))
            except TransportError as error:
                del second
                gc.collect()
                first.close()
                os._exit(7 if "forked" in str(error) else 2)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        array = np.ones(3, np.float32)
        settle([waiting, second.allreduce(array)])
        assert (array == 2).all()
