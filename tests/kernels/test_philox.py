"""The random numbers: Random123's published vectors, and independence of layout."""

from __future__ import annotations

import numpy as np
import pytest

from gradcomp.kernels import philox

KNOWN_ANSWERS = [
    # counter, key, words
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def _words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
def test_known_answers(counter: str, key: str, words: str) -> None:
    key0, key1 = _words(key)
    drawn = philox.philox4x32(np.array(_words(counter), np.uint32), (key0, key1))
    assert drawn.tolist() == _words(words)


def test_lanes_of_a_counter() -> None:
    # Known answer 3, as the draws of the eight elements that share its counter.
    draws = philox.uniform(
        0x243F6A88 * 8, 8, seed=0x299F31D0A4093822, layer=0x85A308D3, step=0x13198A2E, rank=0x03707344
    )
    halves = [0xFE09, 0xD16C, 0xCCEB, 0x94FD, 0xE420, 0x5001, 0x6EA1, 0x2412]
    assert (draws * 65536 - philox.offset(0x13198A2E)).tolist() == halves


def test_offsets_are_spread_evenly_over_the_steps() -> None:
    for stride in (1, 2, 3):
        for first in (0, 1000):
            offsets = [philox.offset(first + stride * i) for i in range(256)]
            assert abs(np.mean(offsets) - 0.5) < 0.01
            assert max(np.diff(np.sort(offsets))) < 0.02
    assert 0 < min(offsets) < max(offsets) < 1


def test_draws_lie_inside_the_unit_interval() -> None:
    # The outermost lanes at the outermost offsets, in float32 as it is.
    offsets = [philox.offset(step) for step in range(1024)]
    for lane, extreme in ((0, min(offsets)), (65535, max(offsets))):
        u = (np.float32(lane) + np.float32(extreme)) * np.float32(2.0**-16)
        assert np.float64(u) == (lane + extreme) / 65536
        assert 0 < u < 1


def test_draws_depend_on_the_element_not_on_the_segment() -> None:
    coordinates = {"seed": 1, "layer": 2, "step": 3, "rank": 4}
    whole = philox.uniform(0, 100, **coordinates)
    for start, length in [(0, 1), (5, 20), (8, 8), (99, 1), (7, 0)]:
        np.testing.assert_array_equal(
            philox.uniform(start, length, **coordinates), whole[start : start + length]
        )


@pytest.mark.parametrize("coordinate", ["seed", "layer", "step", "rank"])
def test_streams_differ(coordinate: str) -> None:
    coordinates = {"seed": 1, "layer": 2, "step": 3, "rank": 4}
    draws = philox.uniform(0, 64, **coordinates)
    others = philox.uniform(0, 64, **(coordinates | {coordinate: 9}))
    assert (draws != others).mean() > 0.9
