"""What Nsight Compute writes becomes a row for each launch; every call that it is to see runs on the stand-in."""

from __future__ import annotations

import gpu_machine
import gpu_profile
import pytest

NAMES = gpu_profile.COUNTERS
HEADER = ["ID", "Kernel Name", *NAMES.values()]


def written(*rows: list[str], unit: str = "us") -> str:
    units = ["", "", unit, "%", "%", "%", "%", "register/thread"]
    lines = [",".join(f'"{cell}"' for cell in row) for row in (HEADER, units, *rows)]
    return "\n".join(["==PROF== Connected to process 7", *lines[:1], *lines[1:], "==PROF== Disconnected"])


def test_every_launch_is_a_row():
    text = written(
        ["0", "encode_nearest(Parameters)", "1,234.5", "80.1", "60", "55", "37.5", "72"],
        ["1", "decode", "99", "85", "50", "40", "n/a", "80"],
    )
    first, second = gpu_profile.parsed(text)
    assert first["kernel"] == "encode_nearest"
    assert (first["us"], first["memory %"], first["registers"]) == (1234.5, 80.1, 72.0)
    assert second["warps %"] is None


@pytest.mark.parametrize(("unit", "microseconds"), [("ns", 0.5), ("us", 500.0), ("ms", 500_000.0)])
def test_times_are_microseconds_in_whatever_unit_they_come(unit, microseconds):
    row = ["0", "decode", "500", "1", "1", "1", "1", "1"]
    assert gpu_profile.parsed(written(row, unit=unit))[0]["us"] == pytest.approx(microseconds)


@pytest.mark.full
def test_a_call_is_profiled_when_its_modules_are_loaded():
    machine = gpu_machine.stand_in()
    seen, before = [], []
    count = gpu_profile.profiled(
        machine,
        6000,
        lambda: before.append(machine.driver.launched),
        lambda: seen.append(machine.driver.launched - before[-1]),
        small=True,
    )
    assert count == len(seen) == 14
    assert all(launches > 0 for launches in seen)
