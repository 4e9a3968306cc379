"""``gradcomp report``: its numbers, its page without a browser, and bad input. The page itself: tests/site."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

import gradcomp as gc
from gradcomp.cli import main
from gradcomp.core.journal import Journal
from gradcomp.core.run_lines import PERIOD, Factor, Gains, Sample, Window
from gradcomp.report import charts

LAYERS = [
    gc.LayerSpec("conv.weight", (16, 30)),
    gc.LayerSpec("fc.weight", (100, 64)),
    gc.LayerSpec("bias", (16,)),
]

FACTORS = Factor(1.0, 1.0, None, 4), Factor(10.0, 0.5, 2.0, 7)
GAINS = Gains(30, "*", 0.7, 10.0, 20.0, 3.0, (2.0, 1.5), FACTORS, 4.5)

needs_library = pytest.mark.skipif(find_spec("vl_convert") is None, reason="needs the extra report")


def plan(version: int, *chosen: gc.Compressor) -> gc.Plan:
    rows = zip(LAYERS, chosen, strict=True)
    return gc.Plan(version, tuple(gc.Assignment(layer.name, c.family_string(), c.level) for layer, c in rows))


def window(step: int, worked: tuple[float, float], end: float, **more) -> Window:
    """Ten steps in which two ranks work so long, half of it in backward, and all end at ``end``."""
    latest = max(worked)
    return Window(
        step,
        10,
        seconds=(end, end),
        backward=tuple(each / 2 for each in worked),
        exposed=tuple(end - each for each in worked),
        waited=tuple(latest - each for each in worked),
        codec=(0.001, 0.003),
        wire=(0.01, 0.01),
        sent_bytes=(1000.0, 3000.0),
        last=tuple(10.0 * (each == latest) for each in worked),
        **more,
    )


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Four windows of which the last but one is long, as by validation, and the rest of rank 0 alone."""
    path = tmp_path / "run.jsonl"
    journal = Journal(path)
    journal.run(2, "", "none", LAYERS)
    journal.plan(0, plan(0, *[gc.Identity()] * 3), [480, 6400, 64])
    journal.run(2, "LGreCo(every_steps=20)", "quantize:bits=4", LAYERS)
    journal.plan(0, plan(0, gc.Quantize(4), gc.Quantize(4), gc.Cast("float32")), [250, 3300, 64])
    for line in (
        window(0, (0.04, 0.06), 0.1),
        window(10, (0.04, 0.06), 0.1, skipped=((13, 1), (14, 1), (17, None)), discarded=2),
        window(20, (9.0, 0.06), 9.1),
        window(30, (0.06, 0.04), 0.1),
        window(40, (0.04, 0.06), 0.09),
        Window(50, 3, *((0.2, None),) * 7, (None, None)),
        Sample(5, 0, 2.0, 0.5, 0.25),
        Sample(25, 0, 4.0, 2.0, 0.125),
        Sample(20, 1, 3.0, None, 0.0625, PERIOD),
        GAINS,
    ):
        journal.line(line)
    journal.choice(20, "error 0.9 of the budget")
    journal.plan(20, plan(1, gc.Quantize(2), gc.PowerSGD(4), gc.Cast("float32")), [125, 1600, 64])
    journal.close()
    return path


def summary(capsys: pytest.CaptureFixture, *arguments: object) -> dict:
    assert main(["report", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_usual_step_is_divided_into_its_parts(log: Path, capsys):
    found = summary(capsys, log)
    steps = found["steps"]
    assert steps["seconds"] == pytest.approx(0.1, rel=0.04)  # neither the long window nor the fastest counts
    assert sum(steps["parts"].values()) == pytest.approx(steps["seconds"])
    assert steps["parts"]["waiting for the last rank"] == pytest.approx(0.01)
    assert steps["parts"]["backward"] == steps["parts"]["forward, data, optimizer"] == pytest.approx(0.025)
    assert steps["exposed"] == pytest.approx(0.05)
    assert (steps["codec"], steps["sent_bytes"]) == (0.002, 2000.0)
    assert [(point["step"], point["end"]) for point in steps["along"]] == [
        (0, 10), (10, 20), (20, 30), (30, 40), (40, 50)
    ]  # fmt: skip
    assert found["verdict"] == (
        "Of a step's 100 ms, 50 ms (50%) are exposed communication, 10 ms of them waiting for the last rank; "
        "rank 1 was waited for in 60% of the steps."
    )


def test_ranks_layers_plans_and_skips_are_those_of_the_log(log: Path, capsys):
    found = summary(capsys, log)
    assert [row["last_share"] for row in found["ranks"]] == [0.4, 0.6]
    assert found["ranks"][0]["worked"] == pytest.approx((3 * 0.04 + 0.06 + 9.0) / 5)
    first, second, last = found["layers"]
    assert [row["name"] for row in found["layers"]] == ["fc.weight", "conv.weight", "bias"]
    assert (second["error"], second["residual"], second["norm"]) == (0.125, 2.0, 4.0)
    assert (first["error"], first["period_error"], last["error"]) == (None, 0.0625, 0.0)
    assert [row["bytes"] for row in found["layers"]] == [1600, 125, 64]
    assert [row["reason"] for row in found["plans"]] == ["", "error 0.9 of the budget"]
    assert found["plans"][1]["levels"][0] == {"level": "powersgd rank 4", "elements": 6400}
    assert found["skipped"] == [
        {"step": 13, "layer": "fc.weight"}, {"step": 14, "layer": "fc.weight"}, {"step": 17, "layer": None},
    ]  # fmt: skip
    assert found["discarded"] == 2
    assert [row["median"] for row in found["residuals"]] == [0.375]
    assert found["gains"]["factors"][1] == {"factor": 10.0, "gain": 0.5, "throughput": 2.0, "steps": 7.0}
    (point,) = found["gains"]["along"]
    assert (point["prior"], point["post"], point["corrected"]) == (3.0, [2.0, 1.5], 4.5)
    norms, gains = charts.norms_along(found["gains"]), charts.gains_along(found["gains"])
    assert {row["name"]: row["value"] for row in norms["data"]["values"]} == {
        "before compression": 3.0, "at the minimum factor": 2.0, "at the candidate": 1.5, "with the residual": 4.5
    }  # fmt: skip
    assert {row["name"]: row["value"] for row in gains["data"]["values"]} == {"1x": 1.0, "10x": 0.5}
    older = json.dumps({key: value for key, value in GAINS.record().items() if key != "corrected"})
    assert Gains.parse(json.loads(older), 2, 3) == replace(GAINS, corrected=None)


def test_a_log_of_plans_only(log: Path, capsys):
    """As earlier versions wrote them; the first run of the file is one."""
    found = summary(capsys, log, "--run", 1)
    assert (found["steps"], found["ranks"], found["gains"], found["residuals"]) == (None, [], None, [])
    assert found["verdict"] == "The log says nothing of the time of steps."


@needs_library
def test_the_page_is_one_file_that_loads_nothing(log: Path, tmp_path: Path, capsys):
    out = tmp_path / "report.html"
    assert main(["report", str(log), str(log), "-o", str(out)]) == 0
    page = out.read_text()
    assert page.index("default-src 'none'") < page.index("<script")
    body = page.split("<script>(() =>")[0]
    assert set(re.findall(r'(?:src|href)="([^"]*)"', body)) == {"data:,"}
    assert "13 to 14" in body
    assert "the ranks agreed to skip it" in body
    assert len(page) < 1_200_000
    assert capsys.readouterr().out.splitlines()[-1] == f"page: {out}"


@needs_library
def test_what_a_run_has_not_is_said(log: Path, tmp_path: Path):
    out = tmp_path / "report.html"
    assert main(["report", str(log), "-o", str(out), "--run", "1"]) == 0
    body = out.read_text().split("<script>(() =>")[0]
    for said in (
        "The log has no times of steps",
        "The log has no times of several ranks.",
        "The plan did not change: this run has no controller.",
        "its controller is not GraVAC",
        "The log has no residual",
        "The log says nothing of skipped steps.",
        "The log has no measured error",
    ):
        assert said in body


BAD = {
    "no file": ("missing.jsonl", [], "cannot read the run log"),
    "no run": ("empty.jsonl", [], "no run in this file"),
    "no such run": ("run.jsonl", ["--run", "3"], "no run 3; there are runs 1 to 2"),
    "a broken line": ("broken.jsonl", [], "line 2: seconds must be a list of 2"),
    "a folder that is not there": ("run.jsonl", ["-o", "nowhere/report.html"], "cannot write the report"),
}


@pytest.mark.parametrize(
    "case", [case if case[:8] != "a folder" else pytest.param(case, marks=needs_library) for case in BAD]
)
def test_bad_input_is_one_line(log: Path, case: str, capsys, monkeypatch):
    monkeypatch.chdir(log.parent)
    Path("empty.jsonl").write_text("")
    head = {
        "kind": "run",
        "format": 1,
        "version": "0",
        "world": 2,
        "controller": "",
        "compression": "",
        "layers": [],
    }
    steps = {"kind": "steps", "step": 0, "steps": 1, "seconds": [1]}
    Path("broken.jsonl").write_text(f"{json.dumps(head)}\n{json.dumps(steps)}\n")
    file, more, words = BAD[case]
    assert main(["report", file, *more]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1


def test_a_missing_library_names_its_extra(log: Path, tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    assert main(["report", str(log), "-o", str(tmp_path / "report.html")]) == 2
    assert "pip install 'gradcomp[report]'" in capsys.readouterr().err
    assert main(["report", str(log)]) == 0  # the verdict needs no library
