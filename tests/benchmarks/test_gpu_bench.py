"""The benchmark of the kernels on a GPU: what its figures mean, and all its rows on the stand-in."""

from __future__ import annotations

import importlib
import json

import gpu as bench
import pytest
from kernels.gpu import problem

ROW = {
    "name": "encode",
    "dtype": "float32",
    "milliseconds": 1.0,
    "wall_milliseconds": 2.0,
    "gigabytes_per_second": 3000.0,
    "yardstick": "copy",
    "share": 0.85,
    "bar": 0.8,
    "right": True,
}


@pytest.mark.parametrize(
    ("changes", "missed"),
    [({}, False), ({"share": 0.79}, True), ({"right": False}, True), ({"share": 0.1, "bar": None}, False)],
)
def test_a_figure_misses_its_bar(changes, missed):
    assert bench.Row(**{**ROW, **changes}).missed is missed


@pytest.mark.full
def test_every_row_is_right_on_the_stand_in(run_script, tmp_path):
    path = tmp_path / "gpu.json"
    done = run_script("benchmarks/gpu.py", "--check", "--json", str(path))
    written = json.loads(path.read_text())
    assert len(written["rows"]) == 18
    assert all(row["right"] for row in written["rows"]), done.stdout
    assert "milliseconds" not in written["rows"][0]  # of the stand-in they would mean nothing
    assert len({row["launches"] for row in written["launches"]}) == 1


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


@pytest.mark.skipif(problem() is None, reason="there is a GPU here")
def test_without_a_gpu_nothing_is_measured(run_script, tmp_path):
    path = tmp_path / "gpu.json"
    done = run_script("benchmarks/gpu.py", "--json", str(path), check=False)
    assert done.returncode == 2
    assert "nothing was measured" in done.stderr
    assert not path.exists()
