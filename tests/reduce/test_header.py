"""Tests both forms of headers: the flags that they carry, and headers that are wrong."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

from gradcomp import PlanMismatchError, WireFormatError
from gradcomp.kernels import dispatch, reference_checksum
from gradcomp.kernels.reference_headers import FIXED
from gradcomp.reduce.header import (
    APPLIED,
    DIFFERENT,
    DISCARDED,
    NONFINITE,
    PREEMPTED,
    PRESENT,
    SPARSE,
    WAITING,
    BucketFlags,
    ByteHeader,
    CountHeader,
    HeaderId,
    Headers,
    check_covers,
)

HEADER_ID = HeaderId(check=0xDEADBEEF, step=41, bucket=3)
CHECKED = HEADER_ID._replace(checksums=True)
LAYERS = 5
STATES = np.array(
    [0, PRESENT, PRESENT | NONFINITE, SPARSE, PRESENT | NONFINITE | SPARSE, APPLIED | PREEMPTED],
    dtype=np.uint8,
)
CHUNK, SENDER, FINGERPRINT = 1, 2, 0x89ABCDEF


def header(layers: int = LAYERS) -> ByteHeader:
    return ByteHeader(layers, np.array([10, 20, 30], dtype=np.int64))


def message(states: np.ndarray = STATES, header_id: HeaderId = HEADER_ID, layers: int = LAYERS) -> np.ndarray:
    made = header(layers)
    buffer = np.full(made.message_bytes[CHUNK], 0xAA, dtype=np.uint8)
    headers = Headers(made, [(buffer, CHUNK, SENDER)])
    headers.write(header_id, 0, BucketFlags(states, SENDER, FINGERPRINT))
    return buffer


def read(
    buffer: np.ndarray,
    chunk: int = CHUNK,
    sender: int = SENDER,
    header_id: HeaderId = HEADER_ID,
    made: ByteHeader | None = None,
) -> tuple[BucketFlags, list[int], list[int]]:
    """Returns the flags that a message has, its checksum and its last state byte."""
    made = made or header()
    headers = Headers(made, [(buffer, chunk, sender)])
    flags = BucketFlags(np.zeros(made.layers + 1, np.uint8))
    ranks = headers.read(header_id, 0, flags)
    return flags, headers.payloads, ranks


@pytest.fixture(params=["reference", "native"], autouse=True)
def kernels(request):
    with dispatch.use(request.param):
        yield


class TestByteHeader:
    def test_states_arrive(self):
        flags, payloads, ranks = read(message())
        assert (flags.states.tolist(), flags.fingerprint) == (STATES.tolist(), FINGERPRINT)
        assert (payloads, ranks) == ([0], [STATES[-1]])

    def test_the_bytes_are_those_of_the_page(self):
        fixed = "4763 06 00 efbeadde 29000000 0300 0100 14000000 0500 0200 efcdab89 00000000"
        states = "00 01 03 04 07 11" + "00" * 10
        assert message()[:48].tobytes() == bytes.fromhex(fixed + states)
        checked = message(header_id=CHECKED)
        assert np.flatnonzero(checked != message()).tolist() == [28, 29, 30, 31]
        crc32c = reference_checksum.crc32c
        whole = crc32c(checked[32:48], crc32c(checked[:28], crc32c(checked[48:])))
        assert int.from_bytes(checked[28:32].tobytes(), "little") == whole
        assert read(checked, header_id=CHECKED)[1] == [crc32c(checked[48:])]

    def test_messages_of_several_ranks_are_checked_together(self):
        made, world = header(), 4
        buffers = [np.zeros(made.message_bytes[CHUNK], np.uint8) for _ in range(world)]
        for rank, buffer in enumerate(buffers):
            own = BucketFlags(np.full(LAYERS + 1, 1 << rank % 3, np.uint8), rank, FINGERPRINT + (rank == 3))
            Headers(made, [(buffer, CHUNK, rank)]).write(CHECKED, 0, own)
        together = Headers(made, [(buffer, CHUNK, rank) for rank, buffer in enumerate(buffers)])
        flags = BucketFlags(np.zeros(LAYERS + 1, np.uint8))
        assert together.read(CHECKED, 0, flags) == [1, 2, 4, 1]
        assert flags.states.tolist() == [7] * LAYERS + [7 | DIFFERENT]
        assert len(together.payloads) == world
        buffers[2][40] ^= 1
        with pytest.raises(WireFormatError, match="from rank 2 does not match its checksum"):
            together.read(CHECKED, 0, flags)

    def test_a_result_must_have_what_this_rank_sent(self):
        headers = Headers(header(), [(message(), CHUNK, SENDER)])
        flags = BucketFlags(np.zeros(LAYERS + 1, np.uint8))
        headers.read(HEADER_ID, 0, flags, STATES)
        more = STATES.copy()
        more[0] = PRESENT
        with pytest.raises(WireFormatError, match=r"rank 2 lacks states .* entries \[0\]"):
            headers.read(HEADER_ID, 0, flags, more)

    @pytest.mark.parametrize(("layers", "size"), [(0, 48), (5, 48), (15, 48), (16, 64)])
    def test_it_is_32_bytes_and_one_per_layer_and_one_and_padded(self, layers: int, size: int):
        made = header(layers)
        assert made.nbytes == ByteHeader.size(layers) == size
        assert made.message_bytes == [size + 16, size + 32, size + 32]
        assert (message(np.zeros(layers + 1, np.uint8), layers=layers)[made.nbytes :] == 0xAA).all()

    @pytest.mark.parametrize("kept", [0, 1, 23, 32, 48, 79])
    def test_a_truncated_one_is_refused(self, kept: int):
        with pytest.raises(WireFormatError, match=f"rank 2 sent {kept} bytes"):
            read(message()[:kept])

    WRONG = {
        "magic": (0x1234, WireFormatError),
        "protocol": (1, PlanMismatchError),
        "round": (1, WireFormatError),
        "check": (0, PlanMismatchError),
        "step": (40, WireFormatError),
        "bucket": (2, WireFormatError),
        "chunk": (0, WireFormatError),
        "payload_bytes": (21, WireFormatError),
        "layers": (4, WireFormatError),
        "sender": (1, WireFormatError),
    }

    @pytest.mark.parametrize("name", WRONG)
    def test_every_field_is_checked_and_named(self, name: str):
        value, error = self.WRONG[name]
        buffer = message()
        buffer[: FIXED.itemsize].view(FIXED)[name] = value
        with pytest.raises(error, match="rank 2 sent") as caught:
            read(buffer)
        assert f"{name} {value} instead of" in str(caught.value)

    @pytest.mark.parametrize(("at", "state"), [(2, 8), (LAYERS - 1, 128)])
    def test_an_unknown_state_is_refused(self, at: int, state: int):
        buffer = message()
        buffer[FIXED.itemsize + at] = state
        with pytest.raises(WireFormatError, match=f"unknown state {state}"):
            read(buffer)

    def test_steps_are_compared_modulo_two_to_the_32(self):
        late = HeaderId(1, 2**32 + 5, 0)
        assert read(message(header_id=late), header_id=late)[2] == [STATES[-1]]

    def test_chunks_and_senders_of_large_worlds_are_told_apart(self):
        made = ByteHeader(1, np.zeros(1024, np.int64))
        buffer = np.zeros(made.message_bytes[1023], np.uint8)
        Headers(made, [(buffer, 1023, 1022)]).write(HEADER_ID, 0, BucketFlags(STATES[-2:], 1022))
        read(buffer, 1023, 1022, made=made)
        for chunk, sender in ((1023 - 256, 1022), (1023, 1022 - 256)):
            with pytest.raises(WireFormatError, match="instead of"):
                read(buffer, chunk, sender, made=made)

    @given(st.binary(max_size=40))
    def test_random_bytes_are_a_typed_error(self, data: bytes):
        with pytest.raises((WireFormatError, PlanMismatchError)):
            read(np.frombuffer(data, np.uint8))

    @given(st.integers(0, 79), st.integers(1, 255), st.integers(0, 9))
    def test_a_checksum_finds_a_changed_byte(self, at: int, change: int, extra: int):
        # What is behind does not count.
        buffer = np.append(message(header_id=CHECKED), np.zeros(extra, np.uint8))
        read(buffer, header_id=CHECKED)
        buffer[at] ^= change
        with pytest.raises((WireFormatError, PlanMismatchError)):
            read(buffer, header_id=CHECKED)

    @given(st.integers(0, 32 + LAYERS), st.integers(0, 255))
    def test_a_changed_byte_is_an_error_or_a_state(self, at: int, value: int):
        buffer = message()
        buffer[at] = value
        try:
            states = read(buffer)[0].states
        except (WireFormatError, PlanMismatchError):
            return
        assert (states[:-1] < 8).all()


def summed(header_ids: list[HeaderId], states: list[np.ndarray], fingerprints=()) -> np.ndarray:
    """Returns the sum that an allreduce makes of the ranks' counts."""
    counts = CountHeader(len(states[0]) - 1)
    total = np.zeros(counts.length, np.float32)
    fingerprints = fingerprints or [FINGERPRINT] * len(states)
    for header_id, mine, fingerprint in zip(header_ids, states, fingerprints, strict=True):
        one = np.full(counts.length, np.nan, np.float32)
        counts.write(one, header_id, BucketFlags(mine, 0, fingerprint))
        total += one
    return total


ranks_states = st.lists(
    st.tuples(st.integers(0, 127), st.lists(st.integers(0, 7), min_size=LAYERS, max_size=LAYERS)),
    min_size=1,
    max_size=7,
)


class TestCountHeader:
    @given(ranks_states, st.integers(0, 2**32 - 1), st.integers(0, 2**40), st.integers(0, 2**16 - 1))
    def test_states_add_up(self, ranks, check: int, step: int, bucket: int):
        header_id = HeaderId(check, step, bucket)
        states = [np.array([*layers, own], np.uint8) for own, layers in ranks]
        total = summed([header_id] * len(ranks), states)
        found = CountHeader(LAYERS).read(total, header_id, len(ranks))
        assert found.tolist() == np.bitwise_or.reduce(states).tolist()

    @given(st.lists(st.integers(0, 3).map(lambda n: n * 0x01010101), min_size=1, max_size=7))
    def test_a_fingerprint_that_differs_is_noticed_and_one_that_is_missing_is_not(self, fingerprints):
        total = summed([HEADER_ID] * len(fingerprints), [STATES] * len(fingerprints), fingerprints)
        found = CountHeader(LAYERS).read(total, HEADER_ID, len(fingerprints))
        differ = len({*fingerprints} - {0}) > 1
        assert found.tolist() == [*STATES[:-1], STATES[-1] | DIFFERENT * differ]

    @given(
        st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 2)), min_size=2, max_size=7)
    )
    def test_every_rank_notices_that_one_is_elsewhere(self, places):
        header_ids = [HeaderId(*place) for place in places]
        total = summed(header_ids, [STATES] * len(header_ids))
        for header_id in header_ids:
            if len(set(header_ids)) == 1:
                CountHeader(LAYERS).read(total, header_id, len(header_ids))
            else:
                with pytest.raises(
                    PlanMismatchError, match=f"step {header_id.step}, bucket {header_id.bucket}"
                ):
                    CountHeader(LAYERS).read(total, header_id, len(header_ids))

    @pytest.mark.parametrize("below", [1.0, 2.0])
    def test_differences_that_cancel_in_the_sum_are_noticed(self, below: float):
        total = summed([HEADER_ID] * 3, [STATES] * 3)
        # One rank's nibble is lower and another's higher by as much: the sum stays, the squares give it away.
        nibble = total[0] / 3
        total[8] += (nibble - below) ** 2 + (nibble + below) ** 2 - 2 * nibble**2
        with pytest.raises(PlanMismatchError):
            CountHeader(LAYERS).read(total, HEADER_ID, 3)

    def test_the_largest_world_is_counted_exactly(self):
        world = 65_536
        one = np.zeros(CountHeader(LAYERS).length, np.float32)
        CountHeader(LAYERS).write(one, HEADER_ID, BucketFlags(STATES, 0, 0xFFFFFFFF))
        found = CountHeader(LAYERS).read(one * np.float32(world), HEADER_ID, world)
        assert found.tolist() == STATES.tolist()

    @pytest.mark.parametrize("at", [16, 24, 32, 33, 36, 37, -1])
    @pytest.mark.parametrize("value", [-1.0, 676.0, 0.5, np.nan, np.inf])
    def test_an_impossible_count_is_refused(self, at: int, value: float):
        total = summed([HEADER_ID] * 3, [STATES] * 3)
        total[at] = value
        with pytest.raises(WireFormatError, match="counts"):
            CountHeader(LAYERS).read(total, HEADER_ID, 3)

    @examples(50)
    @given(st.binary(min_size=4 * 55, max_size=4 * 55))
    def test_random_bytes_are_a_typed_error(self, data: bytes):
        with pytest.raises((WireFormatError, PlanMismatchError)):
            CountHeader(LAYERS).read(np.frombuffer(data, np.float32), HEADER_ID, 3)


def test_flags_tell_what_all_ranks_said():
    flags = BucketFlags(STATES)
    assert flags.present.tolist() == [False, True, True, False, True]
    assert flags.nonfinite.tolist() == [False, False, True, False, True]
    assert flags.outcomes == APPLIED
    several = BucketFlags(np.array([0] * LAYERS + [APPLIED | DISCARDED | WAITING], np.uint8))
    assert several.outcomes == APPLIED | DISCARDED


@given(st.permutations([0, 0, 5, 5, 7]))
def test_a_chain_of_ranks_notices_a_difference_across_those_without_a_fingerprint(chain):
    """Each rank compares the received fingerprint with its own, and forwards it if it has none."""
    passed = BucketFlags(np.zeros(1, np.uint8), 0, chain[0])
    for own in chain[1:]:
        here = BucketFlags(passed.states.copy(), 0, own)
        here.compare(passed.fingerprint)
        passed = here
    assert passed.notices == DIFFERENT


@pytest.mark.parametrize(("of_ranks", "ready"), [(0, True), (WAITING, False), (WAITING | PREEMPTED, False)])
def test_all_are_ready_if_none_is_not(of_ranks: int, ready: bool):
    assert BucketFlags(np.array([PRESENT, APPLIED | of_ranks], np.uint8)).ready is ready


def test_a_result_without_what_this_rank_sent_is_refused():
    check_covers(STATES | PRESENT, STATES, "rank 1")
    with pytest.raises(WireFormatError, match=r"rank 1 lacks .* entries \[2\]"):
        check_covers(STATES & ~np.array([0, 0, PRESENT, 0, 0, 0], np.uint8), STATES, "rank 1")
