"""The step benchmark: its definitions by hand, and a short run of all of it."""

from __future__ import annotations

import json
import platform

import pytest
import report
import step
import step_results
import step_rows


def row(**changes):
    valid = {
        "kind": "gradcomp",
        "finish": "backward",
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
        "ddp": {"kind": "ddp", "step_seconds": 1.0, "loss": 5.0, "title": "DDP"},
        "4bit": row(title="4 bits", bits_equal=False),
    }
    step_results.judge(rows)
    assert "does not count" in step_results.bars(rows, "1gbit")[0]


def test_a_bar_is_a_ratio_of_two_rows_of_the_run():
    hook = {"kind": "ddp", "step_seconds": 0.2, "loss": 5.0, "title": "hook"}
    for seconds, ending in ((0.1, ": met"), (0.12, "NOT met")):
        rows = {step_rows.HOOK: hook, step_rows.POWERSGD: row(title="", step_seconds=seconds, invalid=[])}
        assert step_results.bars(rows, "1gbit")[0].endswith(ending)
    assert step_results.bars(rows, "unshaped") == []


def test_a_bar_on_means_leaves_the_first_blocks_out():
    task = (
        step_rows.Row(step_rows.AUTO, "measured", "none"),
        step_rows.Row(step_rows.UNTRAINED, "none", "none"),
    )
    blocks = {step_rows.AUTO: [[9.0] * 8, [9.0] * 8, [1.0, 1.08]], step_rows.UNTRAINED: [[1.0] * 2] * 3}
    zero = ("resent_bytes", "interface_bytes", "interface_total_bytes", "forward_seconds", "backward_seconds")
    sent = dict.fromkeys(zero, 0)
    measured = {key: {"block_seconds": each, **sent} for key, each in blocks.items()}
    found = [{"link": {"bytes_per_second": 1e8}, "rows": measured}]
    rows = {row.key: step_results.evaluate(row, found, []) for row in task}
    assert step_results.bars(rows, "unshaped") == [
        "bar: measured: 1.040 x the mean step of none, at most 1.05: met"
    ]


def test_the_machine_is_described_without_its_name():
    assert platform.node() not in json.dumps(report.machine()).split('"')


def test_rows_that_are_compared_with_are_always_measured():
    chosen = [row.key for row in step_rows.choose("dgc", ["cast:dtype=float16"])]
    assert chosen == ["ideal", "ddp", "dgc", "cast:dtype=float16"]
    assert {"4bit-feedback", "ddp-powersgd-4", "powersgd-4", "topk"} <= {
        row.key for row in step_rows.choose(None, [])
    }


def test_a_compression_that_does_not_exist_costs_its_own_row_only():
    known = step_rows.Row("4bit", "", "gradcomp", "quantize:bits=4")
    absent = step_rows.Row("new", "", "gradcomp", "newest:level=3")
    wrong = step_rows.Row("wrong", "", "gradcomp", "quantize:bots=4")
    runs, missing = step.split((known, absent, wrong))
    assert runs == (known,)
    assert "newest" in missing["new"]
    assert "bots" in missing["wrong"]


@pytest.mark.network
@pytest.mark.full
def test_a_short_run_finds_valid_rows(run_json):
    keys = ["identity", "4bit-feedback", "ddp-powersgd-4", "topk"]
    arguments = ["--link", "unshaped", "--rows", ",".join(keys), "--blocks", "3", "--steps", "3"]
    found = run_json("benchmarks/step.py", *arguments, "--warmup", "1")["rows"]
    assert list(found) == ["ideal", "ddp", *keys]
    assert found["identity"]["bits_equal"] is True
    assert found["4bit-feedback"]["bits_equal"] is True
    assert abs(found["identity"]["bytes_difference"]) < 0.02
    # Identity is DDP's own arithmetic, so its losses are too, and its bytes.
    assert found["identity"]["loss"] == pytest.approx(found["ddp"]["loss"], rel=1e-6)
    assert found["identity"]["wire_bytes"] == pytest.approx(found["ddp"]["wire_bytes"], rel=0.01)
    # All bytes of a bucket are in its rounds: two of a reduction, one of a gather, and one more where it has grown.
    assert [found[key]["rounds"] for key in ("identity", "4bit-feedback")] == [1, 2]
    assert found["topk"]["rounds"] in (1, 2)
    # Sizes of TopK follow the data: bucket_bytes are of the busiest rank in the last steps, wire_bytes a mean over
    # ranks and steps.
    for key, rel in (("identity", 0.001), ("4bit-feedback", 0.001), ("topk", 0.1)):
        assert sum(found[key]["bucket_bytes"]) == pytest.approx(found[key]["wire_bytes"], rel=rel)
    # The hook began to compress, in one bucket, and said what it sent.
    assert found["ddp-powersgd-4"]["buckets"] == 1
    assert found["ddp-powersgd-4"]["interface_bytes"] == pytest.approx(
        found["ddp-powersgd-4"]["wire_bytes"], rel=0.05
    )
