"""Selections that no caller should ask for: clear errors before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from kernels.isas import NATIVE
from kernels.standin import ORDERS, cuda_backend

from gradcomp.kernels import dispatch, segments

BACKEND = pytest.mark.parametrize("name", ["reference", "native", *ORDERS])

LENGTH = 8
GRADIENT = np.ones(LENGTH, np.float32)
NEXT_RESIDUAL = np.zeros(LENGTH, np.float32)


def backend_of(name: str) -> Any:
    if name in ORDERS:
        return cuda_backend(ORDERS[name])
    return NATIVE if name == "native" else dispatch.named(name)


class Arguments:
    """Arguments that all kernels accept, for one row; a test spoils one of them."""

    def __init__(self, **columns: Any) -> None:
        self.table = np.zeros(1, segments.SEGMENT)
        for name, value in ({"length": LENGTH, "next_residual": NEXT_RESIDUAL.ctypes.data} | columns).items():
            self.table[name] = value
        self.flags = np.zeros(1, np.uint8)
        self.factors = np.ones(1, np.float32)
        self.counts = np.full(1, 2, np.int64)
        self.offsets = np.full(1, 3, np.int64)
        self.indices = np.full(6, 7, np.uint32)
        self.values = np.full(6, 7, np.float32)
        self.thresholds = np.zeros(1, np.float32)
        self.found = np.zeros(1, np.int64)
        self.sums = np.zeros(1)
        self.squares = np.zeros(1)
        self.maxima = np.zeros(1, np.float32)
        self.stride, self.phase = 2, 0
        self.zeros = False

    def calls(self, backend: Any) -> dict[str, Callable[[], None]]:
        flat = (self.offsets, self.indices, self.values)
        return {
            "contribute": lambda: backend.contribute(self.table, self.flags, self.factors, decay=1.0),
            "squares": lambda: backend.squares(self.table, self.sums),
            "select_top": lambda: backend.select_top(
                self.table,
                self.flags,
                self.factors,
                self.counts,
                *flat,
                self.found,
                decay=1.0,
                zeros=self.zeros,
            ),
            "select_above": lambda: backend.select_above(
                self.table, self.thresholds, self.counts, *flat, self.found
            ),
            "sample_thresholds": lambda: backend.sample_thresholds(
                self.table, self.counts, self.thresholds, stride=self.stride, phase=self.phase
            ),
            "tail": lambda: backend.tail(
                self.table, self.thresholds, self.counts, self.sums, self.squares, self.maxima
            ),
            "take": lambda: backend.take(self.table, self.offsets, self.counts, *flat[1:]),
            "put": lambda: backend.put(self.table, self.offsets, self.counts, *flat[1:]),
        }


SELECTING = {"select_top", "select_above", "take", "put"}
WITH_NEXT_RESIDUAL = {"contribute", "select_top", "select_above", "sample_thresholds", "tail", "take", "put"}
ALL = WITH_NEXT_RESIDUAL | {"squares"}

MALFORMED_ROWS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "length negative": ({"length": -1}, ALL),
    "length beyond an index": ({"length": 1 << 32}, ALL),
    "length huge": ({"length": 1 << 62}, ALL),
    "start negative": ({"start": -1}, ALL),
    "dtype unknown": ({"dtype": 4}, ALL),
    "dtype negative": ({"dtype": -1}, ALL),
    "no next residual": ({"next_residual": 0}, WITH_NEXT_RESIDUAL),
    "float64": ({"dtype": segments.FLOAT64}, {"contribute", "select_top"}),
}

BAD_NUMBERS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "offset negative": ({"offsets": -1}, SELECTING),
    "offset beyond the end": ({"offsets": 5}, SELECTING),
    "offset wraps": ({"offsets": 2**63 - 1}, SELECTING),
    "count negative": ({"counts": -1}, {*SELECTING, "sample_thresholds"}),
    "count beyond the end": ({"counts": 4}, SELECTING),
    "count beyond the length": ({"counts": 9, "offsets": 0}, {*SELECTING, "sample_thresholds"}),
    "count huge": ({"counts": 2**63 - 1}, {*SELECTING, "sample_thresholds"}),
    "index at the length": ({"indices": LENGTH}, {"take", "put"}),
    "index huge": ({"indices": 2**32 - 1}, {"take", "put"}),
    "stride zero": ({"stride": 0}, {"sample_thresholds"}),
    "stride negative": ({"stride": -1}, {"sample_thresholds"}),
    "phase negative": ({"phase": -1}, {"sample_thresholds"}),
}


def refused(arguments: Arguments, name: str, kernels: set[str], error: type[Exception]) -> None:
    before = {key: np.copy(value) for key, value in vars(arguments).items()}
    next_residual = NEXT_RESIDUAL.copy()
    calls = arguments.calls(backend_of(name))
    for kernel in sorted(kernels):
        with pytest.raises(error):
            calls[kernel]()
        for key, value in vars(arguments).items():
            assert np.array_equal(before[key], value), f"{kernel} wrote {key}"
        assert np.array_equal(next_residual, NEXT_RESIDUAL), f"{kernel} wrote the next residual"


@BACKEND
@pytest.mark.parametrize(("columns", "kernels"), MALFORMED_ROWS.values(), ids=MALFORMED_ROWS)
def test_malformed_row(name: str, columns: dict[str, Any], kernels: set[str]) -> None:
    refused(Arguments(**columns), name, kernels, ValueError)


@BACKEND
@pytest.mark.parametrize(("numbers", "kernels"), BAD_NUMBERS.values(), ids=BAD_NUMBERS)
def test_bad_number(name: str, numbers: dict[str, Any], kernels: set[str]) -> None:
    arguments = Arguments()
    for key, value in numbers.items():
        if isinstance(getattr(arguments, key), int):
            setattr(arguments, key, value)
        else:
            getattr(arguments, key)[-1 if key != "indices" else 4] = value
    refused(arguments, name, kernels, ValueError)


@BACKEND
def test_a_later_row_is_checked_before_the_first_is_written(name: str) -> None:
    arguments = Arguments()
    for key in (
        "table",
        "flags",
        "factors",
        "counts",
        "offsets",
        "thresholds",
        "found",
        "sums",
        "squares",
        "maxima",
    ):
        setattr(arguments, key, np.concatenate([getattr(arguments, key)] * 2))
    arguments.table["gradient"] = GRADIENT.ctypes.data
    arguments.offsets[1] = 5
    refused(arguments, name, SELECTING, ValueError)
    arguments.offsets[:] = 0, 4
    arguments.indices[5] = LENGTH
    refused(arguments, name, {"take", "put"}, ValueError)


USED_BY = {
    "flags": {"contribute", "select_top"},
    "factors": {"contribute", "select_top"},
    "counts": {*SELECTING, "sample_thresholds", "tail"},
    "offsets": SELECTING,
    "indices": SELECTING,
    "values": SELECTING,
    "thresholds": {"select_above", "sample_thresholds", "tail"},
    "found": {"select_top", "select_above"},
    "sums": {"squares", "tail"},
    "squares": {"tail"},
    "maxima": {"tail"},
}


@BACKEND
@pytest.mark.parametrize("key", USED_BY)
def test_wrong_arrays(name: str, key: str) -> None:
    right = getattr(Arguments(), key)
    strided = np.repeat(right, 4)[::2]
    for wrong in (right.astype(np.int16), np.stack([right] * 2), strided, right.tolist(), None):
        arguments = Arguments()
        setattr(arguments, key, wrong)
        calls = arguments.calls(backend_of(name))
        for kernel in sorted(USED_BY[key]):
            with pytest.raises(TypeError):
                calls[kernel]()


WRITTEN_BY = {
    "flags": {"contribute", "select_top"},
    "indices": {"select_top", "select_above"},
    "values": {"select_top", "select_above", "take"},
    "thresholds": {"sample_thresholds"},
    "found": {"select_top", "select_above"},
    "counts": {"tail"},
    "sums": {"squares", "tail"},
    "squares": {"tail"},
    "maxima": {"tail"},
}


@BACKEND
@pytest.mark.parametrize("key", WRITTEN_BY)
def test_read_only_targets(name: str, key: str) -> None:
    arguments = Arguments()
    getattr(arguments, key).flags.writeable = False
    refused(arguments, name, WRITTEN_BY[key], TypeError)


@BACKEND
@pytest.mark.parametrize("key", sorted(USED_BY.keys() - {"flags"}))
def test_unaligned_arrays(name: str, key: str) -> None:
    arguments = Arguments()
    right = getattr(arguments, key)
    memory = np.zeros(right.nbytes + 1, np.uint8)
    setattr(arguments, key, memory[1:].view(right.dtype))
    refused(arguments, name, USED_BY[key], TypeError)


@BACKEND
@pytest.mark.parametrize("key", sorted(USED_BY.keys() - {"indices", "values"}))
def test_one_item_per_row(name: str, key: str) -> None:
    arguments = Arguments()
    setattr(arguments, key, np.repeat(getattr(arguments, key), 2))
    refused(arguments, name, USED_BY[key], ValueError)


@BACKEND
def test_read_only_sources_are_read(name: str) -> None:
    arguments = Arguments()
    for key in ("factors", "counts", "offsets", "thresholds"):
        getattr(arguments, key).flags.writeable = False
    calls = arguments.calls(backend_of(name))
    for kernel in ("contribute", "select_top", "select_above", "take", "put"):
        calls[kernel]()
