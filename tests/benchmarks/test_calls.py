"""The benchmark of calls: what it counts on the driver that does nothing, and that it prints and writes it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import calls as bench
import pytest
from null_device import NullTransport, NullWorld, null_device

from gradcomp import Config, LayerSpec, Policy, TopK
from gradcomp.kernels.cuda.call import Call
from gradcomp.kernels.devices import Device
from gradcomp.pipeline import Pipeline

LAYERS = bench.gpt(64, 2, 3000, 32)


def row(name: str) -> bench.Row:
    with bench.thread_time(), null_device() as device:
        return bench.measure(LAYERS, name, bench.CODECS[name], 1, 1, device)


@pytest.mark.parametrize(("name", "waits"), [("4 bits", 3), ("TopK 1%", 2), ("PowerSGD 4", 3)])
def test_a_phase_of_a_bucket_is_one_call_with_one_event_and_nothing_blocks(name: str, waits: int) -> None:
    """Although exact layers travel beside the others, and a selection takes several kernels."""
    found = row(name)
    for kind in ("upload", "download", "allocate", "wait"):
        assert found.calls[kind] == waits * found.buckets, kind
    assert found.calls["synchronize"] == 0
    # Zeros are copied up with all else, but for the histograms of many rows.
    assert found.calls["zero"] <= found.buckets * (name == "TopK 1%")


class Ranks:
    """Two ranks on a device that does nothing. ``written``: calls that were written down in the last step."""

    def __init__(self, device: Device, layers: Sequence[LayerSpec], monkeypatch: pytest.MonkeyPatch) -> None:
        world, self.device, self.written = NullWorld(2), device, 0
        layout = Call.layout

        def counted(call: Call) -> Any:
            self.written += 1
            return layout(call)

        monkeypatch.setattr(Call, "layout", counted)
        plan = Policy(TopK(0.01)).plan(layers)
        self.pipelines = [
            Pipeline(layers, plan, NullTransport(world, rank), Config(reorder=False), int, device=device)
            for rank in range(2)
        ]

    def step(self, *, scale: float = 1.0) -> int:
        self.written = 0
        for pipeline in self.pipelines:
            pipeline.open(scale)
            for layer in range(len(pipeline.layers)):
                pipeline.registry.submit(
                    layer, 256 * (layer + 1), 256 * (layer + 1), None, self.device.mark(1)
                )
            pipeline.registry.flush()
        while any(pipeline.is_open for pipeline in self.pipelines):
            for pipeline in self.pipelines:
                pipeline.poll()
        for pipeline in self.pipelines:
            pipeline.commit()
        return self.written


def test_a_second_step_writes_no_call_down(monkeypatch: pytest.MonkeyPatch) -> None:
    with null_device() as device:
        ranks = Ranks(device, LAYERS, monkeypatch)
        assert ranks.step() > 0
        assert ranks.step() == 0
        assert ranks.step(scale=2.0) == 0  # a number, and no part of what is written down
        again = Ranks(device, LAYERS, monkeypatch)
        assert again.step() == 0


def test_other_shapes_are_written_down(monkeypatch: pytest.MonkeyPatch) -> None:
    with null_device() as device:
        Ranks(device, LAYERS, monkeypatch).step()
        others = bench.gpt(64, 2, 3000, 40)
        assert Ranks(device, others, monkeypatch).step() > 0


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
