"""The shared segment under hostile hands: whatever is written into it, calls end, with an error or without."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shared_memory import end_of, native_ranks
from tiers import examples

from gradcomp import _native

SIZE, RING = 2, 4096
SLOTS = 4096
POSITIONS = SLOTS + 4096
RINGS = POSITIONS + 4096
PENDING, DONE, FAILED = 0, 1, 2

LIFE, CULPRIT, BELL, ASLEEP = 0, 4, 128, 132


def slot(rank: int) -> int:
    return SLOTS + 256 * rank


def head(source: int, destination: int) -> int:
    return POSITIONS + 128 * (SIZE * source + destination)


def tail(source: int, destination: int) -> int:
    return head(source, destination) + 128 * SIZE * SIZE


def tail_of_all(source: int, reader: int) -> int:
    return head(source, reader) + 2 * 128 * SIZE * SIZE


def ring(source: int, destination: int) -> int:
    return RINGS + RING * (SIZE * source + destination)


# Arrays must outlive their operations.
ONES = np.ones(100_000, np.uint8)
SMALL = np.zeros(4, np.uint8)


class Memory:
    """The bytes of the only segment of this process."""

    def __init__(self) -> None:
        lines = Path("/proc/self/maps").read_text().splitlines()
        self.address = next(int(line.split("-")[0], 16) for line in lines if "memfd:gradcomp" in line)

    def write(self, at: int, value: int, width: int = 8) -> None:
        ctypes.memmove(self.address + at, (value % 2 ** (8 * width)).to_bytes(width, "little"), width)

    def read(self, at: int, width: int = 8) -> int:
        return int.from_bytes(ctypes.string_at(self.address + at, width), "little")


@pytest.fixture
def pair() -> Iterator[tuple[_native.ShmRank, _native.ShmRank, Memory]]:
    with native_ranks(SIZE, RING) as (first, second):
        yield first, second, Memory()


def message(rank: _native.ShmRank, length: int) -> _native.ShmOperation:
    """From rank 0 to rank 1."""
    return rank.exchange([1], [ONES[:length]], [], [])


def arrival(rank: _native.ShmRank, length: int) -> tuple[_native.ShmOperation, np.ndarray]:
    target = np.zeros(length, np.uint8)
    return rank.exchange([], [], [0], [target]), target


def test_the_layout_is_the_one_that_these_tests_write_to(pair) -> None:
    first, second, memory = pair
    assert _native.shm_bytes(SIZE, RING) == RINGS + SIZE * SIZE * RING
    assert memory.read(slot(0) + LIFE, 4) == memory.read(slot(1) + LIFE, 4) == 1
    assert end_of(message(first, 100)) == DONE
    assert memory.read(head(0, 1)) == 64 + 100
    assert memory.read(ring(0, 1)) == 0  # the collective's number
    assert memory.read(ring(0, 1) + 8) == 100
    operation, target = arrival(second, 100)
    assert end_of(operation) == DONE
    assert target.all()
    time.sleep(0.05)
    assert memory.read(tail(0, 1)) == 64 + 100


@pytest.mark.parametrize("position", [RING + 1, 2**63, 2**64 - 1, 2**64 - 64])
def test_a_head_that_cannot_be_is_an_error(pair, position: int) -> None:
    _, second, memory = pair
    memory.write(head(0, 1), position)
    operation, target = arrival(second, 100)
    assert end_of(operation) == FAILED
    assert second.failure() == "rank 0 holds an impossible place in a ring: the shared memory is damaged"
    assert not target.any()


@pytest.mark.parametrize("position", [1, 2**63, 2**64 - RING - 1])
@pytest.mark.parametrize("to_all", [False, True])
def test_a_tail_that_cannot_be_is_an_error(pair, position: int, to_all: bool) -> None:
    first, _, memory = pair
    memory.write(tail_of_all(0, 1) if to_all else tail(0, 1), position)
    operation = first.allgatherv(SMALL, [2, 2]) if to_all else message(first, 100)
    assert end_of(operation) == FAILED
    assert "rank 1 holds an impossible place" in first.failure()


@pytest.mark.parametrize("field", [0, 8, 16])
@pytest.mark.parametrize("value", [2, 2**40, 2**64 - 1])
def test_a_damaged_header_is_an_error(pair, field: int, value: int) -> None:
    first, second, memory = pair
    assert end_of(message(first, 100)) == DONE
    memory.write(ring(0, 1) + field, value)
    operation, target = arrival(second, 100)
    assert end_of(operation) == FAILED
    assert second.failure() == "rank 0's message is damaged in the shared memory"
    assert not target.any()


@pytest.mark.parametrize("culprit", [2, 77, 2**32 - 1])
def test_an_unknown_culprit_is_the_rank_that_names_it(pair, culprit: int) -> None:
    first, _, memory = pair
    memory.write(slot(1) + CULPRIT, culprit, 4)
    memory.write(slot(1) + LIFE, 3, 4)
    assert end_of(first.allgatherv(SMALL, [2, 2])) == FAILED
    assert first.failure() == "rank 1 gave up"


def test_lost_bells_delay_but_do_not_stop(pair) -> None:
    first, second, memory = pair
    operation, target = arrival(second, 100_000)
    time.sleep(0.02)
    sent = message(first, 100_000)
    while PENDING in (operation.state(), sent.state()):
        for rank in range(SIZE):
            memory.write(slot(rank) + ASLEEP, 0, 4)
            memory.write(slot(rank) + BELL, 0, 4)
        time.sleep(1e-3)
    assert (operation.state(), sent.state()) == (DONE, DONE)
    assert target.all()


@pytest.mark.alone
def test_a_rank_whose_bell_was_silenced_can_be_closed() -> None:
    with native_ranks(SIZE, RING) as ranks:
        memory = Memory()
        time.sleep(0.05)  # the threads sleep
        for rank in range(SIZE):
            memory.write(slot(rank) + ASLEEP, 0, 4)
            memory.write(slot(rank) + BELL, 2**32 - 1, 4)
        before = time.monotonic()
        for rank in ranks:
            rank.close()
        assert time.monotonic() - before < 2.0


@examples(60)
@given(
    writes=st.lists(
        st.tuples(
            st.integers(0, (RINGS + SIZE * SIZE * RING) // 8 - 1) | st.integers(SLOTS // 8, RINGS // 8 - 1),
            st.integers(0, 2**64 - 1) | st.integers(0, 2 * RING),
        ),
        min_size=1,
        max_size=20,
    )
)
def test_anything_written_anywhere_ends_or_can_be_closed(writes: list[tuple[int, int]]) -> None:
    with native_ranks(SIZE, RING) as ranks:
        memory = Memory()
        arrays = [np.zeros(3000, np.float32) for _ in ranks]
        for word, value in writes[::2]:
            memory.write(8 * word, value)
        operations = [rank.allreduce(array) for rank, array in zip(ranks, arrays, strict=True)]
        for word, value in writes[1::2]:
            memory.write(8 * word, value)
        deadline = time.monotonic() + 0.05  # bytes that were overlooked may be waited for
        while time.monotonic() < deadline and PENDING in [operation.state() for operation in operations]:
            time.sleep(1e-3)
        for rank in ranks:
            rank.abandon()
        for operation in operations:
            assert end_of(operation) in (DONE, FAILED)


# ------------------------------------------------------------------------------------------ arguments


def test_arguments_are_checked_before_memory_is_touched(pair) -> None:
    first, _, _ = pair
    five = np.zeros(5, np.uint8)
    for send_counts, recv_counts in [([6, 0], [0, 0]), ([-1, 0], [0, 0]), ([0, 0], [5, 1]), ([0], [0, 0]),
                                     ([1, 0], [2, 0]), ([2**62, 2**62], [0, 0])]:  # fmt: skip
        with pytest.raises(ValueError, match=r"counts|counted|differ"):
            first.alltoallv(five, send_counts, five, recv_counts)
    for counts in ([5, 1], [0, 0, 0], [-5, 5]):
        with pytest.raises(ValueError, match="count"):
            first.allgatherv(five, counts)
    for to in ([0], [2], [-1]):
        with pytest.raises(ValueError, match="no other rank"):
            first.exchange(to, [five], [], [])
        with pytest.raises(ValueError, match="no other rank"):
            first.exchange([], [], to, [five])
    with pytest.raises(ValueError, match="twice"):
        first.exchange([1, 1], [five, five], [], [])
    with pytest.raises(ValueError, match="one array"):
        first.exchange([1], [], [], [])


def test_arrays_that_do_not_fit_are_refused(pair) -> None:
    first, _, _ = pair
    for array in (np.zeros(3, np.int32), np.zeros(3, np.float16)):
        with pytest.raises(ValueError, match="float32"):
            first.allreduce(array)
    with pytest.raises(ValueError, match="aligned"):
        first.allreduce(np.zeros(9, np.uint8)[1:].view(np.float32))
    with pytest.raises(TypeError):
        first.allreduce(np.zeros((2, 2), np.float32))
    with pytest.raises(TypeError):
        first.allreduce(np.zeros(6, np.float32)[::2])
    fixed = np.zeros(4, np.uint8)
    fixed.flags.writeable = False
    with pytest.raises(TypeError):
        first.allgatherv(fixed, [2, 2])
    assert end_of(first.exchange([1], [fixed], [], [])) == DONE


def test_ranks_are_started_once_and_used_when_started() -> None:
    rank = _native.ShmRank.create(2, 4096)
    with pytest.raises(RuntimeError, match="not been started"):
        rank.allreduce(np.zeros(1, np.float32))
    with pytest.raises(ValueError, match="process for each rank"):
        rank.start([_native.shm_process()])
    rank.start([_native.shm_process()] * 2)
    with pytest.raises(RuntimeError, match="started or closed"):
        rank.start([_native.shm_process()] * 2)
    with pytest.raises(RuntimeError, match="started or closed"):
        rank.location()
    rank.close()
    rank.close()
    assert rank.allreduce(np.zeros(1, np.float32)).state() == FAILED


def test_a_process_that_has_ended_or_began_at_another_time_is_no_rank() -> None:
    number, start = _native.shm_process()
    for other in ((number, start + 1), (2**31 - 1, start), (-5, 0)):
        rank = _native.ShmRank.create(2, 4096)
        with pytest.raises(RuntimeError, match="rank 1 has ended, or rank 0 cannot see its process"):
            rank.start([(number, start), other])


@pytest.mark.parametrize(
    ("size", "ring_bytes"), [(1, 4096), (0, 4096), (-1, 4096), (2000, 4096), (2, 4095), (2, 0)]
)
def test_geometry_is_checked(size: int, ring_bytes: int) -> None:
    with pytest.raises(ValueError, match=r"ranks|ring"):
        _native.ShmRank.create(size, ring_bytes)


def test_only_the_right_segment_is_attached() -> None:
    rank = _native.ShmRank.create(2, 4096)
    process, start, descriptor, nonce = rank.location()
    for location, size, ring_bytes, error in [
        ((process, start, descriptor, nonce + 1), 2, 4096, "another header"),
        ((process, start, descriptor, nonce), 2, 8192, "another file"),
        ((process, start, 10_000, nonce), 2, 4096, "cannot open"),
        ((2**31 - 1, start, descriptor, nonce), 2, 4096, "cannot open"),
    ]:
        with pytest.raises(RuntimeError, match=error):
            _native.ShmRank.attach(location, 1, size, ring_bytes)
    for other in (0, 2, -1):
        with pytest.raises(ValueError, match="rank is not in"):
            _native.ShmRank.attach((process, start, descriptor, nonce), other, 2, 4096)
