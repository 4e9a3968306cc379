"""The convergence benchmark: its rows and verdicts by hand, and short runs of all tasks."""

from __future__ import annotations

import json

import convergence
import convergence_rows
import numpy as np
import pytest
import torch
from convergence_results import as_it_must, evaluate, merge, verdict
from convergence_tasks import Job, share_work

from gradcomp.compress.registry import from_string

SETTINGS = {"ranks": 2, "link": None, "steps": 1, "source": None}


def runs(task="digits", settings=SETTINGS, **metrics):
    """Runs from the metrics by row (underscores for hyphens); a list per row, one entry per seed."""
    return [
        {"task": task, "row": row.replace("_", "-"), "seed": seed, "compression": "", "metric": metric, "digest": "d",
         "seconds": 1.0, "steps": 1, "step_seconds": 0.5, "bytes_per_step": 125e4, "ratio": 1.0, "settings": settings}
        for row, by_seed in metrics.items()
        for seed, metric in enumerate(by_seed)
    ]  # fmt: skip


def by_key(rows):
    return {(row["task"], row["row"]): row for row in rows}


def test_worse_means_lower_accuracy_and_higher_perplexity():
    digits = runs(none=[1.0, 1.0], topk=[0.995, 0.995], control=[0.5, 1.0])
    text = runs("lstm", none=[100.0, 100.0], topk=[98.0, 104.1], control=[float("nan"), 100.0])
    rows = by_key(evaluate(digits + text))
    assert rows["digits", "topk"]["mean_worse"] == pytest.approx(0.005)
    assert rows["digits", "none"]["modelled_1gbit_seconds"] == pytest.approx(0.5 + 0.01)
    assert verdict(rows["digits", "topk"]) == "passes"
    assert verdict(rows["digits", "control"]) == "fails"
    assert rows["lstm", "topk"]["mean_worse"] == pytest.approx(0.0105)
    assert verdict(rows["lstm", "topk"]) == "FAILS"
    assert verdict(rows["lstm", "control"]) == "fails", "a diverged run is as bad as can be"
    passing = by_key(evaluate(runs(none=[1.0], control=[1.0])))["digits", "control"]
    assert not as_it_must(passing)


def test_only_seeds_that_both_have_are_pairs():
    row = by_key(evaluate(runs(none=[1.0, 0.5], topk=[1.0, 0.5, 0.1])))["digits", "topk"]
    assert row["worse"] == [0.0, 0.0]


def test_a_row_without_a_bar_may_fail():
    row = by_key(evaluate(runs(none=[1.0], random_block=[0.5])))["digits", "random-block"]
    assert verdict(row) == "(fails)"
    assert as_it_must(row)
    assert row["note"] == "Vogels et al. 2019: fails"


def test_parts_of_a_table_are_merged():
    first = runs(none=[1.0, 1.0], topk=[0.5, 0.5])
    second = runs(none=[1.0], dgc=[0.25])
    rows = by_key(evaluate(merge([first, second])))
    assert list(rows) == [("digits", "none"), ("digits", "topk"), ("digits", "dgc")]
    assert rows["digits", "dgc"]["worse"] == [0.75]
    assert rows["digits", "topk"]["worse"] == [0.5, 0.5]


def test_runs_with_other_settings_are_not_merged():
    with pytest.raises(SystemExit, match="different settings"):
        merge([runs(none=[1.0]), runs(settings={**SETTINGS, "steps": 2}, topk=[1.0])])


def test_ranks_with_different_parameters_are_an_error():
    ranks = [{"source": None, "runs": runs(none=[1.0])}, {"source": None, "runs": runs(none=[1.0])}]
    ranks[1]["runs"][0]["digest"] = "other"
    with pytest.raises(SystemExit, match="different parameters"):
        convergence.collect("digits", convergence_rows.ARMS[0], ranks, {})


def test_the_reference_is_the_first_row_of_every_choice():
    chosen = convergence_rows.choose("topk,4bit", ["cast"], "digits")
    assert [arm.key for arm in chosen] == ["none", "topk", "4bit", "cast"]
    for task in convergence_rows.TASKS:
        keys = [arm.key for arm in convergence_rows.choose(None, [], task)]
        assert keys[0] == "none"
        assert {"4bit", "topk", "dgc", "powersgd-2", "powersgd-4", "scaled-sign", "random-k", "control"} <= {
            *keys
        }
    with pytest.raises(SystemExit, match="unknown newest"):
        convergence_rows.choose("newest", [], "digits")


def test_a_task_without_its_data_is_refused(capsys):
    with pytest.raises(SystemExit):
        convergence.parse(["--task", "resnet"])
    assert "--cifar" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("compression", "momentum", "clip"),
    [
        ("topk", 0.9, 0.25),
        ("momentum_correction[topk]", 0.0, 0.25),
        ("local_clip[momentum_correction[topk]]", 0.0, None),
    ],
)
def test_momentum_and_clipping_happen_once(compression, momentum, clip):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=4.0, momentum=0.9)
    job = Job(None, optimizer, iter(()), None, 1, 0.25, None)
    share_work(job, from_string(compression), rate=0.5)
    assert optimizer.param_groups[0]["momentum"] == momentum
    assert optimizer.param_groups[0]["lr"] == 2.0
    assert job.clip == clip


@pytest.mark.full
def test_short_runs_of_all_tasks_in_two_parts(run_script, tmp_path):
    text, images, path = tmp_path / "text.txt", tmp_path / "images.npz", tmp_path / "convergence.json"
    text.write_text("to be or not to be that is the question " * 100)
    draws = np.random.default_rng(0)
    parts = {
        f"{kind}_{part}": draws.integers(0, 256 if kind == "x" else 10, shape).astype(np.uint8)
        for part, count in (("train", 256), ("test", 40))
        for kind, shape in (("x", (count, 32, 32, 3)), ("y", (count,)))
    }
    np.savez(images, **parts)
    arguments = ["--seeds=1", "--digits-epochs=2", "--lstm-steps=4", "--resnet-epochs=1", f"--json={path}"]
    arguments += [f"--data={text}", f"--cifar={images}"]
    script = "benchmarks/convergence.py"
    run_script(script, *arguments, "--rows=4bit", "--task=digits")
    done = run_script(script, *arguments, "--resume", "--rows=4bit", "--compression=newest", check=False)
    # What does not exist costs its own row only; what was there already is not run again.
    assert done.returncode == 1
    assert "unknown compression 'newest'" in done.stdout
    assert "digits, 4 bits" not in done.stderr
    found = by_key(json.loads(path.read_text())["rows"])
    assert list(found) == [(task, row) for task in convergence_rows.TASKS for row in ("none", "4bit")]
    for task in convergence_rows.TASKS:
        assert found[task, "none"]["ratio"] == pytest.approx(1.0, abs=0.01)
        assert found[task, "4bit"]["ratio"] > 5
