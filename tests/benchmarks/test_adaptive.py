"""The controllers' benchmark: its rows parse, its verdicts follow from runs."""

from __future__ import annotations

import pytest
from adaptive import evaluate, reached
from adaptive_rows import DEFAULT, FAMILIES, TASKS, arms

from gradcomp.compress import from_string
from gradcomp.control import controller_from_string

EVERYTHING = [
    *DEFAULT, "lgreco-window", "lgreco-norm", "lgreco-adam", "lgreco-8", "lgreco-narrow", "hybrid-window",
    "uniform-bf16", "lgreco-bf16", "lgreco-time", "lgreco-position", "kmeans-plain",
    "adaqs", "gravac-energy", "gravac-released",
]  # fmt: skip
FAMILY_KEYS = [family.key for family in FAMILIES]


@pytest.mark.parametrize("task", TASKS)
def test_every_row_is_one_of_its_own_and_can_be_run(task):
    rows = arms(task, FAMILY_KEYS, EVERYTHING)
    keys = [arm.key for arm in rows]
    assert len(set(keys)) == len(keys)
    assert len(rows) == 1 + 3 * (len(EVERYTHING) - 2) + 28
    for arm in rows:
        from_string(arm.compression)
        if arm.controller:
            controller_from_string(arm.controller)


def test_zeros_are_sent_by_topk_alone():
    rows = arms("gpt", FAMILY_KEYS, ["uniform-zeros"])
    assert [from_string(arm.compression).zeros for arm in rows if arm.key == "density-uniform-zeros"] == [
        True
    ]
    assert sum(arm.key.endswith("-zeros") for arm in rows) == 1


@pytest.mark.parametrize("task", TASKS)
def test_a_sweep_compares_each_level_with_itself_as_reference(task):
    rows = arms(task, ["rank"], ["sweep"])[1:]
    assert [arm.controller != "" for arm in rows] == [False, True] * 4
    for uniform, lgreco in zip(rows[::2], rows[1::2], strict=True):
        assert uniform.compression == lgreco.compression
        assert uniform.key == f"{lgreco.family.key}-uniform"
    runs = [
        {**run("rank@2-uniform", 0, 0.6, 10.0), "task": task},
        {**run("rank@2-lgreco", 0, 0.6, 4.0), "task": task},
    ]
    if task == "resnet":
        assert [row["fewer"] for row in evaluate(task, runs)] == [1.0, 2.5]


def test_a_loss_is_reached_where_its_mean_over_a_tenth_is_no_more_than_the_bases_after_80_percent():
    base = {"loss_over_time": [float(20 - part) for part in range(20)], "bytes_over_time": [8.0] * 20}
    slower = {
        **base,
        "loss_over_time": [loss + 2 for loss in base["loss_over_time"]],
        "bytes_over_time": [2.0] * 20,
    }
    assert reached(base, base) == (0.8, 1.0)
    assert reached(base, slower) == (0.9, 16 * 8 / (18 * 2))
    assert reached(base, {**slower, "loss_over_time": [9.0] * 20}) is None
    assert reached({}, slower) is None


def run(row: str, seed: int, metric: float, sent: float, **more):
    return {"task": "resnet", "row": row, "seed": seed, "metric": metric, "run_bytes_per_step": sent, "ratio": 10.0,
            "bytes_per_step": sent / 2,
            "overhead": 0.005, "adding": 0.01, "plans": [[0, []], [9, []]], **more}  # fmt: skip


def test_a_row_is_compared_with_its_familys_uniform_level_seed_by_seed():
    runs = [
        run("none", 0, 0.62, 100.0),
        *(run("density-uniform", seed, 0.60, 10.0) for seed in (0, 1)),
        run("density-lgreco", 0, 0.61, 5.0),
        run("density-lgreco", 1, 0.57, 4.0),
        run("density-kmeans", 2, 0.57, 4.0),
        run("gravac-topk-0.7", 0, 0.31, 20.0, factors={"1": 10, "10": 30}, fewer_floats=3.25),
    ]
    rows = {row["row"]: row for row in evaluate("resnet", runs)}
    # Kmeans has no pair.
    assert rows.keys() == {"none", "density-uniform", "density-lgreco", "gravac-topk-0.7"}
    lgreco = rows["density-lgreco"]
    assert lgreco["seeds"] == [0, 1]
    assert lgreco["fewer"] == pytest.approx((2 + 2.5) / 2)
    assert lgreco["mean_worse"] == pytest.approx((-1 / 60 + 3 / 60) / 2)
    assert lgreco["target"] == 2.0
    assert rows["gravac-topk-0.7"]["fewer"] == 5.0
    assert rows["gravac-topk-0.7"]["mean_worse"] == pytest.approx(0.5)
