"""Converts the state of a controller to numbers, strings, lists and dicts, for a checkpoint, and back."""

from __future__ import annotations

import enum
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, TypeVar

import numpy as np

from gradcomp.core.errors import StateError

S = TypeVar("S")


def to_plain(value: Any) -> Any:
    """Converts a value to what JSON can hold: a dataclass by field names, an enum by name, an array as lists.

    A field that is None and has a default is left out.
    """
    if is_dataclass(value):
        named = ((f, getattr(value, f.name)) for f in fields(value))
        return {f.name: to_plain(v) for f, v in named if v is not None or f.default is MISSING}
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: to_plain(one) for key, one in value.items()}
    return [to_plain(one) for one in value] if isinstance(value, list | tuple) else value


def from_plain(kind: type[S], data: Any, name: str) -> S:
    """Inverse of :func:`to_plain`; raises StateError, with the controller's ``name``, for anything else."""
    try:
        found: S = _read(kind, data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StateError(f"not a state of {name}: {error!r}") from error
    return found


def _read(kind: Any, data: Any) -> Any:
    """Converts plain data to a value of the type hint ``kind``."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if data is None and type(None) in arguments:
            return None
        if isinstance(data, list) and any(typing.get_origin(one) is tuple for one in arguments):
            return tuple(data)
        kinds = [one for one in arguments if one is not type(None)]
        return _read(kinds[0], data) if len(kinds) == 1 else data
    if origin is np.ndarray:
        return np.array(data, dtype=np.float64)
    if origin is list:
        return [_read(arguments[0], one) for one in data]
    if origin is tuple:
        return tuple(_read(one, item) for one, item in zip(arguments, data, strict=True))
    if origin is dict:
        return {str(key): _read(arguments[1], one) for key, one in data.items()}
    if is_dataclass(kind):
        return _read_fields(kind, data)
    if isinstance(kind, enum.EnumMeta):
        return kind[data]
    return kind(data) if isinstance(data, str) == (kind is str) else _refuse(kind, data)


def _read_fields(kind: Any, data: Mapping[str, Any]) -> Any:
    """Converts plain data to a dataclass; fields that have a default may be absent."""
    hints = typing.get_type_hints(kind)
    given = [f.name for f in fields(kind) if f.name in data or f.default is MISSING]
    return kind(**{name: _read(hints[name], data[name]) for name in given})


def _refuse(kind: Any, data: Any) -> Any:
    raise TypeError(f"expected {kind.__name__}, got {data!r}")
