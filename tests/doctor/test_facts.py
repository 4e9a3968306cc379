"""Facts travel as JSON, and what this machine says of itself."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest
from healthy_ranks import healthy

from gradcomp.core.config import Config
from gradcomp.core.errors import WireFormatError
from gradcomp.doctor import machine
from gradcomp.doctor.facts import Facts


def test_facts_are_the_same_after_a_journey():
    for facts in (Facts(), healthy(1, 4, 2, gpus={"visible": "0", "names": ("A",)}, cores={"quota": 1.5})):
        assert Facts.from_json(facts.to_json()) == facts


def test_names_of_another_version_are_ignored_and_missing_ones_have_defaults():
    text = json.dumps(
        {"gradcomp": "9.9", "place": {"rank": 3, "planet": "x"}, "cores": {"quota": 2}, "new": [1]}
    )
    facts = Facts.from_json(text.encode())
    assert (facts.gradcomp, facts.rank, facts.cores.quota) == ("9.9", 3, 2.0)
    assert facts.kernels == Facts().kernels


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "x", "null",
        '{"place": 1}', '{"place": {"rank": "0"}}', '{"place": {"rank": true}}', '{"libraries": {"a": 1}}',
        '{"disks": [{"purpose": "x"}]}', '{"cores": {"own": [1, "2"]}}', "[" * 100_000,
        '{"gradcomp": "' + "x" * (1 << 17) + '"}',
    ],
)  # fmt: skip
def test_anything_else_is_an_error(text: str):
    with pytest.raises(WireFormatError, match="the facts of a rank cannot be read"):
        Facts.from_json(text.encode())


def test_every_field_of_the_facts_has_a_default():
    assert all(
        field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        for field in dataclasses.fields(Facts)
    )


def test_a_disk_is_tried_and_nothing_stays(tmp_path: Path):
    config = Config(run_log=str(tmp_path / "run.jsonl"), timeline=str(tmp_path / "missing" / "{rank}.json"))
    log, timeline, temporary = machine.disks(config, 0)
    assert (log.purpose, log.problem, log.free_bytes > 0) == ("run log", "", True)
    assert (timeline.path, timeline.problem) == (
        str(tmp_path / "missing" / "0.json"),
        "No such file or directory",
    )
    assert temporary.problem == ""
    assert list(tmp_path.iterdir()) == []
    assert [disk.purpose for disk in machine.disks(config, 1)] == ["timeline", "temporary files"]


def test_a_full_disk_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(_: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "fsync", full)
    (log, _) = machine.disks(Config(run_log=str(tmp_path / "run.jsonl")), 0)
    assert log.problem == "No space left on device"


@pytest.mark.parametrize(("text", "threads"), [("", 4), ("2", 2), ("3,1", 3), ("x", 4), ("0", 4)])
def test_threads_are_those_of_openmp_without_a_framework(
    text: str, threads: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 2, 4, 6}, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", text)
    found = machine.cores(Config(), 1, None)
    assert (found.own, found.training_threads) == ((0, 2, 4, 6), threads)
    assert machine.cores(Config(), 1, 7).training_threads == 7


def test_a_quota_of_either_version_of_cgroups_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(machine, "_CGROUPS", tmp_path)
    monkeypatch.setattr(machine, "_cgroup", lambda controller: iter([tmp_path / "a", tmp_path]))
    (tmp_path / "a").mkdir()
    assert machine._quota() == 0
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert machine._quota() == 0
    (tmp_path / "cpu.max").write_text("250000 100000\n")
    (tmp_path / "a" / "cpu.cfs_quota_us").write_text("-1\n")
    (tmp_path / "a" / "cpu.cfs_period_us").write_text("100000\n")
    assert machine._quota() == 2.5
    (tmp_path / "a" / "cpu.cfs_quota_us").write_text("150000\n")
    assert machine._quota() == 1.5
