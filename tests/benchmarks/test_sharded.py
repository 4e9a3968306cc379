"""The benchmarks of sharded training: short runs of them."""

from __future__ import annotations

import json

import pytest
from sharded_convergence import summary


@pytest.mark.network
@pytest.mark.full
def test_bytes_of_the_interface_are_those_of_the_formula(run_script, tmp_path):
    path = tmp_path / "sharded.json"
    arguments = [
        "--rows=null,w8g8,w8g8-codes",
        "--link=unshaped",
        "--blocks=1",
        "--steps=2",
        f"--json={path}",
    ]
    run_script("benchmarks/sharded.py", *arguments)
    rows = json.loads(path.read_text())["rows"]
    for name in ("w8g8", "w8g8-codes"):
        row = rows[name]
        assert row["interface"] == pytest.approx(row["formula"] + row["beside"], rel=0.005)
        assert row["same"]
    assert rows["w8g8-codes"]["formula"] < 0.8 * rows["w8g8"]["formula"]


@pytest.mark.network
@pytest.mark.full
def test_a_row_is_trained_and_evaluated(run_script):
    done = run_script("benchmarks/sharded_convergence.py", "--rows=plain-g16,w4g4", "--seeds=1", "--steps=3")
    assert "| w4g4 " in done.stdout


def test_rows_are_compared_seed_by_seed():
    losses = {"plain-g16": [2.0, 4.0], "w8g8": [2.02, 4.12]}
    base, row = summary(losses, losses)
    assert base[2] == "+0.00 ± 0.00"
    assert row[2] == "+2.00 ± 1.00"
    assert summary({"w8g8": [2.0]}, losses)[0][2] is None
