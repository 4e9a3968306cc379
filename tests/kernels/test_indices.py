"""Coded index lists: bytes as documented, the same from every backend, and nothing accepted that is not one."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernels.backends import ALL as ALL_BACKENDS
from kernels.backends import each_of
from kernels.isas import NATIVE
from kernels.standin import ORDERS, cuda_backend
from tiers import examples

from gradcomp.kernels import reference_indices
from gradcomp.kernels.reference_indices import ALL, BITMAP, PACKED, RAW, index_bytes, smallest_coding

BACKEND = each_of(ALL_BACKENDS)
OTHERS = {"native": NATIVE} | {name: cuda_backend(order) for name, order in ORDERS.items()}
BACKENDS = {"reference": reference_indices} | OTHERS
CODINGS = {"raw": RAW, "packed": PACKED, "bitmap": BITMAP, "all": ALL}
CODING = pytest.mark.parametrize("coding", CODINGS.values(), ids=CODINGS)


# --- an oracle: the format in Python's integers -------------------------------------------------------------


def stream(bits: Sequence[int], size: int) -> bytes:
    """`size` bits of which those are set."""
    return sum(1 << bit for bit in bits).to_bytes(-(-size // 8), "little")


def oracle(coding: int, length: int, listed: Sequence[int]) -> bytes:
    k = len(listed)
    if k == 0 or coding == ALL:
        return b""
    if coding == RAW:
        return b"".join(index.to_bytes(4, "little") for index in listed)
    if coding == BITMAP:
        return stream(listed, length)
    low_bits = max(0, (length // k).bit_length() - 1)
    lower = [low_bits * j + b for j, index in enumerate(listed) for b in range(low_bits) if index >> b & 1]
    upper = [(index >> low_bits) + j for j, index in enumerate(listed)]
    return stream(lower, k * low_bits) + stream(upper, k + (length - 1 >> low_bits) + 1)


# --- calls --------------------------------------------------------------------------------------------------


@dataclass
class Row:
    coding: int
    length: int
    indices: Any  # uint32


class Table:
    """Rows with gaps between their indices, and between their bytes, that nobody may touch."""

    GAP = 3

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows
        self.codings = np.array([row.coding for row in rows], np.int32)
        self.lengths = np.array([row.length for row in rows], np.int64)
        self.counts = np.array([len(row.indices) for row in rows], np.int64)
        self.sizes = index_bytes(self.codings, self.lengths, self.counts)
        self.offsets = self._places(self.counts)
        self.places = self._places(self.sizes)

    def _places(self, sizes: Any) -> Any:
        return np.cumsum(sizes + self.GAP) - sizes

    def encode(self, backend: Any) -> bytes:
        listed = np.zeros(int((self.counts + self.GAP).sum()) + self.GAP, np.uint32)
        for row, offset in zip(self.rows, self.offsets, strict=True):
            listed[offset : offset + len(row.indices)] = row.indices
        payload = np.full(int((self.sizes + self.GAP).sum()) + self.GAP, 0xA5, np.uint8)
        backend.encode_indices(
            self.codings, self.lengths, self.counts, self.offsets, listed, self.places, payload
        )
        return payload.tobytes()

    def payload(self, encoded: Sequence[bytes]) -> bytes:
        """What `encode` leaves behind if the rows are encoded like that."""
        gap = b"\xa5" * self.GAP
        return b"".join(gap + row for row in encoded) + gap

    def decode(self, backend: Any, payload: bytes) -> list[list[int]] | None:
        """The indices of each row; None where they are refused."""
        guard = 0xDEADBEEF
        listed = np.full(int((self.counts + self.GAP).sum()) + self.GAP, guard, np.uint32)
        source = np.frombuffer(payload, np.uint8)
        refused = False
        try:
            backend.decode_indices(
                self.codings, self.lengths, self.counts, self.offsets, listed, self.places, source
            )
        except ValueError as error:
            assert "row " in str(error)  # noqa: PT017
            refused = True
        untouched = np.ones(len(listed), bool)
        decoded = []
        for offset, count in zip(self.offsets, self.counts, strict=True):
            untouched[offset : offset + count] = False
            decoded.append(listed[offset : offset + count].tolist())
        assert (listed[untouched] == guard).all(), "written beyond the indices of a row"
        return None if refused else decoded


def choose(length: int, count: int) -> Any:
    """A list of that many indices, the same each time; the last element is in it if there is room for two."""
    rng = np.random.default_rng((length, count))
    if count == length:
        return np.arange(count, dtype=np.uint32)
    chosen = np.unique(rng.integers(0, length, 2 * count)) if length > 2**21 else rng.permutation(length)
    chosen = rng.permutation(chosen)[:count]
    if count > 1 and length - 1 not in chosen:
        chosen[0] = length - 1
    return np.sort(chosen).astype(np.uint32)


LENGTHS = (0, 1, 2, 3, 5, 7, 8, 9, 16, 31, 63, 64, 65, 100, 127, 128, 129, 513, 1000, 1024, 4095, 4096, 4097)


@functools.cache
def sweep(coding: int) -> Table:
    rows = []
    for length in LENGTHS:
        some = {0, 1, 2, 3, length // 100, length // 5, length // 3, length // 2, length - 1, length}
        counts = {0, length} if coding == ALL else {k for k in some if 0 <= k <= length}
        rows += [Row(coding, length, choose(length, count)) for count in sorted(counts)]
    return Table(rows)


# --- bytes --------------------------------------------------------------------------------------------------


@BACKEND
@CODING
def test_encoding_is_the_documented_one_and_decoding_its_inverse(backend: Any, coding: int) -> None:
    table = sweep(coding)
    expected = [oracle(coding, row.length, row.indices.tolist()) for row in table.rows]
    assert [len(row) for row in expected] == table.sizes.tolist()
    assert table.encode(backend) == table.payload(expected)
    assert table.decode(backend, table.payload(expected)) == [row.indices.tolist() for row in table.rows]


LONG = [
    (name, length, share)
    for name in BACKENDS
    for length in (2**20 - 1, 2**20, 2**20 + 1)
    for share in (1e-6, 1e-4, 0.01, 0.1, 0.5, 0.9, 1.0)
    # A GPU's stand-in is slow.
    if name != "cuda" or (length < 2**20 and share < 0.5)
]


@pytest.mark.factors("length", "share")
@pytest.mark.parametrize(("name", "length", "share"), LONG)
def test_long_rows(name: str, length: int, share: float) -> None:
    chosen = choose(length, max(1, int(length * share)))
    table = Table([Row(coding, length, chosen) for coding in CODINGS.values() if coding != ALL])
    encoded = table.encode(BACKENDS[name])
    assert encoded == table.encode(reference_indices)
    assert table.decode(BACKENDS[name], encoded) == [chosen.tolist()] * 3


def test_dense_rows_of_many_tiles() -> None:
    chosen = choose(20_001, 18_000)
    table = Table([Row(coding, 20_001, chosen) for coding in (RAW, PACKED, BITMAP)])
    encoded = table.encode(reference_indices)
    for order in range(3):
        assert table.encode(cuda_backend(order)) == encoded
        assert table.decode(cuda_backend(order), encoded) == [chosen.tolist()] * 3


@BACKEND
@pytest.mark.parametrize("length", [2**32, 2**32 - 1, 2**31 + 1, 2**31])
@pytest.mark.parametrize("coding", [RAW, PACKED], ids=["raw", "packed"])
def test_lengths_up_to_the_limit(backend: Any, coding: int, length: int) -> None:
    lists = [[0], [length - 1], [0, length - 1], [2**31 - 1], choose(length, 700).tolist()]
    table = Table([Row(coding, length, np.array(listed, np.uint32)) for listed in lists])
    encoded = table.encode(backend)
    assert encoded == table.payload([oracle(coding, length, listed) for listed in lists])
    assert table.decode(backend, encoded) == lists


@examples(150)
@given(data=st.data())
def test_any_rows(data: Any) -> None:
    rows = []
    for _ in range(data.draw(st.integers(0, 4))):
        length = data.draw(st.integers(1, 300))
        listed = sorted(data.draw(st.sets(st.integers(0, length - 1))))
        coding = data.draw(st.sampled_from([RAW, PACKED, BITMAP]))
        rows.append(Row(coding, length, np.array(listed, np.uint32)))
    table = Table(rows)
    expected = table.payload([oracle(row.coding, row.length, row.indices.tolist()) for row in rows])
    for backend in BACKENDS.values():
        assert table.encode(backend) == expected
        assert table.decode(backend, expected) == [row.indices.tolist() for row in rows]


# --- sizes --------------------------------------------------------------------------------------------------


def every_size(lengths: Any, counts: Any) -> Any:
    """Bytes in each coding, ALL first; a row that ALL cannot code counts as endless."""
    possible = (counts == lengths) | (counts == 0)
    everything = np.where(possible, 0, np.iinfo(np.int64).max)
    others = (RAW, BITMAP, PACKED)
    return np.stack([everything, *(index_bytes(coding, lengths, counts) for coding in others)])


def test_smallest_coding() -> None:
    pairs = [(n, k) for n in (*range(130), 1000, 2**20, 2**32) for k in {*range(min(n, 130) + 1), n // 2, n}]
    lengths, counts = np.array(pairs, np.int64).T
    chosen = smallest_coding(lengths, counts)
    sizes = every_size(lengths, counts)
    assert chosen.dtype == np.int32
    assert (index_bytes(chosen, lengths, counts) == sizes.min(axis=0)).all()
    preference = np.array([ALL, RAW, BITMAP, PACKED])
    assert (chosen == preference[sizes.argmin(axis=0)]).all()
    assert set(chosen.tolist()) == set(preference.tolist())


@pytest.mark.parametrize(("length", "count"), [(100_000, 1000), (2**20, 10486), (25_000_000, 250_000)])
def test_one_percent_costs_less_than_nine_bits(length: int, count: int) -> None:
    (size,) = index_bytes(PACKED, np.array([length]), np.array([count]))
    assert 8.0 < 8 * size / count < 8.7


def test_packed_costs_at_most_two_bits_more_than_the_logarithm() -> None:
    lengths = np.repeat(np.int64(2) ** np.arange(7, 33), 60)
    counts = np.maximum(1, (lengths * np.tile(np.geomspace(1e-6, 1, 60), 26)).astype(np.int64))
    bits = 8 * index_bytes(PACKED, lengths, counts)
    # Two streams, each padded to whole bytes, and the zero that ends the unary part.
    assert (bits <= counts * (2 + np.log2(lengths / counts)) + 2 * 7 + 1).all()


@pytest.mark.parametrize(
    ("coding", "length", "count", "complaint"),
    [
        (4, 8, 1, "coding"),
        (-1, 8, 1, "coding"),
        (RAW, -1, 0, "length"),
        (RAW, 2**32 + 1, 0, "length"),
        (RAW, 8, 9, "count"),
        (PACKED, 8, -1, "count"),
        (ALL, 8, 7, "ALL"),
    ],
)
def test_sizes_of_nonsense(coding: int, length: int, count: int, complaint: str) -> None:
    lengths, counts = np.array([8, length]), np.array([8, count])
    with pytest.raises(ValueError, match=f"row [01]: .*{complaint}"):
        index_bytes(np.array([RAW, coding]), lengths, counts)
    if complaint in ("length", "count"):
        with pytest.raises(ValueError, match=f"row 1: {complaint}"):
            smallest_coding(lengths, counts)


# --- bytes from the network ---------------------------------------------------------------------------------


def decode_with_every_backend(table: Table, payload: bytes, *, cuda: bool = True) -> list[list[int]] | None:
    """What the backends agree on; a list that is accepted is one that encodes to just these bytes."""
    decoded = table.decode(NATIVE, payload)
    assert table.decode(reference_indices, payload) == decoded
    if cuda:
        assert table.decode(BACKENDS["cuda"], payload) == decoded
    if decoded is not None:
        for row, listed in zip(table.rows, decoded, strict=True):
            assert all(a < b for a, b in zip(listed, [*listed[1:], row.length], strict=True))
        rows = [
            Row(row.coding, row.length, np.array(listed, np.uint32))
            for row, listed in zip(table.rows, decoded, strict=True)
        ]
        assert Table(rows).encode(NATIVE) == payload
    return decoded


SHAPES = [(1, 1), (5, 2), (8, 8), (16, 3), (100, 7), (130, 64), (130, 129), (1000, 20)]


@pytest.mark.parametrize(
    ("coding", "length", "count"),
    [
        *((coding, *shape) for coding in (RAW, PACKED, BITMAP) for shape in SHAPES),
        (RAW, 2**32, 3),
        (PACKED, 2**32, 3),
    ],
)
def test_every_flipped_bit_is_seen_or_gives_another_list(coding: int, length: int, count: int) -> None:
    table = Table([Row(coding, length, choose(length, count))])
    encoded = table.encode(NATIVE)
    outcomes = []
    for bit in range(8 * int(table.sizes[0])):
        flipped = bytearray(encoded)
        flipped[table.GAP + bit // 8] ^= 1 << bit % 8
        outcomes.append(decode_with_every_backend(table, bytes(flipped), cuda=bit % 13 == 0))
    if coding == BITMAP:
        assert set(map(str, outcomes)) == {"None"}  # another number of bits
    assert [table.rows[0].indices.tolist()] not in outcomes


@examples(400)
@given(data=st.data())
def test_any_bytes(data: Any) -> None:
    length = data.draw(st.integers(1, 200))
    count = data.draw(st.integers(1, length))
    coding = data.draw(st.sampled_from([RAW, PACKED, BITMAP]))
    table = Table([Row(coding, length, np.zeros(count))])
    size = int(table.sizes[0])
    decode_with_every_backend(table, table.payload([data.draw(st.binary(min_size=size, max_size=size))]))


@pytest.mark.parametrize("byte", [0x00, 0xFF, 0x55])
def test_monotonous_bytes(byte: int) -> None:
    for length, count in [(1, 1), (64, 32), (64, 33), (65, 1), (1000, 999), (100_000, 1000), (2**20, 2**19)]:
        for coding in (RAW, PACKED, BITMAP):
            table = Table([Row(coding, length, np.zeros(count))])
            payload = table.payload([bytes([byte]) * int(table.sizes[0])])
            decode_with_every_backend(table, payload, cuda=count < 2**19)


MALFORMED = {
    "raw, repeated": (RAW, 10, [3, 3]),
    "raw, descending": (RAW, 10, [4, 3]),
    "raw, out of range": (RAW, 10, [3, 10]),
    "raw, all ones": (RAW, 10, [3, 2**32 - 1]),
    "packed, repeated": (PACKED, 10, [3, 3]),
    "packed, descending low bits": (PACKED, 1000, [5, 4]),
    "packed, out of range": (PACKED, 10, [3, 10]),
}


@BACKEND
@pytest.mark.parametrize(("coding", "length", "listed"), MALFORMED.values(), ids=MALFORMED)
def test_malformed_lists(backend: Any, coding: int, length: int, listed: list[int]) -> None:
    first = Row(BITMAP, 20, choose(20, 4))
    table = Table([first, Row(coding, length, np.array(listed, np.uint32))])
    payload = table.payload([oracle(BITMAP, 20, first.indices.tolist()), oracle(coding, length, listed)])
    with pytest.raises(ValueError, match=r"row 1: "):
        decode(backend, table, payload)
    with pytest.raises(ValueError, match=r"row 1: (indices are not ascending|an index is not below)"):
        table.encode(backend)


def decode(backend: Any, table: Table, payload: bytes) -> None:
    listed = np.zeros(int((table.counts + table.GAP).sum()), np.uint32)
    source = np.frombuffer(payload, np.uint8)
    backend.decode_indices(
        table.codings, table.lengths, table.counts, table.offsets, listed, table.places, source
    )
