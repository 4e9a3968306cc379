"""Arrays whose bytes are a device's, but for some."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from cuda_on_cpu.driver import CpuDriver
from kernels.standin import FOLDER

from gradcomp.kernels.cuda.mirrors import DeviceMirror, fill, is_mirror, mirror


def on_device(array: DeviceMirror) -> bytes:
    return ctypes.string_at(array.address, array.nbytes)


def spans(array: DeviceMirror) -> list[tuple[int, int]]:
    """Where the parts begin and end that the host holds, as both sides have it."""
    here = [(part.ctypes.data - array.ctypes.data, len(part)) for part, _ in array.host_parts()]
    there = [(address - array.address, len(part)) for part, address in array.host_parts()]
    assert here == there
    return [(begin, begin + size) for begin, size in here]


@pytest.fixture
def made() -> DeviceMirror:
    return mirror(CpuDriver(FOLDER), 120, [(0, 5), (60, 66), (114, 120)])


def test_it_begins_as_zeros_on_both_sides(made: DeviceMirror) -> None:
    assert made.tobytes() == on_device(made) == bytes(120)
    assert made.ctypes.data != made.address


def test_views_lie_where_they_lie_in_the_whole(made: DeviceMirror) -> None:
    begin = made.address
    views = [
        (made[7:], 7, 113), (made[60:90][3:5], 63, 2), (made.reshape(2, 60)[1], 60, 60),
        (made[8:24].view(np.float32), 8, 16), (list(made.reshape(3, 40))[2], 80, 40), (made.reshape(-1), 0, 120),
    ]  # fmt: skip
    for view, offset, nbytes in views:
        assert is_mirror(view)
        assert (view.address - begin, view.nbytes) == (offset, nbytes)
        interface = view.__cuda_array_interface__
        assert interface["data"] == (view.address, False)
        assert interface["shape"] == view.shape
        assert np.dtype(interface["typestr"]) == view.dtype


def test_of_views_the_host_holds_their_share(made: DeviceMirror) -> None:
    assert spans(made) == [(0, 5), (60, 66), (114, 120)]
    assert spans(made[3:62]) == [(0, 2), (57, 59)]
    assert spans(made[5:60]) == []
    assert spans(made[61:64]) == [(0, 3)]
    assert spans(made[8:24].view(np.float64)) == []
    assert spans(made[112:].view(np.float32)) == [(2, 8)]
    assert spans(made.reshape(2, 60)) == spans(made)


def test_copies_are_the_hosts(made: DeviceMirror) -> None:
    for copy in (made.copy(), made + 1, np.empty_like(made), made[[1, 2]]):
        assert isinstance(copy, DeviceMirror)
        assert not is_mirror(copy)
        assert not hasattr(copy, "__cuda_array_interface__")
        with pytest.raises(AttributeError, match="a copy of a device mirror"):
            copy.address  # noqa: B018
    assert not is_mirror(np.zeros(3))


def test_filled_where_it_holds(made: DeviceMirror) -> None:
    part = made[8:24].view(np.float32)
    fill(part, 2.5)
    assert on_device(part) == np.full(4, 2.5, np.float32).tobytes()
    assert on_device(made)[:8] == bytes(8)
    assert on_device(made)[24:] == bytes(96)
    plain = np.zeros(3)
    fill(plain, 1.0)
    assert plain.tolist() == [1, 1, 1]


def test_a_twin_of_nothing() -> None:
    empty = mirror(CpuDriver(FOLDER), 0, [])
    assert is_mirror(empty)
    assert empty.host_parts() == []
