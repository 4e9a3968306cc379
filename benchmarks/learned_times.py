"""Encode and decode of learned and plain codes, on one core."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import learned_codes as plain
import numpy as np
import report

from gradcomp.contrib.lgc.autoencoder import Autoencoder

Work = Callable[[], object]

#: At a density of 0.1%: ResNet-20 without its ends, the LSTM, ResNet-50.
VALUES = (267, 1_292, 25_600)
CALLS = 7


def least(work: Work) -> float:
    """Processor time of the fastest of several calls, in ms."""
    work()
    found = []
    for _ in range(CALLS):
        began = time.process_time()
        work()
        found.append(time.process_time() - began)
    return 1e3 * min(found)


def _codes(values: Any, channels: int, bits: int) -> list[tuple[str, int, Work, Work]]:
    """A learned code and the plain ones of its bytes: name, bytes, what encodes, what decodes."""
    net, count = Autoencoder(channels), len(values)
    weights = net.first_weights(0)
    code, coded = net.encode(weights, values), plain.quantise(values, bits)
    drawn = plain.project(values, channels)
    return [
        (
            f"LGC, {channels} of 16",
            4 * len(code),
            lambda: net.encode(weights, values),
            lambda: net.decode(weights, code, count),
        ),
        (
            f"{bits} bits",
            len(coded),
            lambda: plain.quantise(values, bits),
            lambda: plain.dequantise(coded, count, bits),
        ),
        (
            f"projection, {channels} of 16",
            4 * len(drawn),
            lambda: plain.project(values, channels),
            lambda: plain.unproject(drawn, count, channels),
        ),
    ]


def rows() -> list[dict[str, object]]:
    """One for each code and number of values."""
    found: list[dict[str, object]] = []
    for count in VALUES:
        values = np.random.default_rng(count).standard_normal(count).astype(np.float32)
        for channels, bits in ((4, 8), (1, 2)):
            for name, size, encode, decode in _codes(values, channels, bits):
                times = {"encode_ms": least(encode), "decode_ms": least(decode)}
                found.append({"values": count, "code": name, "bytes": size, **times})
    return found


def run(path: Path | None) -> int:
    """Measure, print, and write if a path was given."""
    found = rows()
    report.write_json(path, {"benchmark": "learned-times", "machine": report.machine(), "rows": found})
    print(report.describe(report.machine()))
    cells = [
        [f"{r['values']:,}", r["code"], f"{r['bytes']:,}", f"{r['encode_ms']:.3f}", f"{r['decode_ms']:.3f}"]
        for r in found
    ]
    print(report.table(["values", "code", "bytes", "encode, ms", "decode, ms"], cells))
    return 0
