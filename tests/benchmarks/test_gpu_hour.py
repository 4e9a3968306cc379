"""What runs everything that only a GPU can show: order, limits, resumption, and what it says without a GPU."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path

import gpu_hour
import gpu_hour_process
import gpu_hour_stages as listed
import gpu_predictions
import pytest
from gpu_hour_stages import Stage

ABOUT = {"gpu": "a GPU", "sources": "1234"}


def stage(name: str, program: str, seconds: int = 20, **settings) -> Stage:
    return Stage(name, f"what {name} shows", 1, seconds, (sys.executable, "-c", program), **settings)


def run(folder: Path, *stages: Stage, problem: str | None = None, again: bool = False, earlier=None):
    """The exit status, and what the JSON holds."""
    record = gpu_hour.Record(folder, stages, earlier)
    code = gpu_hour.run(stages, record, problem=problem, about=ABOUT, again=again, say=lambda _: None)
    return code, json.loads((folder / "gpu-hour.json").read_text())["stages"]


def noted(path: Path, word: str) -> str:
    return f"open({str(path)!r}, 'a').write({word!r})"


# ------------------------------------------------------------------------------------------ stages


def test_a_stage_that_fails_does_not_stop_the_next(tmp_path):
    log = tmp_path / "log"
    stages = (
        stage("first", noted(log, "1")),
        stage("second", noted(log, "2") + "; print('last words'); raise SystemExit(3)"),
        stage("third", noted(log, "3")),
    )
    code, found = run(tmp_path / "out", *stages)
    assert log.read_text() == "123"
    assert [each["status"] for each in found.values()] == ["passed", "failed", "passed"]
    assert found["second"]["output"] == ["last words"]
    assert found["second"]["reason"] == "exit status 3: last words"
    assert code == 1


@pytest.mark.alone
def test_at_its_limit_a_stage_ends_with_all_that_it_started(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_hour_process, "GRACE_SECONDS", 0.2)
    pid = tmp_path / "pid"
    child = "import time; time.sleep(100)"
    program = (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True)\n"
        f"open({str(pid)!r}, 'w').write(str(child.pid))\n"
        "print('it hangs', flush=True)\n"
        "try:\n"
        "    time.sleep(100)\n"
        "except KeyboardInterrupt:\n"
        "    time.sleep(100)\n"
    )
    began = time.monotonic()
    code, found = run(tmp_path / "out", stage("slow", program, seconds=3), stage("next", ""))
    assert time.monotonic() - began < 15
    assert found["slow"]["status"] == "timed out"
    assert found["slow"]["output"][0] == "it hangs"
    assert found["next"]["status"] == "passed"
    assert code == 1
    deadline = time.monotonic() + 5  # a killed child stays until someone asks how it ended
    while Path(f"/proc/{pid.read_text()}").exists() and state(int(pid.read_text())) != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.01)


def state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def test_figures_of_a_stage_are_part_of_the_json(tmp_path):
    program = "import sys; open(sys.argv[1], 'w').write('{\"milliseconds\": 3}')"
    command = (sys.executable, "-c", program, "{json}")
    _, found = run(tmp_path, Stage("figures", "", 1, 20, command))
    assert found["figures"]["found"] == {"milliseconds": 3}
    assert found["figures"]["gpu"] == "a GPU"


@pytest.mark.parametrize(
    ("last_line", "status"),
    [("3 passed, 1 skipped in 0.1s", "passed"), ("4 skipped in 0.1s", "skipped"), ("", "skipped")],
)
def test_tests_pass_only_if_one_passed(last_line, status, tmp_path):
    reason = "SKIPPED [4] x.py:1: needs torch"
    code, found = run(tmp_path, stage("tests", f"print({reason!r}); print({last_line!r})", tests=True))
    assert found["tests"]["status"] == status
    assert status == "passed" or found["tests"]["reason"] == reason
    assert code == 0


def test_what_this_software_does_not_have_is_skipped_with_its_words(tmp_path):
    refused = stage("refused", "print('ConfigError: an old torch'); raise SystemExit(77)")
    code, found = run(tmp_path, refused, stage("checked", "raise SystemExit(1)", needs="no-such-program"))
    assert [each["status"] for each in found.values()] == ["skipped"] * 2
    assert found["refused"]["reason"] == "ConfigError: an old torch"
    assert "no-such-program" in found["checked"]["reason"]
    assert code == 0


# ------------------------------------------------------------------------------------------ another call


def test_what_is_done_is_not_repeated_and_what_was_cut_off_is(tmp_path):
    log, out = tmp_path / "log", tmp_path / "out"
    before = {"status": "passed", "gpu": "a GPU"}
    out.mkdir()
    stages = tuple(stage(name, noted(log, name)) for name in "abcde")
    known = {
        "a": before,
        "b": {"status": "failed"},
        "c": {"status": "running"},
        "d": {"status": "unmeasured"},
    }
    (out / "gpu-hour.json").write_text(json.dumps({"stages": known}))
    code, found = run(out, *stages)
    assert log.read_text() == "cde"
    assert found["a"] == before
    assert code == 1  # a failure of the call before is one
    assert run(out, *stages[:1], again=True)[1]["a"]["status"] == "passed"
    assert log.read_text() == "cdea"


def test_a_fresh_machine_goes_on_from_a_json_elsewhere(tmp_path):
    log = tmp_path / "log"
    first, second = stage("first", noted(log, "1")), stage("second", noted(log, "2"))
    run(tmp_path / "one", first)
    _, found = run(tmp_path / "two", first, second, earlier=tmp_path / "one" / "gpu-hour.json")
    assert log.read_text() == "12"
    assert [each["status"] for each in found.values()] == ["passed", "passed"]


def test_a_stage_is_written_down_before_it_runs(tmp_path):
    path = tmp_path / "gpu-hour.json"
    program = f"import json; print(json.load(open({str(path)!r}))['stages']['one']['status'])"
    _, found = run(tmp_path, stage("one", program))
    assert found["one"]["output"] == ["running"]


# ------------------------------------------------------------------------------------------ without a GPU


def test_without_a_gpu_no_stage_runs_and_what_was_measured_stays(tmp_path):
    log = tmp_path / "log"
    out = tmp_path / "out"
    run(out, stage("first", ""))
    code, found = run(out, stage("first", ""), stage("second", noted(log, "2")), problem="no CUDA device")
    assert code == 2
    assert found["first"]["status"] == "passed"
    assert found["second"] == {"status": "unmeasured", "reason": "no CUDA device"}
    assert not log.exists()


def test_a_question_that_hangs_is_the_answer():
    found, _ = gpu_hour.probe([sys.executable, "-c", "import time; time.sleep(60)"], 1.0)
    assert found == "the GPU did not answer within 1 s"
    assert gpu_hour.probe([sys.executable, "-c", "print('NVIDIA H1')"], 20.0) == (None, "NVIDIA H1")


# ------------------------------------------------------------------------------------------ the stages as they are


@pytest.mark.parametrize("piece", listed.PIECES)
def test_a_piece_fits_its_time(piece):
    limits = [each.limit_seconds for each in listed.STAGES if each.piece == piece]
    assert limits
    assert listed.PROBE_SECONDS + sum(limits) <= listed.PIECE_SECONDS < 600


def test_stages_are_in_the_order_of_their_pieces():
    assert [each.piece for each in listed.STAGES] == sorted(each.piece for each in listed.STAGES)
    assert len({each.name for each in listed.STAGES}) == len(listed.STAGES)


@pytest.mark.parametrize("one", listed.STAGES, ids=lambda one: one.name)
def test_what_a_stage_runs_is_there(one):
    paths = [part for part in one.command if part.endswith(".py")]
    assert len(paths) == 1
    assert (gpu_hour.ROOT / paths[0]).is_file()


@pytest.mark.parametrize(
    "one", [each for each in listed.STAGES if "-k" in each.command], ids=lambda one: one.name
)
def test_words_that_choose_tests_are_words_of_some(one):
    path = next(part for part in one.command if part.endswith(".py"))
    tests = re.findall(r"^def (test_\w+)", (gpu_hour.ROOT / path).read_text(), re.M)
    words = re.findall(r"[a-z]+_[a-z_]+", one.command[one.command.index("-k") + 1])
    assert words
    for word in words:
        assert any(word in test for test in tests), word


def test_the_documentation_has_every_stage_and_prediction():
    page = (gpu_hour.ROOT / "docs" / "gpu-hour.md").read_text(encoding="utf-8")
    assert {re.sub(r"^modules-\d$", "modules", each.name) for each in listed.STAGES} <= set(
        re.findall(r"`([a-z0-9-]+)`", page)
    )
    for one in gpu_predictions.PREDICTIONS:
        assert re.search(rf"^\| {re.escape(one.what)}[^|]*\| {re.escape(one.text)} \|", page, re.M), one.what
