"""The benchmark of local steps: what its tables are made of, and a short run."""

from __future__ import annotations

import json

import pytest
from local_steps import losses, payload_ratio, steps_to, wall_table
from local_steps_rank import ROWS, Size, Training, row_of


def run_of(row: str, seed: int, curve: list[list[float]], bytes_per_step: float = 0.0) -> dict:
    return {
        "row": row, "seed": seed, "loss": curve[-1][1], "curve": curve, "parameters": 1000,
        "bytes_per_step": bytes_per_step, "tokens": 512,
    }  # fmt: skip


def cells(table: str, row: str) -> list[str]:
    """Those of a row behind its name."""
    line = next(line for line in table.splitlines() if line.startswith(f"| {row} "))
    return [cell.strip() for cell in line.split("|")[2:-1]]


def test_the_step_that_reaches_a_loss_lies_between_two_points():
    curve = [[10, 4.0], [20, 3.0], [30, 3.2]]
    assert steps_to(curve, 4.5) == 10
    assert steps_to(curve, 3.5) == pytest.approx(15)
    assert steps_to(curve, 3.0) == 20
    assert steps_to(curve, 2.9) is None


def test_a_name_may_set_the_learning_rate():
    assert row_of("diloco-15") is ROWS["diloco-15"]
    assert row_of("diloco-15@5e-4").rate == 5e-4
    assert row_of("diloco-15@5e-4").every == 15
    with pytest.raises(KeyError):
        row_of("diloco-16")


def test_the_rate_rises_then_falls_as_a_cosine():
    task = Training("alone", Size(64, 8), 12, 2, 0, None, 1)
    assert [task.rate_factor(step) for step in (0, 1, 2, 7)] == pytest.approx([0.5, 1.0, 1.0, 0.5])


def test_rows_are_compared_seed_by_seed_and_payloads_counted():
    runs = [
        run_of("ddp-fp16", 0, [[60, 4.0]]),
        run_of("ddp-fp16", 1, [[60, 2.0]]),
        run_of("sparseloco-15", 0, [[60, 4.4]], bytes_per_step=8.0),
        run_of("sparseloco-15", 1, [[60, 2.1]], bytes_per_step=8.0),
    ]
    assert cells(losses(runs), "sparseloco-15")[:3] == ["4.4000, 2.1000", "+7.50 ± 2.50", "100"]
    assert payload_ratio(runs[2]) == pytest.approx(4 * 1000 / (8.0 * 15 / 3))
    assert payload_ratio(runs[0]) is None


def test_wall_time_is_steps_times_their_seconds():
    runs = [run_of("ddp-fp16", 0, [[10, 5.0], [20, 4.0]]), run_of("diloco-15", 0, [[10, 4.5], [20, 3.5]])]
    times = {"link": {"name": "slow"}, "seconds": {"ddp-fp16": [2.0, 2.0, 2.0], "diloco-15": [0.5, 0.5, 0.9]}}
    assert cells(wall_table(runs, [times], slack=0.0), "ddp-fp16") == ["20", "40", "1.000"]
    assert cells(wall_table(runs, [times], slack=0.0), "diloco-15") == ["15", "8", "0.188"]
    late = [runs[0], run_of("diloco-15", 0, [[20, 4.5]])]
    assert cells(wall_table(late, [times], slack=0.0), "diloco-15")[0] == "0 of 1 reach it"


@pytest.mark.network
@pytest.mark.full
def test_rows_are_trained_timed_and_shown_together(run_script, tmp_path):
    script, kept, times = "benchmarks/local_steps.py", tmp_path / "losses.json", tmp_path / "times.json"
    rows = "--rows=ddp-fp16,sparseloco-15"
    trained = [
        "--train",
        rows,
        "--steps=15",
        "--warmup=2",
        "--eval-every=15",
        "--width=64",
        "--seeds=1",
        f"--json={kept}",
        "--resume",
    ]
    assert "| sparseloco-15 " in run_script(script, *trained).stdout
    assert "seed 0" not in run_script(script, *trained).stdout, "nothing is trained twice"
    found = {run["row"]: run for run in json.loads(kept.read_text())["runs"]}
    assert payload_ratio(found["sparseloco-15"]) > 97
    run_script(
        script, "--times=unshaped", rows, "--width=64", "--blocks=1", "--round-steps=1", f"--json={times}"
    )
    shown = run_script(script, "--show", str(kept), str(times)).stdout
    assert "unshaped: s" in shown
