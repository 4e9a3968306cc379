"""A well-formed call of every kernel, of two rows, by the names of its arguments; records by those of their members."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import numpy as np
from kernels.backends import ALL, HOST
from kernels.groups import magnitudes_of

from gradcomp.kernels import dispatch, segments
from gradcomp.kernels.segments import Factor, Shapes

CODEC = ("encode", "decode", "decode_add", "reduce")
SELECTING = ("select_top", "select_above", "select_adacomp", "take", "put")
OF_RESIDUALS = ("contribute", *SELECTING, "sample_thresholds", "tail")
LISTS = ("encode_indices", "decode_indices")
OF_FACTORS = ("project", "back_project", "expand", "subtract")

LENGTH, SIDES = 21, (3, 7)
COLUMNS = ("gradient", "residual", "next_residual", "output")
MEMORY = np.ones((4, 2, LENGTH), np.float32)
"""What the columns of both rows refer to."""

WRITTEN = {
    "encode": ("payload", "flags"),
    "decode": ("flags",),
    "decode_add": (),
    "reduce": ("out", "flags"),
    "nonzero": ("out",),
    "sample": ("values",),
    "contribute": ("flags",),
    "squares": ("out",),
    "select_top": ("flags", "indices", "values", "found"),
    "select_above": ("indices", "values", "found"),
    "select_adacomp": ("indices", "values", "found"),
    "sample_thresholds": ("thresholds",),
    "tail": ("counts", "sums", "squares_out", "maxima"),
    "take": ("values",),
    "put": (),
    "encode_indices": ("payload",),
    "decode_indices": ("indices",),
    "draw_indices": ("indices",),
    "scatter_mean": ("flags",),
    "project": ("flags", "p"),
    "back_project": ("q",),
    "orthogonalise": ("p",),
    "expand": ("flags",),
    "subtract": (),
    "cheapest": ("chosen",),
}
"""The kernels, and the arrays that they write."""

TABLES = WRITTEN.keys() - {*LISTS, "draw_indices", "orthogonalise", "cheapest"}

ANY_LENGTH = {"payload", "indices", "values", "p", "q", "payloads", "steps", "costs"}
"""Arrays that do not have one item for each row."""
UNALIGNED = {*SELECTING, *OF_RESIDUALS, "squares", *LISTS, "scatter_mean", "cheapest"} - {"select_adacomp"}
"""The kernels that refuse arrays which are not aligned to their items; others read them."""


def well_formed(kernel: str, codec: int = segments.MINMAX) -> dict[str, Any]:
    """All arguments of a kernel by name, records by their members."""
    table = np.zeros(2, segments.SEGMENT)
    table["length"], table["level"], table["bucket_size"] = LENGTH, 4, 32
    for name, rows in zip(COLUMNS, MEMORY, strict=True):
        table[name] = [row.ctypes.data for row in rows]
    table["payload"] = (0, 19)
    int64s = {"counts": (2, 2), "limits": (2, 2), "offsets": (0, 2), "found": (9, 9)}
    given: dict[str, Any] = {name: np.array(items) for name, items in int64s.items()}
    given |= {
        "codec": codec,
        "table": table,
        "payload": np.full(38, 0xA5, np.uint8),
        "flags": np.zeros(2, np.uint8),
    }
    given |= {"draw": None, "scale": 1.0, "decay": 1.0, "divisor": 1.0, "magnitudes": magnitudes_of(codec)}
    given |= {"payloads": [np.zeros(38, np.uint8) for _ in range(2)], "factors": np.ones(2, np.float32)}
    given |= {"indices": np.array([1, 2, 5, 20], np.uint32), "values": np.full(4, 7, np.float32)}
    given |= {"thresholds": np.zeros(2, np.float32), "maxima": np.zeros(2, np.float32), "zeros": False}
    given |= {
        "sums": np.zeros(2),
        "squares_out": np.zeros(2),
        "stride": 2,
        "phase": 0,
        "bin_size": 4,
        "turn": 0,
    }
    given |= {"lengths": np.array([LENGTH, LENGTH]), "layers": np.array([1, 2], np.uint32)}
    given |= {"seed": 1, "step": 2, "rank": 3, "budget": 9, "chosen": np.full(2, 7, np.int32)}
    given |= {"steps": np.ones((2, 3), np.int32), "costs": np.ones((2, 3))}
    sides = np.array([SIDES] * 2).T
    given |= {"rows": sides[0].copy(), "columns": sides[1].copy(), "ranks": np.array([2, 2])}
    given |= {"p": np.ones(12, np.float32), "q": np.ones(28, np.float32)}
    given |= {"p_at": np.array([0, 6]), "q_at": np.array([0, 14])}
    if kernel in LISTS:
        given |= {
            "codings": np.array([0, 0], np.int32),
            "places": np.array([0, 8]),
            "payload": np.zeros(16, np.uint8),
        }
        given["payload"].view("<u4")[:] = given["indices"]
    elif kernel == "scatter_mean":
        given |= {"counts": np.array([[1, 1], [0, 2]]), "offsets": np.array([[0, 1], [2, 2]])}
    elif kernel == "sample":
        given["values"] = np.zeros(2, np.uint32)
    given["out"] = {"reduce": given["payload"], "squares": np.zeros(2)}.get(kernel, np.zeros(2, np.uint8))
    names = []
    for name, each in inspect.signature(definition(kernel)).parameters.items():
        of_factor = [name, f"{name}_at"] if each.annotation == "Factor" else [name]
        names += Shapes._fields if each.annotation == "Shapes" else of_factor
    return {name: given[name] for name in names}


def definition(kernel: str) -> Any:
    return getattr(dispatch.Kernels, kernel)


def call(backend: Any, kernel: str, given: dict[str, Any]) -> None:
    by_place, by_name = [], {}
    for name, each in inspect.signature(definition(kernel)).parameters.items():
        if each.annotation == "Shapes":
            by_place.append(Shapes(*(given[member] for member in Shapes._fields)))
        elif each.annotation == "Factor":
            by_place.append(Factor(given[name], given[f"{name}_at"]))
        elif each.kind is each.KEYWORD_ONLY:
            by_name[name] = given[name]
        else:
            by_place.append(given[name])
    getattr(backend, kernel)(*by_place, **by_name)


def arrays_of(kernel: str) -> Iterable[tuple[str, Any]]:
    given = well_formed(kernel)
    return ((name, each) for name, each in given.items() if isinstance(each, np.ndarray))


def names_for(kernel: str) -> tuple[str, ...]:
    """CUDA has no dynamic program, checks no sample, and of codecs what a prepared call needs."""
    return HOST if kernel in (*CODEC, "nonzero", "sample", "cheapest") else ALL
