"""The benchmark of the kernels on a GPU: what its figures mean, and all its rows on the stand-in."""

from __future__ import annotations

import importlib
import json
import sys

import gpu as bench
import gpu_predictions
import pytest

ROW = {"name": "encode", "dtype": "float32", "milliseconds": 1.0, "wall_milliseconds": 2.0,
       "gigabytes_per_second": 3000.0, "yardstick": "copy", "share": 0.85, "bar": 0.8, "right": True}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "missed"),
    [({}, False), ({"share": 0.79}, True), ({"right": False}, True), ({"share": 0.1, "bar": None}, False)],
)
def test_a_figure_misses_its_bar(changes, missed):
    assert bench.Row(**{**ROW, **changes}).missed is missed


@pytest.mark.full
def test_every_row_is_right_on_the_stand_in(run_json):
    written = run_json("benchmarks/gpu.py", "--check")
    assert [row["right"] for row in written["rows"]] == [True] * 18, written["rows"]
    assert "milliseconds" not in written["rows"][0]  # of the stand-in they would mean nothing
    assert len({row["launches"] for row in written["launches"]}) == 1


def test_a_run_that_is_cut_off_keeps_what_it_has_measured(tmp_path):
    path = tmp_path / "gpu.json"
    notes = bench.Notes(path, {"machine": {}}, times=True)
    notes.add(bench.Row(**ROW))
    kept = json.loads(path.read_text())
    assert [row["name"] for row in kept["rows"]] == ["encode"]
    assert kept["complete"] is False
    notes.add(bench.Row(**{**ROW, "name": "decode"}))
    notes.end({10: 23, 100: 23})
    whole = json.loads(path.read_text())
    assert [row["name"] for row in whole["rows"]] == ["encode", "decode"]
    assert whole["complete"] is True
    assert whole["launches"][1] == {"layers": 100, "launches": 23}


# ------------------------------------------------------------------------------------------ predictions


@pytest.mark.parametrize(
    ("share", "verdict"), [(0.74, "below"), (0.75, "as predicted"), (0.95, "as predicted"), (0.96, "above")]
)
def test_a_figure_is_held_beside_its_prediction(share, verdict):
    stages = {"bars-256": {"found": {"rows": [{**ROW, "dtype": "float16"}, {**ROW, "share": share}]}}}
    lines = [line for line in gpu_predictions.beside(stages) if line[0] == "encode"]
    assert lines == [("encode", "0.75 to 0.95 of the copy", "bars-256", f"{share:.3g}", verdict)]


def test_a_step_is_held_beside_its_predictions():
    row = {"launches": 103.0, "buckets": 9, "thread_ms": 2.5}
    stages = {"step": {"found": {"caps": {"16": {"rows": {"alone null": row}}}}}}
    found = {line[0]: line[3:] for line in gpu_predictions.beside(stages) if line[2] == "step" and line[3]}
    assert found == {
        "launches of a step": ("103", "as predicted"),
        "exchange buckets of a step": ("9", "above"),
        "CPU time of gradcomp's thread in a step": ("2.5", "as predicted"),
    }


def test_a_wrong_result_is_noticed():
    work = importlib.import_module("gpu_work")
    machine = importlib.import_module("gpu_machine").stand_in()
    codes = work.Codes(machine, 6000, "float32")
    assert codes.encoded_right(stochastic=False, residual=True)
    codes.encode = lambda number, **settings: None
    assert not codes.encoded_right(stochastic=True, residual=True)


def test_launches_are_timed_behind_a_kernel_that_spins(monkeypatch):
    gpu_machine = importlib.import_module("gpu_machine")
    queued = []

    class Driver:
        def launch(self, name):
            queued.append(name)

        def synchronize(self):
            queued.append("wait")

    monkeypatch.setattr(gpu_machine, "CudaKernels", lambda driver: None)
    machine = gpu_machine.Machine(
        Driver(), lambda: queued.append("event") or len(queued), lambda a, b: b - a, {}
    )
    machine.spin = lambda: queued.append("spin")

    def call():
        machine.driver.launch("first")
        machine.driver.launch("second")
        machine.driver.synchronize()

    device, _ = machine.timed(call)
    behind = queued.index("first")
    assert queued[behind - 2 : behind] == ["spin", "event"]
    assert device == 4  # from the event before the first launch to the one behind the second
    assert "spin" not in queued[queued.index("wait") :]  # the wall's clock counts no spinning


def test_a_row_is_written_before_the_next_one_is_measured(tmp_path, monkeypatch):
    path = tmp_path / "gpu.json"

    def rows(self, *, small):
        yield bench.Row(**ROW)
        raise KeyboardInterrupt

    monkeypatch.setattr(bench.Bench, "all_rows", rows)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--check", "--json", str(path)])
    with pytest.raises(KeyboardInterrupt):
        bench.main()
    assert [row["name"] for row in json.loads(path.read_text())["rows"]] == ["encode"]


def test_without_a_gpu_nothing_is_measured(run_script, tmp_path):
    path = tmp_path / "gpu.json"
    done = run_script("benchmarks/gpu.py", "--json", str(path), check=False)
    assert done.returncode == 2
    assert "nothing was measured" in done.stderr
    assert not path.exists()
