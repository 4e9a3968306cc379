"""What it costs to call Python from inside a tf.function, and to pass 40 MB in and out.

    python benchmarks/tf_ops.py [--rounds 40] [--json PATH]

160 gradients of 1,000 elements are handed to Python one by one, or in 4 groups, by ``tf.numpy_function`` and by
``tf.py_function``. ``IdentityN`` does as little with the same tensors as an op in C++ can: no op of our own would cost
less. The functions take turns, A B C A B C ...; a figure is the median over rounds of the milliseconds beyond those of
a function that has the same inputs and calls nothing. "noise" is what that function takes beyond itself.

40 MB: milliseconds beyond those of the same call with 40 bytes, and whether the data stayed where they were.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import report
import tensorflow as tf

from gradcomp.tf.bridge import aligned, lent, taken_over

GRADIENTS, ELEMENTS, GROUPS = 160, 1000, 4
LARGE, SMALL = 10_000_000, 10


def through_numpy(tensors: list[Any]) -> Any:
    return tf.numpy_function(lambda *arrays: np.int64(len(arrays)), tensors, tf.int64)


def through_py(tensors: list[Any]) -> Any:
    return tf.py_function(lambda *tensors: np.int64(len(tensors)), tensors, tf.int64)


def in_cpp(tensors: list[Any]) -> Any:
    return tf.identity_n(tensors)[0]


WAYS = {"tf.numpy_function": through_numpy, "tf.py_function": through_py, "IdentityN": in_cpp}


def calling(way: Callable[[list[Any]], Any] | None, groups: int, tensors: list[Any]) -> Callable[[], Any]:
    """A function that hands all tensors over in so many groups; None: one that hands over nothing."""
    each = len(tensors) // groups

    def body() -> Any:
        ends = []
        if way is not None:
            ends = [way(tensors[i * each : (i + 1) * each]) for i in range(groups)]
        with tf.control_dependencies([*ends, *tensors]):  # whatever is called, the inputs are there
            return tf.constant(0)

    return tf.function(body, autograph=False)


def milliseconds(function: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    function()
    return 1e3 * (time.perf_counter() - begin)


def rounds_of(functions: dict[Any, Callable[[], Any]], rounds: int) -> dict[Any, list[float]]:
    for _ in range(3):
        for function in functions.values():
            function()
    times: dict[Any, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            times[name].append(milliseconds(function))
    return times


def beyond(times: list[float], base: list[float]) -> float:
    return statistics.median(a - b for a, b in zip(times, base, strict=True))


def calls(rounds: int) -> dict[str, dict[str, float]]:
    tensors = [tf.zeros([ELEMENTS]) for _ in range(GRADIENTS)]
    functions: dict[Any, Callable[[], Any]] = {
        "base": calling(None, 1, tensors),
        "noise": calling(None, 1, tensors),
    }
    for name, way in WAYS.items():
        for groups in (GRADIENTS, GROUPS):
            functions[name, groups] = calling(way, groups, tensors)
    times = rounds_of(functions, rounds)
    found = {
        name: {str(groups): beyond(times[name, groups], times["base"]) for groups in (GRADIENTS, GROUPS)}
        for name in WAYS
    }
    noise = beyond(times["noise"], times["base"])
    return {**found, "noise": {str(GRADIENTS): noise, str(GROUPS): noise}}


def copies(rounds: int) -> dict[str, dict[str, Any]]:
    """By direction and way: milliseconds for 40 MB, and whether TensorFlow and Python shared the memory."""
    found: dict[str, dict[str, Any]] = {}
    seen: dict[str, int] = {}
    arrays = {size: aligned((size,), np.float32) for size in (LARGE, SMALL)}
    tensors = {size: tf.zeros([size]) for size in (LARGE, SMALL)}
    for array in arrays.values():
        array[:] = 1.0

    def look(given: Any) -> np.int64:
        seen["address"] = lent(given).ctypes.data
        return np.int64(0)

    def reading(way: Any, size: int) -> Callable[[], Any]:
        return tf.function(lambda: way(look, [tensors[size]], tf.int64), autograph=False)

    def writing(way: Any, size: int) -> Callable[[], Any]:
        return tf.function(lambda: way(lambda: arrays[size], [], tf.float32), autograph=False)

    def add(name: str, make: Callable[[int], Callable[[], Any]], shared: Callable[[Any], bool]) -> None:
        times = rounds_of({size: make(size) for size in (LARGE, SMALL)}, rounds)
        found[name] = {"ms": beyond(times[LARGE], times[SMALL]), "shared": shared(make(LARGE)())}

    def lies_at(array: np.ndarray) -> Callable[[Any], bool]:
        return lambda tensor: bool(lent(tensor).ctypes.data == array.ctypes.data)

    def was_seen(_: Any) -> bool:
        return seen["address"] == lent(tensors[LARGE]).ctypes.data

    for name, way in (("tf.numpy_function", tf.numpy_function), ("tf.py_function", tf.py_function)):
        add(f"in, {name}", lambda size, way=way: reading(way, size), was_seen)
        add(f"out, {name}", lambda size, way=way: writing(way, size), lies_at(arrays[LARGE]))
    add("in, eager, numpy.asarray", lambda size: lambda: look(tensors[size]), was_seen)
    add("out, eager, DLPack", lambda size: lambda: taken_over(arrays[size]), lies_at(arrays[LARGE]))
    add("out, eager, tf.constant", lambda size: lambda: tf.constant(arrays[size]), lies_at(arrays[LARGE]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=40, help="rounds per table (default: 40)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    machine = {**report.machine(), "tensorflow": tf.__version__}
    called, copied = calls(options.rounds), copies(options.rounds)
    print(f"{report.describe(machine)}, tensorflow {tf.__version__}\n")
    print(
        report.table(
            ["handing over 160 gradients", f"{GRADIENTS} calls, ms", f"{GROUPS} calls, ms"],
            [[name, *(f"{ms:.2f}" for ms in row.values())] for name, row in called.items()],
        )
    )
    print()
    print(
        report.table(
            ["40 MB", "ms", "shared"],
            [[name, f"{row['ms']:.2f}", "yes" if row["shared"] else "no"] for name, row in copied.items()],
        )
    )
    report.write_json(options.json, {"machine": machine, "calls_ms": called, "copies": copied})


if __name__ == "__main__":
    main()
