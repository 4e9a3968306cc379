"""The benchmark of calls: what it counts on the driver that does nothing, and that it prints and writes it."""

from __future__ import annotations

import json

import calls as bench
import pytest
from null_device import null_device

LAYERS = bench.gpt(64, 2, 3000, 32)


def row(name: str) -> bench.Row:
    with bench.thread_time(), null_device() as device:
        return bench.measure(LAYERS, name, bench.CODECS[name], 1, 1, device)


def test_a_phase_of_a_bucket_is_one_call_with_one_wait() -> None:
    """Although exact layers travel beside those that are quantised."""
    found = row("4 bits")
    assert set(found.phases) == set(bench.PHASES)
    for kind in ("upload", "download", "synchronize", "allocate"):
        assert found.calls[kind] == len(bench.PHASES) * found.buckets, kind
    assert found.calls["zero"] == 0  # zeros are copied up with all else


def test_staged_memory_is_used_again() -> None:
    assert row("4 bits").calls["pinned"] == 0


@pytest.mark.parametrize("name", bench.CODECS)
def test_every_codec_is_measured(name: str) -> None:
    found = row(name)
    assert found.calls["launch"] > 0
    assert {"encode", "decode"} <= found.phases.keys()
    assert all(each > 0 for each in found.phases.values())


def test_the_model_has_its_parameters() -> None:
    assert sum(layer.size for layer in bench.gpt()) == 124_439_808


def test_it_prints_and_writes(monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setattr(bench, "gpt", lambda: LAYERS)
    monkeypatch.setattr(bench, "SIZES", (1,))
    path = tmp_path / "calls.json"
    assert bench.main(["--steps", "1", "--json", str(path)]) == 0
    written = json.loads(path.read_text())
    assert [row["codec"] for row in written["rows"]] == list(bench.CODECS)
    assert written["bar"] == bench.BAR
    assert "| 4 bits " in capsys.readouterr().out
