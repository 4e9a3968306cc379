"""The benchmark of auto: what its figures mean."""

from __future__ import annotations

import auto as bench
import pytest


def rank(slower: float = 1.0, **changes):
    steps = {"none": 0.4, "bf16": 0.2, "quantize:bits=8": 0.15, "quantize:bits=4": 0.1, "auto": 0.12}
    return {
        "chosen": 3,
        "decisions": 1,
        "reason": "because",
        "predicted_seconds": [0.5, 0.25, 0.2, 0.09],
        "measured_seconds": {key: slower * seconds for key, seconds in steps.items()},
        **changes,
    }


def test_the_slowest_rank_counts():
    found = bench.evaluate([rank(), rank(1.5)])
    assert found["chosen"] == "quantize:bits=4"
    assert found["rows"]["none"]["measured_seconds"] == pytest.approx(0.6)
    assert found["rows"]["none"]["error"] == pytest.approx(0.5 / 0.6 - 1)
    assert found["rows"]["none"]["to_best"] == pytest.approx(4.0)


def test_autos_own_model_is_compared_with_what_it_predicted():
    found = bench.evaluate([rank()])["rows"]["auto"]
    assert found["predicted_seconds"] == 0.09
    assert found["error"] == pytest.approx(0.09 / 0.12 - 1)
    assert found["to_best"] == pytest.approx(1.2)


def test_links_that_are_none_are_refused(run_script):
    done = run_script("benchmarks/auto.py", "--links", "1gbit,2gbit", check=False)
    assert done.returncode == 2
    assert "unknown 2gbit" in done.stderr
