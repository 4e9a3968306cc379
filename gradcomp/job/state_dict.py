"""Converts snapshots of compression state to arrays, numbers and strings, which any framework can store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from gradcomp.core.errors import StateError
from gradcomp.core.state import Range
from gradcomp.exchange.snapshot import Shared, Snapshot

Array = np.ndarray[Any, Any]


def to_plain(state: Snapshot) -> dict[str, Any]:
    """Return the snapshot as nested dicts and lists."""
    names = list(state.shared.layers)
    return {
        "rank": state.rank,
        "world": state.world,
        **state.shared.to_plain(),
        "residuals": dict(state.first),
        "second_residual_ranges": [[names[r.layer], r.start, r.length] for r in state.ranges],
        "second_residuals": state.second,
        "fields": {kind: dict(values) for kind, values in state.fields.items()},
        "control_arrays": {kind: dict(values) for kind, values in state.control.items()},
    }


def from_plain(data: Any) -> Snapshot:
    """Return the snapshot that :func:`to_plain` converted; StateError for anything else."""
    shared = Shared.from_plain(data)
    numbers = {name: number for number, name in enumerate(shared.layers)}
    try:
        rows = [(numbers[name], start, length) for name, start, length in data["second_residual_ranges"]]
        values = [data["rank"], data["world"], *(value for row in rows for value in row)]
        if not all(type(value) is int for value in values):
            raise TypeError("a number is not whole")
        return Snapshot(
            data["rank"],
            data["world"],
            shared,
            {str(name): _array(value) for name, value in data["residuals"].items()},
            tuple(Range(*row) for row in rows),
            _array(data["second_residuals"]).reshape(-1),
            _arrays(data.get("fields", {})),  # older states have none
            _arrays(data.get("control_arrays", {})),
        )
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise StateError(f"not a compression state: {error!r}") from error


def _arrays(kinds: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Array]]:
    return {
        str(kind): {str(name): _array(value) for name, value in values.items()}
        for kind, values in kinds.items()
    }


def _array(value: Any) -> Array:
    if not isinstance(value, np.ndarray):
        raise TypeError(f"expected an array, got {type(value).__name__}")
    return value
