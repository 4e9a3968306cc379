"""Headers by the compiled module have the bytes of their definition, and both refuse the same arguments."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernels.backends import HOST, REFERENCE, each_of
from kernels.isas import NATIVE

from gradcomp.kernels.reference_headers import FIXED

BACKENDS = [REFERENCE, NATIVE]
PLACE = {"check": 0xDEADBEEF, "step": 7, "bucket": 300, "round_number": 5}


class Messages:
    """Random messages, each of which has a header about ``layers`` layers, with the arrays that kernels take."""

    def __init__(self, layers: int, sizes: list[int], seed: int = 0) -> None:
        draw = np.random.default_rng(seed)
        begin = -(-(33 + layers) // 16) * 16
        self.buffers = [draw.integers(0, 256, begin + size, dtype=np.uint8) for size in sizes]
        self.fields = draw.integers(0, 256, 32 * len(sizes), dtype=np.uint8)
        self.states = draw.integers(0, 8, layers + 1, dtype=np.uint8)
        self.lengths = np.array([len(each) for each in self.buffers], dtype=np.int64)
        self.payloads, self.fingerprints = np.full((2, len(sizes)), 9, dtype=np.uint32)
        self.ranks = np.zeros(len(sizes), dtype=np.uint8)
        self.known = np.full(layers + 1, 7, dtype=np.uint8)
        self.sent = np.zeros(0, dtype=np.uint8)

    @property
    def addresses(self) -> np.ndarray:
        return np.array([each.ctypes.data for each in self.buffers], dtype=np.int64)

    def write(self, backend: Any, checksums: bool = True, **changes: Any) -> None:
        given = [self.fields, self.addresses, self.lengths, self.states, self.payloads]
        sender = {"sender": 65535, "fingerprint": 0x01234567, "checksums": checksums}
        backend.write_headers(*changes.pop("given", given), **PLACE, **(sender | changes))

    def read(
        self, backend: Any, states: np.ndarray | None = None, checksums: bool = True, **place: int
    ) -> int:
        self.fields.view(FIXED)["sender"] = 65535
        states = np.zeros(len(self.states), np.uint8) if states is None else states
        given = [self.fields, self.addresses, self.lengths, self.known, self.sent, states]
        outputs = [self.fingerprints, self.payloads, self.ranks]
        return backend.read_headers(*given, *outputs, **(PLACE | place), checksums=checksums)


@pytest.mark.parametrize("checksums", [False, True])
@pytest.mark.parametrize("layers", [0, 1, 15, 16, 200])
def test_both_write_the_same_bytes_and_read_what_was_written(layers: int, checksums: bool) -> None:
    written = []
    for backend in BACKENDS:
        messages = Messages(layers, [0, 16, 4096, 48])
        messages.write(backend, checksums)
        written.append([each.tobytes() for each in messages.buffers] + [messages.payloads.tolist()])
        sent = messages.payloads.copy()
        for reader in BACKENDS:
            states = np.zeros(layers + 1, np.uint8)
            assert messages.read(reader, states, checksums) == -1
            assert states.tolist() == messages.states.tolist()
            assert messages.payloads.tolist() == sent.tolist()
            assert messages.fingerprints.tolist() == [0x01234567] * 4
            assert messages.ranks.tolist() == [messages.states[-1]] * 4
    assert written[0] == written[1]
    assert any(written[0][-1]) is checksums


@each_of(HOST)
def test_the_first_message_that_differs_is_named(backend: Any) -> None:
    messages = Messages(3, [32, 32, 32])
    messages.write(backend)
    assert messages.read(backend) == -1
    for name, value in PLACE.items():
        assert messages.read(backend, **{name: value - 1}) == 0
    # Fields, fingerprint, checksum, states, padding and payload.
    for at in (0, 3, 23, 24, 28, 32, 35, 40, 48, 79):
        messages.buffers[1][at] ^= 2
        assert messages.read(backend) == 1, at
        messages.buffers[1][at] ^= 2
    assert messages.read(backend) == -1


@each_of(HOST)
def test_states_have_no_unknown_bit_and_all_that_were_sent(backend: Any) -> None:
    messages = Messages(3, [32, 32])
    messages.states[:] = [1, 3, 0, 7]
    messages.write(backend, checksums=False)
    messages.known[1] = 1
    assert messages.read(backend, checksums=False) == 0
    messages.known[1] = 7
    messages.sent = np.array([1, 1, 0, 4], np.uint8)
    assert messages.read(backend, checksums=False) == -1
    messages.sent[2] = 1
    assert messages.read(backend, checksums=False) == 0


@each_of(HOST)
def test_wrong_arguments_are_refused_before_memory_is_touched(backend: Any) -> None:
    messages = Messages(3, [32, 32])
    before = [each.tobytes() for each in messages.buffers]
    right = [messages.fields, messages.addresses, messages.lengths, messages.states, messages.payloads]
    short = messages.lengths.copy()
    short[1] = 47
    none = np.zeros(0, np.uint8)
    for at, wrong, error in (
        (0, messages.fields[:-1], ValueError),
        (0, messages.fields.view(np.int8), TypeError),
        (1, messages.addresses[:1], ValueError),
        (1, messages.addresses.astype(np.int32), TypeError),
        (2, short, ValueError),
        (2, messages.lengths[:1], ValueError),
        (3, none, ValueError),
        (3, np.zeros(100, np.uint8), ValueError),
        (4, messages.payloads[:1], ValueError),
    ):
        given = [wrong if i == at else each for i, each in enumerate(right)]
        with pytest.raises(error):
            messages.write(backend, given=given)
    for name, size in (("known", 3), ("sent", 3), ("ranks", 1), ("fingerprints", 1), ("payloads", 1)):
        broken = Messages(3, [32, 32])
        setattr(broken, name, getattr(broken, name)[:size] if name != "sent" else np.zeros(size, np.uint8))
        with pytest.raises(ValueError, match=name):
            broken.read(backend)
    assert [each.tobytes() for each in messages.buffers] == before
