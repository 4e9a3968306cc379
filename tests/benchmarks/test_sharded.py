"""The benchmarks of sharded training: short runs of them."""

from __future__ import annotations

import pytest
from sharded_convergence import summary


@pytest.mark.network
@pytest.mark.full
def test_bytes_of_the_interface_are_those_of_the_formula(run_json):
    few = ["--link=unshaped", "--blocks=1", "--steps=2"]
    rows = run_json("benchmarks/sharded.py", "--rows=null,w8g8,w8g8-codes", *few)["rows"]
    for name in ("w8g8", "w8g8-codes"):
        row = rows[name]
        assert row["interface"] == pytest.approx(row["formula"] + row["beside"], rel=0.005)
        assert row["same"]
    assert rows["w8g8-codes"]["formula"] < 0.8 * rows["w8g8"]["formula"]


@pytest.mark.network
@pytest.mark.full
def test_two_levels_halve_the_bytes_between_two_hosts_of_two_ranks(run_json):
    few = ["--link=unshaped", "--ranks-per-host=2", "--blocks=1", "--steps=2", "--warmup=4"]
    rows = run_json("benchmarks/sharded.py", "--rows=null,w8g8-flat,w8g8,w8g8-levels", *few)["rows"]
    for name in ("w8g8-flat", "w8g8", "w8g8-levels"):
        row = rows[name]
        assert row["interface"] == pytest.approx(row["formula"] + row["beside"], rel=0.005)
        assert row["same"]
    flat, weights, both = (rows[name]["formula"] for name in ("w8g8-flat", "w8g8", "w8g8-levels"))
    assert both == flat / 2 < weights < flat


@pytest.mark.network
@pytest.mark.full
def test_hosts_of_two_ranks_send_each_other_what_the_formula_says(run_json):
    few = ["--hybrid", "--link=unshaped", "--blocks=1", "--steps=2"]
    rows = run_json("benchmarks/sharded.py", "--rows=hsdp,hybrid-copy,hybrid-4bit", *few)["rows"]
    for name in ("hsdp", "hybrid-4bit"):
        assert rows[name]["interface"] == pytest.approx(rows[name]["host_formula"], rel=0.02)
        assert rows[name]["same"]
    assert rows["hybrid-copy"]["host_formula"] == 0
    assert rows["hybrid-4bit"]["host_formula"] < 0.13 * rows["hsdp"]["host_formula"]
    assert "exposed" in rows["hybrid-4bit"]


@pytest.mark.network
@pytest.mark.full
def test_bytes_of_zero_are_those_of_the_formula(run_json):
    few = ["--link=unshaped", "--blocks=1", "--steps=2"]
    row = run_json("benchmarks/zero.py", "--rows=local,zero-w4g4", *few)["rows"]["zero-w4g4"]
    assert row["interface"] == pytest.approx(row["formula"], rel=0.005)
    assert row["same"]


@pytest.mark.network
@pytest.mark.full
def test_a_row_is_trained_and_evaluated_and_kept(run_script, tmp_path):
    file = f"--json={tmp_path}/runs.json"
    arguments = ["benchmarks/sharded_convergence.py", "--rows=plain-g16,w4g4", "--seeds=1", "--steps=3", file]
    assert "| w4g4 " in run_script(*arguments).stdout
    again = run_script(*arguments, "--resume").stdout
    assert "| w4g4 " in again
    assert "seed 0" not in again, "nothing is trained twice"


@pytest.mark.network
@pytest.mark.full
def test_a_curve_has_time_and_loss(run_json):
    few = ["--seeds=1", "--steps=5", "--curve-every=2", "--link=1gbit"]
    (run,) = run_json("benchmarks/sharded_convergence.py", "--rows=w4g4", *few)["runs"]
    (first, early, before), (second, late, after) = run["curve"]
    assert (first, second) == (2, 4)
    assert 0 < early < late < run["seconds"]
    assert before != after


def test_rows_are_compared_seed_by_seed():
    def runs(row, **losses):
        return [
            {"row": row, "seed": int(s[1:]), "loss": x, "exact_loss": x, "machine": "a"}
            for s, x in losses.items()
        ]

    base, row, single = summary(
        runs("plain-g16", s1=4.0, s0=2.0) + runs("w8g8", s0=2.02, s1=4.12, s2=1.0) + runs("w4g4", s1=4.4)
    )
    assert base[:3] == ["plain-g16", "2.0000, 4.0000", "+0.00 ± 0.00"]
    assert row[:3] == ["w8g8", "2.0200, 4.1200, 1.0000", "+2.00 ± 1.00"]
    assert single[2] == "+10.00"
    assert summary(runs("w8g8", s0=2.0))[0][2] is None
    assert summary(runs("w8g8", s0=2.0) + runs("w4g4", s0=2.2), "w8g8")[1][2] == "+10.00"


@pytest.mark.full
def test_learned_levels_lose_less_of_weights(run_json):
    runs = run_json("benchmarks/learned_levels.py", "--steps=4", "--every=1")["runs"]
    after = [run["squares"] for run in runs if run["kind"] == "weights" and run["step"] == 3]
    assert len(after) == 5 * 20
    assert all(learned < even for _, even, learned, _ in after)
