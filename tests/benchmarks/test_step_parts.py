"""Tests the arithmetic of the benchmark that shows where a step's time goes."""

from __future__ import annotations

from typing import Any

import pytest
import step_parts
from step_parts_rank import Parts
from step_rows import DDP, IDEAL

TASK = Parts("quantize:bits=4", (64, 128), blocks=1, steps=2, warmup=0, seed=0, data=None)


def rank(**steps_ms: float) -> dict[str, Any]:
    """Returns what a rank found: rows whose two steps take so long, of which threads have fixed shares."""
    rows: dict[str, Any] = {}
    for name, ms in steps_ms.items():
        key = name.lstrip("n")
        buckets = {"64": 9, "128": 5}.get(key)
        rows[key] = {"seconds": [1e-3 * ms] * 2, "threads": [], "phases": []}
        if buckets:
            threads = {"gradcomp": [2e-3 * buckets, 10], "gloo_tcp_loop": [1e-3 * buckets, 0]}
            threads |= {"pt_gloo_runloop": [1e-3 * buckets, 0], "gradcomp-watch": [1.0, 0]}
            rows[key]["threads"] = [threads]
            rows[key]["phases"] = [{"compress": 1e-3 * buckets, "send": 1.0, "under way": 0.5}]
            rows[key] |= {"buckets": buckets, "wire_bytes": 1000.0, "calls": 7}
    return {"rows": rows}


def test_the_price_of_a_bucket_is_the_difference_of_rows_over_that_of_their_buckets():
    found = [rank(ideal=10, ddp=50, n64=38, n128=30), rank(ideal=9, ddp=40, n64=20, n128=20)]
    results = step_parts.evaluate(found, TASK)
    assert results["64"]["step"] == pytest.approx(0.038)  # the slower rank's
    assert results["64"]["exposed"] == pytest.approx(0.028)
    assert results[DDP]["exposed"] == pytest.approx(0.040)
    # Of a step, since the threads were measured over two; without the time inside codecs; without the watchdog.
    assert results["64"]["threads"] == pytest.approx(
        {"engine": 9e-3, "Gloo": 9e-3, "main": 0.0, "other": 0.5}
    )
    price = results["64"]["price"]
    assert price == pytest.approx({"step": 2e-3, "engine": 0.5e-3, "Gloo": 1e-3})
    assert "price" not in results["128"]
    assert "price" not in results[IDEAL]
    first, second = step_parts.bars(results, TASK)
    assert "2.00 ms" in first
    assert "MISSED" in first
    assert "0.50 ms" in second
    assert "| 64 " in step_parts.show(results)


def test_floors_are_bytes_over_rates():
    found = {"parameters": 1000, "copy_bytes_per_second": 1e6, "link": {"bytes_per_second": 1e5}}
    least = step_parts.floors(found, {"wire_bytes": 750.0}, world=4)
    payload = 750 * 4 / 6
    assert least["compress"] == pytest.approx((4000 + payload) / 1e6)
    assert least["reduce"] == pytest.approx(payload * 1.25 / 1e6)
    assert least["under way"] == pytest.approx(750 / 1e5)
