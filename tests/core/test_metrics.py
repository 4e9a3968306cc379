"""Metrics for loggers: means over the steps between two readings."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest

from gradcomp.core.layers import LayerSpec
from gradcomp.core.metrics import StepMetrics
from gradcomp.core.trace import Statistics
from gradcomp.job.report import Readers

PAGE = Path(__file__).resolve().parents[2] / "docs/watch.md"
LAYERS = [LayerSpec("single", (30,)), LayerSpec("half", (10,), "float16")]  # 28 bits an element in the mean


def test_a_reading_has_the_means_of_the_steps_since_the_last_one() -> None:
    metrics = StepMetrics(LAYERS)
    assert metrics.read(Statistics(10, 0, 5_000_000, 20_000_000, 9, 9, 9, 9, 9))["gradcomp/sent_mb"] == 0.5
    now = Statistics(14, 1, 7_000_000, 36_000_000, 9.02, 9.04, 9.002, 9.004, 9.2)
    assert metrics.read(now, plan_version=3) == pytest.approx({
        "gradcomp/step_ms": 50.0,
        "gradcomp/exposed_ms": 0.5,
        "gradcomp/codec_ms": 5.0,
        "gradcomp/wire_ms": 10.0,
        "gradcomp/vote_ms": 1.0,
        "gradcomp/sent_mb": 0.5,
        "gradcomp/ratio": 8.0,
        "gradcomp/bits": 28 / 8,
        "gradcomp/steps": 14,
        "gradcomp/skipped_steps": 1,
        "gradcomp/plan_version": 3,
    })  # fmt: skip


def test_a_second_reading_of_a_step_repeats_the_first() -> None:
    """Two loggers that read after the same steps get the same numbers."""
    metrics, counters = StepMetrics(LAYERS), Statistics(4, 0, 400, 3200, step_seconds=0.4)
    first = metrics.read(counters)
    assert first["gradcomp/ratio"] == 8.0
    assert metrics.read(counters) == first


def test_before_the_first_step_the_ratio_is_one_and_all_else_zero() -> None:
    metrics = StepMetrics().read(Statistics())
    assert metrics.pop("gradcomp/ratio") == 1.0
    assert not any(metrics.values())


def test_readings_of_several_threads_miss_no_step_and_count_none_twice() -> None:
    metrics, counters = StepMetrics(LAYERS), Statistics()
    sums, done = [0.0, 0.0], threading.Event()

    def read(number: int) -> None:
        before = 0
        while not done.is_set() or before != counters.steps:
            found = metrics.read(counters)
            if found["gradcomp/steps"] != before:
                before = found["gradcomp/steps"]
                assert found["gradcomp/ratio"] == 8.0, (
                    "bytes of the step and of the dense exchange belong together"
                )
                sums[number] += 1

    threads = [threading.Thread(target=read, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(20_000):
        with metrics.lock:
            counters.steps += 1
            counters.wire_bytes += 100
            counters.dense_bytes += 800
    done.set()
    for thread in threads:
        thread.join()
    assert all(sums)


def test_every_metric_is_explained_in_the_docstring_and_on_the_page() -> None:
    names = set(StepMetrics().read(Statistics()))
    assert set(re.findall(r"``(gradcomp/\w+)``", Readers.compression_metrics.__doc__ or "")) == names
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `gradcomp/")]
    assert {name for row in rows for name in re.findall(r"`(gradcomp/\w+)`", row)} == names
