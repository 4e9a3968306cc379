"""The benchmark of calls: what it counts on the driver that does nothing, and that it prints and writes it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import calls as bench
import null_device as null_device_module
import numpy as np
import pytest
from null_device import NullTransport, NullWorld, null_device

from gradcomp import Compressor, Config, LayerSpec, Policy, PowerSGD, Quantize, TopK
from gradcomp.compress.sparse.payload import SparseFormat
from gradcomp.compress.sparse.threshold import PASSES
from gradcomp.exchange.arrivals import Submission
from gradcomp.exchange.pipeline import Pipeline
from gradcomp.exchange.settings import Settings
from gradcomp.kernels.codec import Codec, Draw
from gradcomp.kernels.cuda import modules as modules_module
from gradcomp.kernels.cuda.call import Call
from gradcomp.kernels.devices import Device
from gradcomp.kernels.segments import FLOAT32, MINMAX, SEGMENT

LAYERS = bench.gpt(64, 2, 3000, 32)
TOP_K = TopK(0.01, zeros=True)


def row(name: str) -> bench.Row:
    with bench.thread_time(), null_device(varying=name == bench.VARYING) as device:
        return bench.measure(LAYERS, name, bench.CODECS[name], 1, 1, device)


@pytest.mark.parametrize(
    ("name", "waits"),
    [("4 bits", 3), ("TopK 1%", 3), (bench.VARYING, 3), ("TopK 1%, zeros", 2), ("PowerSGD 4", 3)],
)
def test_a_phase_of_a_bucket_is_one_call_with_one_event_and_nothing_blocks(name: str, waits: int) -> None:
    """Although exact layers travel beside the others, and a selection takes several kernels."""
    found = row(name)
    for kind in ("upload", "download", "allocate", "wait"):
        assert found.calls[kind] == waits * found.buckets, kind
    assert found.calls["synchronize"] == 0
    # Zeros are copied up with all else, but for the histograms of many rows.
    assert found.calls["zero"] <= found.buckets * name.startswith("TopK")


def test_the_driver_finds_the_counts_where_the_kernel_writes_them() -> None:
    (fields,) = re.findall(r"struct SelectParams {(.*?)};", modules_module.flat("select.cu"), re.S)
    names = re.findall(r"(\w+)[,;]", re.sub(r"//.*", "", fields))
    places = null_device_module.ROW_COUNT, null_device_module.WANTED, null_device_module.FOUND
    assert [names[place] for place in places] == ["row_count", "wanted", "found"]


@pytest.mark.parametrize("varying", [False, True])
def test_selections_find_what_is_wanted_or_another_number_each_time(
    varying: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing: list[tuple[int, ...]] = []
    begin = SparseFormat.begin

    def noted(form: SparseFormat, counts: Any, payload: Any) -> int:
        missing.append(tuple((form.limits - counts).tolist()))
        return begin(form, counts, payload)

    monkeypatch.setattr(SparseFormat, "begin", noted)
    with null_device(varying=varying) as device:
        ranks = Ranks(device, LAYERS[:1], monkeypatch, TopK(0.01))
        missing.clear()
        for _ in range(3):
            ranks.step()
    assert len(missing) == 6
    assert set(missing) == ({(i,) for i in range(1, 7)} if varying else {(0,)})


class Ranks:
    """Two ranks on a device that does nothing. ``written``: calls that were written down in the last step.

    ``loaded``: modules that were loaded in it.
    """

    def __init__(
        self,
        device: Device,
        layers: Sequence[LayerSpec],
        monkeypatch: pytest.MonkeyPatch,
        compressor: Compressor = TOP_K,
        reduction: str = "sra",
    ) -> None:
        world, self.device, self.written = NullWorld(2), device, 0
        layout = Call.layout

        def counted(call: Call) -> Any:
            self.written += 1
            return layout(call)

        monkeypatch.setattr(Call, "layout", counted)
        self.plan = Policy(compressor).plan(layers)
        config = Config(reorder=False, reduction=reduction)
        self.pipelines = [
            Pipeline(layers, self.plan, NullTransport(world, rank), config, int, Settings(device=device))
            for rank in range(2)
        ]

    def loads(self) -> int:
        """Modules that have been loaded by now."""
        driver: Any = self.device.driver
        return int(driver.calls["load"])

    def step(self, *, scale: float = 1.0) -> int:
        for pipeline in self.pipelines:
            pipeline.open(scale)
        self.written, before = 0, self.loads()
        for pipeline in self.pipelines:
            for layer in range(len(pipeline.layers)):
                pipeline.arrivals.submit(
                    Submission(layer, 256 * (layer + 1), 256 * (layer + 1), None, self.device.mark(1))
                )
            pipeline.arrivals.flush()
        while any(pipeline.is_open for pipeline in self.pipelines):
            for pipeline in self.pipelines:
                pipeline.poll()
        for pipeline in self.pipelines:
            pipeline.commit()
        self.loaded = self.loads() - before
        return self.written


@pytest.mark.parametrize(
    ("name", "reduction"),
    [
        *((name, "sra") for name in bench.CODECS if name != bench.VARYING),
        *(("4 bits", each) for each in ("ring", "tree", "gather")),
    ],
)
def test_what_a_plan_needs_is_loaded_and_written_down_before_its_first_step(
    name: str, reduction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with null_device() as device:
        ranks = Ranks(device, LAYERS, monkeypatch, bench.CODECS[name], reduction)
        assert ranks.loads() > 0
        assert ranks.written > 0
        assert (ranks.step(), ranks.loaded) == (0, 0)
        driver: Any = device.driver
        assert driver.calls["launch"] > 0


def test_a_rehearsal_launches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with null_device() as device:
        Ranks(device, LAYERS, monkeypatch, PowerSGD(4))
        driver: Any = device.driver
        assert driver.calls["launch"] == driver.calls["download"] == driver.calls["wait"] == 0


def test_what_another_plan_needs_is_loaded_before_its_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    with null_device() as device:
        ranks = Ranks(device, LAYERS, monkeypatch, Quantize(4))
        ranks.step()
        before = ranks.loads()
        for pipeline in ranks.pipelines:
            pipeline.propose(replace(Policy(PowerSGD(4)).plan(LAYERS), version=1))
        ranks.step()
        assert ranks.loads() == before
        assert (ranks.step(), ranks.loaded) == (0, 0)
        assert ranks.pipelines[0].plan.version == 1
        assert ranks.loads() > before


def test_a_second_step_writes_no_call_down(monkeypatch: pytest.MonkeyPatch) -> None:
    with null_device() as device:
        ranks = Ranks(device, LAYERS, monkeypatch)
        assert ranks.step() == 0
        assert ranks.step(scale=2.0) == 0  # a number, and no part of what is written down
        assert Ranks(device, LAYERS, monkeypatch).written == 0


def test_other_shapes_are_written_down(monkeypatch: pytest.MonkeyPatch) -> None:
    with null_device() as device:
        assert Ranks(device, LAYERS, monkeypatch).written > 0
        others = bench.gpt(64, 2, 3000, 40)
        assert Ranks(device, others, monkeypatch).written > 0


def test_staged_memory_is_used_again() -> None:
    assert row("4 bits").calls["pinned"] == 0


@pytest.mark.parametrize(
    ("name", "phases"),
    [
        ("4 bits", bench.PHASES),
        ("TopK 1%", ("compress", "decompress")),
        ("TopK 1%, zeros", ("compress", "decompress")),
        ("PowerSGD 4", bench.PHASES),
    ],
)
def test_every_codec_is_measured(name: str, phases: tuple[str, ...]) -> None:
    found = row(name)
    assert found.calls["launch"] > 0
    assert set(found.phases) == set(phases)
    assert all(each > 0 for each in found.phases.values())


@pytest.mark.parametrize("rows", [1, 50])
@pytest.mark.parametrize(("bucket_size", "encode"), [(512, 3), (500, 4)])  # of 3 bits: whole bytes, and not
def test_a_call_launches_as_often_as_the_page_says(rows: int, bucket_size: int, encode: int) -> None:
    """docs/benchmarks/gpus.md has the numbers."""
    table = np.zeros(rows, SEGMENT)
    table["length"], table["level"], table["bucket_size"], table["dtype"] = 16_384, 3, bucket_size, FLOAT32
    table["gradient"], table["next_residual"], table["output"] = 1 << 44, 1 << 45, 1 << 46
    codec, flags, some = Codec(MINMAX), np.zeros(rows, np.uint8), np.full(rows, 160)
    payload = np.zeros(int(codec.wire_bytes(table).sum()), np.uint8)
    lists = np.zeros(160 * rows, np.uint32), np.zeros(160 * rows, np.float32), np.zeros(rows, np.int64)
    top = flags, np.ones(rows, np.float32), some, 160 * np.arange(rows), *lists
    calls: list[tuple[int, Callable[[Device], object]]] = [
        (encode, lambda on: codec.encode(on, table, payload, flags, Draw(0, 0, 0))),
        (2, lambda on: codec.decode(on, table, payload, flags)),
        (9, lambda on: on.kernels.select_top(table, *top, decay=1.0, zeros=True)),
        (43, lambda on: on.kernels.bisect(table, some, 2 * some, PASSES)),
    ]
    for launches, call in calls:
        with null_device() as device:
            call(device)
            driver: Any = device.driver
            assert (driver.calls["launch"], driver.calls["synchronize"]) == (launches, 1)
