"""Kernels of a device for tables of the host's memory, so that tests of the other backends are tests of it too."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from gradcomp.kernels.segments import DTYPES, SEGMENT, check_elements

GUARD = 256
_PATTERN = 0xA7
_MOST_BYTES = 1 << 27

#: These use no other column; what else is in the table may be of another dtype.
_OUTPUT_ONLY = ("decode", "decode_add", "expand", "scatter_mean")


class Carried:
    """What the rows refer to is carried to the device before a call, and what changed is carried back.

    It lies there as it lies here: overlapping memory overlaps, and addresses are the same modulo 256. Bytes around it
    are looked after.
    """

    def __init__(self, backend: Any, driver: Any) -> None:
        self._backend, self._driver = backend, driver

    def __getattr__(self, name: str) -> Any:
        kernel = getattr(self._backend, name)

        def call(*arguments: Any, **settings: Any) -> Any:
            columns = (
                ("output",) if name in _OUTPUT_ONLY else ("gradient", "residual", "next_residual", "output")
            )
            arguments = tuple(_only(columns, each) if _is_table(each) else each for each in arguments)
            spans = _spans([each for each in arguments if _is_table(each)])
            copies = [_Copy(self._driver, begin, end) for begin, end in spans]
            carried = [_rewritten(each, copies) if _is_table(each) else each for each in arguments]
            try:
                return kernel(*carried, **settings)
            finally:
                for copy in copies:
                    copy.bring_back()

        return call


class _Copy:
    """Memory of the device that stands for some of the host's."""

    def __init__(self, driver: Any, begin: int, end: int) -> None:
        self._driver, self._host = driver, _memory(begin, end - begin)
        self.begin, self.end = begin, end
        self._at = GUARD + begin % 256
        self._block = driver.allocate(self._at + end - begin + GUARD)
        self._before = driver.pinned(self._at + end - begin + GUARD)
        self._before[:] = _PATTERN
        self._before[self._at : -GUARD] = self._host
        driver.upload(self._block.address, self._before)
        self.shift = self._block.address + self._at - begin

    def bring_back(self) -> None:
        after = self._driver.pinned(len(self._before))
        self._driver.download(after, self._block.address)
        self._driver.synchronize()
        assert (after[: self._at] == _PATTERN).all(), "written before an array"
        assert (after[-GUARD:] == _PATTERN).all(), "written behind an array"
        # What is only read may lie where nobody can write.
        changed = np.flatnonzero(after[self._at : -GUARD] != self._before[self._at : -GUARD])
        self._host[changed] = after[self._at : -GUARD][changed]


def _is_table(argument: Any) -> bool:
    return isinstance(argument, np.ndarray) and argument.dtype == SEGMENT


def _only(columns: tuple[str, ...], table: Any) -> Any:
    table = table.copy()
    for name in ("gradient", "residual", "next_residual", "output"):
        if name not in columns:
            table[name] = 0
    return table


def _memory(address: int, nbytes: int) -> Any:
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def _columns(table: Any) -> list[tuple[str, Any]]:
    """Which columns hold addresses, and the bytes behind them in each row."""
    of_dtype = np.array([dtype.itemsize for dtype in DTYPES])[table["dtype"]]
    length = table["length"]
    return [
        ("gradient", length * of_dtype),
        ("output", length * of_dtype),
        ("residual", length * 4),
        ("next_residual", length * 4),
    ]


def _spans(tables: list[Any]) -> list[tuple[int, int]]:
    """The memory that tables refer to; none if a kernel will refuse them."""
    found: list[tuple[int, int]] = []
    try:
        for table in tables:
            check_elements(table)
            for name, sizes in _columns(table):
                given = (table[name] != 0) & (sizes > 0)
                begins = table[name][given].astype(np.int64)
                found += zip(begins.tolist(), (begins + sizes[given]).tolist(), strict=True)
    except ValueError:
        return []
    merged: list[tuple[int, int]] = []
    for begin, end in sorted(found):
        if merged and begin < merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged if sum(end - begin for begin, end in merged) <= _MOST_BYTES else []


def _rewritten(table: Any, copies: list[_Copy]) -> Any:
    begins = np.array([copy.begin for copy in copies], np.int64)
    shifts = np.array([copy.shift for copy in copies], np.int64)
    for name, sizes in _columns(table) if copies else ():
        given = np.flatnonzero((table[name] != 0) & (sizes > 0))
        addresses = table[name][given].astype(np.int64)
        table[name][given] = addresses + shifts[np.searchsorted(begins, addresses, side="right") - 1]
    return table
