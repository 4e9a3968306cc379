"""The table of the benchmarks."""

from __future__ import annotations

import json

import report


def test_columns_are_as_wide_as_their_widest_cell():
    lines = report.table(["row", "ms"], [["first", 1.5], ["second row", "12345"]]).splitlines()
    assert lines == [
        "| row        |    ms |",
        "| ---------- | ----: |",
        "| first      |   1.5 |",
        "| second row | 12345 |",
    ]


def test_nothing_is_an_empty_cell():
    assert report.NOTHING in report.table(["row", "ms"], [["first", None]])


def test_the_machine_is_described_without_its_name():
    import platform

    assert platform.node() not in json.dumps(report.machine()).split('"')
