"""The convergence benchmark: its verdicts by hand, and a short run of all of it."""

from __future__ import annotations

import json

import convergence
import pytest

PLAN = convergence.Plan(("digits", "lstm"), convergence.ARMS, 2, 1, 1, None)


def found(**metrics):
    """What two ranks report, from the metrics by task; a list per arm, one entry per seed."""
    runs = [
        {"task": task, "seed": seed, "arm": arm.title, "metric": by_arm[a][seed], "digest": "d", "seconds": 1.0,
         "steps": 1, "bytes_per_step": 1.0, "ratio": 1.0}
        for task, by_arm in metrics.items()
        for a, arm in enumerate(PLAN.arms)
        for seed in range(2)
    ]  # fmt: skip
    return [{"runs": runs}, {"runs": runs}]


def test_worse_means_lower_accuracy_and_higher_perplexity():
    rows = convergence.evaluate(
        PLAN,
        found(
            digits=[[1.0, 1.0], [0.995, 0.995], [1.0, 1.0], [0.5, 1.0]],
            lstm=[[100.0, 100.0], [100.5, 100.5], [98.0, 104.1], [float("nan"), 100.0]],
        ),
    )
    by_row = {(row["task"], row["arm"]): row for row in rows}
    stochastic, nearest, control = (arm.title for arm in PLAN.arms[1:])
    assert by_row["digits", stochastic]["mean_worse"] == pytest.approx(0.005)
    assert by_row["digits", stochastic]["passes"]
    assert not by_row["digits", control]["passes"]
    assert by_row["lstm", stochastic]["passes"]
    assert by_row["lstm", nearest]["mean_worse"] == pytest.approx(0.0105)
    assert not by_row["lstm", nearest]["passes"]
    assert not by_row["lstm", control]["passes"], "a diverged run is as bad as can be"


def test_a_control_that_passes_is_said():
    rows = convergence.evaluate(PLAN, found(digits=[[1.0, 1.0]] * 4, lstm=[[9.0, 9.0]] * 4))
    assert convergence.show(rows).count("NOT as it must") == 2


def test_ranks_with_different_parameters_are_an_error():
    ranks = found(digits=[[1.0, 1.0]] * 4, lstm=[[9.0, 9.0]] * 4)
    ranks[1] = {"runs": [{**run, "digest": "other"} for run in ranks[1]["runs"]]}
    with pytest.raises(SystemExit, match="different parameters"):
        convergence.evaluate(PLAN, ranks)


@pytest.mark.slow
def test_a_short_run(run_script, tmp_path):
    text, path = tmp_path / "text.txt", tmp_path / "convergence.json"
    text.write_text("to be or not to be that is the question " * 100)
    arguments = ["--seeds=1", "--digits-epochs=2", "--lstm-steps=4", f"--data={text}", f"--json={path}"]
    run_script("benchmarks/convergence.py", *arguments)
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == 8
    assert rows[1]["ratio"] > 6
