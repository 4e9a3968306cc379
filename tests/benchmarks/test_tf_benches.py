"""The TensorFlow benchmarks' tables; their ranks need TensorFlow, these do not."""

from __future__ import annotations

import pytest
import tf_convergence
import tf_step


def found(factor: float) -> dict:
    """One rank's times: TensorFlow's are 1.2 times PyTorch's, in the exchange alone 1.4 at 4 bits."""
    rows = []
    for framework, slower in (("PyTorch", 1.0), ("TensorFlow", 1.2)):
        for what, name, seconds in (
            ("step", "none", 0.4),
            ("step", "4 bits", 0.1),
            ("exchange", "none", 0.3),
            ("exchange", "4 bits", 0.05 * (1.4 / 1.2 if slower > 1 else 1)),
        ):
            row = {"framework": framework, "what": what, "compression": name, "wire_bytes": 5e6}
            rows.append({**row, "seconds": seconds * slower * factor})
    return {"parameters": 10, "rows": rows}


def test_steps_are_the_slowest_ranks_beside_the_other_framework_and_uncompressed():
    rows = tf_step.evaluate([found(1.0), found(1.5)])
    by_key = {(row["framework"], row["what"], row["compression"]): row for row in rows}
    tensorflow = by_key["TensorFlow", "step", "4 bits"]
    assert tensorflow["seconds"] == pytest.approx(0.18)
    assert tensorflow["x_torch"] == pytest.approx(1.2)
    assert tensorflow["x_none"] == pytest.approx(0.25)
    assert tf_step.verdict(rows) == [
        "exchange, none: 1.20 x PyTorch's, bar 1.3: met",
        "exchange, 4 bits: 1.40 x PyTorch's, bar 1.3: NOT met",
    ]


def run(row: str, seed: int, accuracy: float, digest: str = "a") -> dict:
    return {"row": row, "seed": seed, "accuracy": accuracy, "bytes_per_step": 100.0, "digest": digest}


def test_rows_are_compared_seed_by_seed_and_fail_where_ranks_differ():
    own = [run("none", 0, 0.9), run("none", 1, 0.8), run("4bit", 0, 0.9), run("4bit", 1, 0.72)]
    fine = [*own, run("topk", 0, 0.9), run("topk", 1, 0.8)]
    apart = [*own, run("topk", 0, 0.9), run("topk", 1, 0.8, "b")]
    none, bits, topk = tf_convergence.evaluate([fine, apart])
    assert bits["mean_worse"] == pytest.approx(0.05)
    assert not tf_convergence.passed(bits)
    assert topk["mean_worse"] == 0
    assert not topk["equal"]
    assert not tf_convergence.passed(topk)
    assert none["equal"]
