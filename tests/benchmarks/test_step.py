"""The step benchmark: its definitions by hand, and a short run of all of it."""

from __future__ import annotations

import json

import pytest
import step
import step_results
from roofline import roofline


def test_roofline_of_a_wire_that_starts_late_and_never_waits():
    # Ready at 1 and 2 s, 3 s and 1 s of wire: 1 + 3 + 1, then 0.5 s after backward.
    assert roofline([(300, ["a"]), (100, ["b"])], {"a": 1.0, "b": 2.0}, 0.5, 100.0) == pytest.approx(5.5)


def test_roofline_when_the_last_bucket_is_late():
    assert roofline(
        [(100, ["a"]), (100, ["b", "c"])], {"a": 1.0, "b": 2.0, "c": 9.0}, 0.5, 100.0
    ) == pytest.approx(10.5)


def test_roofline_is_never_below_the_step_without_exchange():
    assert roofline([(1, ["a"])], {"a": 1.0, "b": 7.0}, 0.5, 1e9) == 7.5


def row(**changes):
    valid = {
        "kind": "gradcomp",
        "step_seconds": 0.1,
        "loss": 5.0,
        "bytes_difference": 0.01,
        "bits_equal": True,
    }
    return {**valid, **changes}


@pytest.mark.parametrize(
    ("changes", "broken"),
    [
        ({}, []),
        ({"bits_equal": False}, ["bits"]),
        ({"bits_equal": None}, ["bits not checked"]),
        ({"bytes_difference": -0.021}, ["bytes"]),
        ({"bytes_difference": float("nan")}, ["bytes"]),
        ({"loss": 5.06}, ["loss"]),
        ({"loss": float("nan")}, ["loss"]),
    ],
)
def test_a_row_that_breaks_a_condition_is_marked(changes, broken):
    rows = {"ddp": {"kind": "ddp", "step_seconds": 0.4, "loss": 5.0}, "4bit": row(**changes)}
    step_results.judge(rows)
    assert rows["4bit"]["invalid"] == broken
    assert rows["4bit"]["to_ddp"] == pytest.approx(0.25)


def test_an_invalid_row_meets_no_bar():
    rows = {
        "ddp": {"kind": "ddp", "step_seconds": 1.0, "loss": 5.0},
        "4bit": row(title="4 bits", bits_equal=False),
    }
    step_results.judge(rows)
    assert "does not count" in step_results.bars(rows, "1gbit")[0]


def test_without_root_it_says_so(run_script, monkeypatch):
    import hosts

    monkeypatch.setattr(hosts.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(step.sys, "argv", ["step.py"])
    assert step.main() == 2


@pytest.mark.network
@pytest.mark.slow
def test_a_short_run_finds_valid_rows(run_script, tmp_path):
    path = tmp_path / "step.json"
    arguments = ["--link", "unshaped", "--rows", "identity,4bit-feedback", "--blocks", "2", "--steps", "4"]
    done = run_script("benchmarks/step.py", *arguments, "--warmup", "1", "--json", str(path))
    found = json.loads(path.read_text())["rows"]
    assert list(found) == ["ideal", "ddp", "identity", "4bit-feedback"]
    assert found["identity"]["bits_equal"] is True, done.stdout
    assert found["4bit-feedback"]["bits_equal"] is True, done.stdout
    assert abs(found["identity"]["bytes_difference"]) < 0.02, done.stdout
    # Identity is DDP's own arithmetic, so its losses are too, and its bytes.
    assert found["identity"]["loss"] == pytest.approx(found["ddp"]["loss"], rel=1e-6)
    assert found["identity"]["wire_bytes"] == pytest.approx(found["ddp"]["wire_bytes"], rel=0.01)
