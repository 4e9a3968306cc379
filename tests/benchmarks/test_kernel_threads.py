"""Speed by number of threads: the roofline by hand, and which figures a bar judges."""

from __future__ import annotations

import pytest
from kernel_threads import Row, roofline, table


def row(megabytes: int, operation: str, two: float) -> Row:
    return Row(megabytes, operation, 4.5, {1: 2.0, 2: two}, 9.0)


@pytest.mark.parametrize(
    ("one_thread", "bandwidth", "bytes_per_element", "most"),
    [
        pytest.param(2.0, 100.0, 4.0, 16.0, id="eight cores are the limit"),
        pytest.param(2.0, 12.0, 8.0, 6.0, id="the memory is"),
    ],
)
def test_the_roofline_is_the_smaller_of_cores_and_memory(
    one_thread: float, bandwidth: float, bytes_per_element: float, most: float
):
    assert roofline(one_thread, bandwidth, bytes_per_element) == most


def test_encode_and_decode_of_64_megabytes_have_a_bar():
    rows = [
        row(64, "encode", 3.4),
        row(64, "decode", 3.38),
        row(4, "encode", 2.0),
        row(64, "reduce of 2", 2.0),
    ]
    assert [each.barred for each in rows] == [True, True, False, False]
    lines = table(rows, [1, 2]).splitlines()[2:]
    assert [line.split(" | ")[-1].strip(" |") for line in lines] == ["1.7 met", "1.7 missed", "", ""]
    assert lines[0].startswith("| 64 | encode | 2.00 | 3.40 | 1.70 |")
