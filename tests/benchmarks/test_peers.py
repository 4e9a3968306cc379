"""The comparison with other libraries: its rows and verdicts by hand, and a short run in which a library fails."""

from __future__ import annotations

import dataclasses
import json
import signal

import peers
import peers_rows
import pytest
from peers import Failure
from peers_rows import EPFML, GRACE, HOROVOD, ROWS, PeerRow, is_reference

IDEAL, DDP = (PeerRow(key, key, key) for key in ("none", "ddp"))
FIRST, SECOND = (PeerRow(key, key, GRACE) for key in ("first", "second"))


def found(*digests, **seconds):
    """What ranks with these parameters found, rows by their seconds a step."""
    return [
        {
            "rows": {
                key: {
                    "block_seconds": [[each, each]],
                    "interface_bytes": 1e6,
                    "losses": [9.0, 9.0, 9.0, 5.0],
                    "digest": digest,
                }
                for key, each in seconds.items()
            }
        }
        for digest in digests
    ]


def test_every_row_of_a_library_stands_beside_gradcomp_s_form_of_its_method():
    ours = {row.method for row in ROWS if row.kind == "gradcomp"}
    assert {row.method for row in ROWS} == ours
    assert {row.kind for row in ROWS} == {"none", "ddp", "gradcomp", GRACE, EPFML, HOROVOD}
    assert len({row.key for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize("installed", [None, "found"])
def test_rows_of_what_is_not_there_are_listed_with_the_reason(monkeypatch, installed):
    monkeypatch.setattr(peers_rows.importlib.util, "find_spec", lambda name: installed)
    launches, missing = peers_rows.split({GRACE: "/somewhere"})
    run = {row.key for rows in launches.values() for row in rows}
    assert run | set(missing) == {row.key for row in ROWS}
    assert run.isdisjoint(missing)
    assert missing["epfml"] == "not given: --powersgd"
    assert "grace-topk" in run
    if installed is None:
        # Rows that Horovod's are compared with are not run for nothing.
        assert list(launches) == ["main"]
        assert {missing[key] for key in ("horovod", "horovod-fp16", "horovod-ddp")} == {
            peers_rows.MISSING_HOROVOD
        }
    else:
        assert {row.kind for row in launches[HOROVOD]} == {"none", "ddp", HOROVOD}


def test_a_row_that_fails_leaves_the_others_their_launch():
    failure = Failure("first", "RuntimeError", "no")
    tried = []

    def run(rows):
        tried.append([row.key for row in rows])
        return failure if FIRST in rows else found("a", "a", **{row.key: 1.0 for row in rows})

    measured, failures = peers.measure_launch((IDEAL, DDP, FIRST, SECOND), run)
    assert tried == [["none", "ddp", "first", "second"], ["none", "ddp", "second"]]
    assert failures == {"first": failure}
    assert list(measured[0]["rows"]) == ["none", "ddp", "second"]


@pytest.mark.parametrize("guilty", ["ddp", ""])
def test_a_launch_without_its_references_has_no_figures(guilty):
    failure = Failure(guilty, "RuntimeError", "no")
    measured, failures = peers.measure_launch((IDEAL, DDP, FIRST), lambda rows: failure)
    assert measured is None
    assert failures == dict.fromkeys(("none", "ddp", "first"), failure)


def test_references_alone_are_not_run_again():
    tried = []

    def run(rows):
        tried.append(rows)
        return Failure("first", "ImportError", "no")

    measured, failures = peers.measure_launch((IDEAL, DDP, FIRST), run)
    assert (measured, len(tried)) == (None, 1)
    assert {key: each.type for key, each in failures.items()} == {
        "first": "ImportError",
        "none": "NotRun",
        "ddp": "NotRun",
    }


def test_figures_are_of_the_slowest_rank_and_of_the_launch_s_own_references():
    rows = (IDEAL, DDP, FIRST, SECOND)
    ranks = found("a", "b", none=0.1, ddp=0.4, first=0.3)
    ranks[1]["rows"]["first"]["block_seconds"] = [[0.35, 0.35]]
    results = peers.evaluate(rows, ranks)
    assert "second" not in results
    assert results["first"]["to_ddp"] == pytest.approx(0.875)
    assert results["first"]["exposed_seconds"] == pytest.approx(0.25)
    assert results["first"]["loss"] == 5.0
    assert results["first"]["equal"] is False
    assert results["none"]["equal"] is None  # nothing makes ranks equal that exchange nothing
    assert peers.evaluate(rows, found("a", "a", none=0.1, ddp=0.4))["ddp"]["equal"] is True


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({}, 0),
        ({"epfml": {"why": "not given: --powersgd"}}, 0),
        ({"epfml": {"equal": False}}, 0),
        ({"epfml": {"why": "failed", "failure": {}}}, 0),
        ({"powersgd": {"equal": False}}, 1),
        ({"powersgd": {"why": "failed", "failure": {}}}, 1),
    ],
)
def test_the_status_is_about_gradcomp_s_own_rows(changes, status):
    assert peers.verdict({row.key: {"equal": True} for row in ROWS} | changes) == status


def test_the_table_has_every_row_and_says_below_it_how_one_failed():
    failure = dataclasses.asdict(Failure("epfml", "ValueError", "no such rank"))
    results = {row.key: {"why": "not given"} for row in ROWS}
    results["epfml"] = {"why": "failed: ValueError", "failure": failure}
    lines = peers.show(results).splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:-1]] == [row.title for row in ROWS]
    assert lines[-1] == "epfml/powersgd failed: ValueError: no such rank"
    assert sum("not given" in line for line in lines) == len(ROWS) - 1


def test_the_first_failure_counts_and_a_rank_that_died_is_one(tmp_path):
    (tmp_path / "1.row").write_text("epfml")
    died = peers.read_failure(tmp_path, [-signal.SIGKILL, -signal.SIGSEGV])
    assert died == Failure("epfml", "ProcessDied", "rank 1 died by SIGSEGV")
    for rank, (kind, time) in enumerate([("ConnectionError", 2.0), ("ValueError", 1.0)]):
        written = {"row": "epfml", "type": kind, "message": "", "time": time}
        (tmp_path / f"{rank}.{peers.FAILURE}").write_text(json.dumps(written))
    assert peers.read_failure(tmp_path, [1, 1]).type == "ValueError"


@pytest.mark.parametrize("option", ["grace", "powersgd"])
def test_a_path_without_the_library_is_refused_before_anything_runs(run_script, tmp_path, option):
    done = run_script("benchmarks/peers.py", f"--{option}", str(tmp_path), check=False)
    assert done.returncode == 2
    assert f"--{option}: there is no package" in done.stderr


def test_a_task_survives_its_way_to_the_ranks():
    task = peers.PeersTask(ROWS[:3], 1, 2, 1, 0, None, {}, True, None, paths={GRACE: "/somewhere"})
    assert peers.PeersTask.from_json(json.dumps(dataclasses.asdict(task))) == task
    assert [is_reference(row) for row in task.rows] == [True, True, False]


@pytest.mark.network
@pytest.mark.full
def test_a_library_that_fails_is_a_row_that_says_how(run_json, tmp_path):
    package = tmp_path / "powersgd/__init__.py"
    package.parent.mkdir()
    package.write_text("raise ArithmeticError('not today')\n")
    arguments = ["--link", "unshaped", "--blocks", "1", "--steps", "3", "--warmup", "1"]
    rows = run_json("benchmarks/peers.py", *arguments, f"--powersgd={tmp_path}")["rows"]
    assert rows["epfml"]["failure"] == {"row": "epfml", "type": "ArithmeticError", "message": "not today"}
    assert rows["grace-topk"]["why"] == "not given: --grace"
    assert rows["ddp-bf16"]["failure"]["type"] == "TypeError"  # the hook asks for CUDA
    for row in ROWS:
        if row.launch == "main" and row.kind in ("ddp", "gradcomp") and row.key != "ddp-bf16":
            assert rows[row.key]["equal"] is True
            assert rows[row.key]["to_ddp"] > 0
    # Identity is DDP's own arithmetic, so its losses are too, and its bytes.
    assert rows["none"]["loss"] == pytest.approx(rows["ddp"]["loss"], rel=1e-6)
    assert rows["none"]["interface_bytes"] == pytest.approx(rows["ddp"]["interface_bytes"], rel=0.01)
