"""A frontend's collectives as the checks call them: with NumPy arrays, whatever tensors the frontend takes."""

from __future__ import annotations

import json
import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import ml_dtypes
import numpy as np
import pytest

#: The most by which floats may differ that were added in another order: relative, absolute.
_TOLERANCES = {
    "float16": (1e-3, 1e-6),
    "bfloat16": (1e-2, 1e-6),
    "float32": (1e-6, 1e-6),
    "float64": (1e-7, 1e-7),
}


class Collectives(ABC):
    """What a check gets on its rank.

    ``gc`` is the frontend. Calling the object calls one of its functions with tensors and returns arrays.
    """

    gc: Any

    def __init__(self) -> None:
        self.rank, self.world = self.gc.rank(), self.gc.size()

    @abstractmethod
    def tensor(self, array: np.ndarray) -> Any: ...

    @abstractmethod
    def array(self, tensor: Any) -> np.ndarray: ...

    @abstractmethod
    def raises(self, kind: type[Exception], *texts: str) -> AbstractContextManager[None]:
        """The block raises this error, with all the texts."""

    @abstractmethod
    def gradient(
        self, function: Callable[[Any], Any], array: np.ndarray, weight: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """What the function returns, and the gradient of the sum of that times ``weight``."""

    def mode(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, made for the way in which it is to run."""
        return function

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Arrays become tensors and results arrays, in lists too. No collective may change what it is given."""
        given: list[tuple[Any, np.ndarray]] = []

        def tensors(argument: Any) -> Any:
            if isinstance(argument, list):
                return [tensors(each) for each in argument]
            given.append((self.tensor(argument), argument))
            return given[-1][0]

        results = self.mode(function)(*map(tensors, arguments))
        for tensor, array in given:
            same(self.array(tensor), array)
        return self._arrays(results)

    def _arrays(self, results: Any) -> Any:
        if isinstance(results, (list, tuple)):
            return [self._arrays(each) for each in results]
        return None if results is None else self.array(results)

    def everywhere(self, array: np.ndarray) -> None:
        """All ranks hold the same bytes."""
        rows = self(self.gc.allgather, np.ascontiguousarray(array).reshape(1, -1).view(np.uint8))
        assert (rows == rows[0]).all()


Check = Callable[[Collectives], None]


def same(found: np.ndarray, expected: Any) -> None:
    """Equal byte for byte."""
    expected = np.asarray(expected)
    assert found.dtype == expected.dtype, (found.dtype, expected.dtype)
    assert found.shape == expected.shape, (found.shape, expected.shape)
    assert found.tobytes() == expected.tobytes(), (found, expected)


def close(found: np.ndarray, expected: Any) -> None:
    """Equal but for the order of additions."""
    expected = np.asarray(expected)
    assert found.dtype == expected.dtype, (found.dtype, expected.dtype)
    assert found.shape == expected.shape, (found.shape, expected.shape)
    if found.dtype.name in _TOLERANCES:
        rtol, atol = _TOLERANCES[found.dtype.name]
        wide = np.float64
        np.testing.assert_allclose(found.astype(wide), expected.astype(wide), rtol=rtol, atol=atol)
    else:
        np.testing.assert_array_equal(found, expected)


def of_dtype(name: str, *values: Any) -> np.ndarray:
    return np.array(values).astype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def outcome(check: Callable[..., None], *arguments: Any) -> str:
    """The traceback of a check that fails; empty if it passes."""
    try:
        check(*arguments)
    except (Exception, pytest.fail.Exception):  # noqa: BLE001 - the parent shows it
        return traceback.format_exc()
    return ""


def report(outcomes: Mapping[str, str]) -> None:
    """Write them for :func:`launching.run_ranks`' caller."""
    json.dump(outcomes, sys.stdout)
