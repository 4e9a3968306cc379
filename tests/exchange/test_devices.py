"""Gradients on a device: the same means and the same state as on the host, whoever the other ranks are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from configurations import ROWS
from kernels import standin
from tiers import every_value

from gradcomp import (
    DGC,
    AdaComp,
    BestRank,
    BlockFloat,
    Cast,
    CLTk,
    Compressor,
    GlobalTopK,
    LayerSpec,
    LGreCo,
    PowerSGD,
    Quantize,
    RandomBlock,
    RandomK,
    RedSync,
    ScaledSign,
    SIDCo,
    SpectralAtomo,
    Threshold,
    TopK,
    UnbiasedRank,
    WireFormatError,
)
from gradcomp.core.topology import Topology
from gradcomp.exchange.snapshot import restore, snapshot
from gradcomp.exchange.waiting import Waiting
from gradcomp.kernels.devices import HOST
from gradcomp.testing.simulation import Simulation, plan_for

LAYERS = [
    LayerSpec("a.weight", (33, 20), "float32", "weight"),
    LayerSpec("a.bias", (33,), "float32", "bias"),
    LayerSpec("b.weight", (65, 31), "float16", "weight"),
    LayerSpec("c.weight", (700,), "bfloat16", "weight"),
    LayerSpec("d.weight", (40, 60), "float32", "weight"),
    LayerSpec("empty", (0,), "float32", "weight"),
]

COMPRESSORS: dict[str, Compressor] = {
    "4 bits": Quantize(4, bucket_size=128),
    "nearest with feedback": Quantize(4, bucket_size=128, rounding="nearest"),
    "bits by block": Quantize((3, 6, 2, 4), bucket_size=32, feedback=True),
    "bits by bucket": Quantize(4, bucket_size=128, allocate="bucket", feedback=True),
    "bits of fixed bytes": Quantize(4, bucket_size=100, allocate="bytes"),
    "NVFP4": BlockFloat("fp4_e2m1", 16, "nearest", scale="e4m3"),
    "bfloat16": Cast("bfloat16"),
    "sign": ScaledSign(),
    "TopK": TopK(0.1),
    "TopK with zeros": TopK(0.1, zeros=True),
    "TopK, values of 4 bits": TopK(0.1, values=Quantize(4), zeros=True),
    "DGC": DGC(0.05),
    "DGC, clipped": DGC(0.05, clip=0.1),
    "RandomK": RandomK(0.1),
    "RandomBlock": RandomBlock(0.1),
    "Threshold": Threshold(1.0),
    "RedSync": RedSync(0.05),
    "CLTk": CLTk(0.1),
    "SIDCo": SIDCo(0.05),
    "AdaComp": AdaComp(),
    "GlobalTopK": GlobalTopK(0.1),
    "PowerSGD": PowerSGD(2),
    "PowerSGD, a factor a step": PowerSGD(2, alternate=True),
    "UnbiasedRank": UnbiasedRank(2),
    "BestRank": BestRank(2),
    "SpectralAtomo": SpectralAtomo(2),
}

# What else the suite of the compressors has, of those that are special in what they touch.
COMPRESSORS |= {
    name: ROWS[name].compressor
    for name in (
        *("momentum-correction-topk", "local-clip-topk", "dgc-momentum"),
        *("topk-raw", "topk-bitmap", "topk-deflate", "topk-bf16"),
        *("signum", "onebit", "terngrad", "nuqsgd-4", "nuqsgd-5-feedback", "codebook-feedback"),
        *("two-level", "two-level-minimum", "two-level-dense", "two-level-momentum", "two-level-clip"),
        *("two-level-random", "two-level-random-minimum"),
        *("ef21", "ef21-quantize", "fake", "flat", "flat-cast"),
    )
}

#: What products before the last reply may come to: another order of additions is allowed there.
INEXACT = {"PowerSGD", "PowerSGD, a factor a step", "UnbiasedRank", "BestRank", "SpectralAtomo"}


@pytest.fixture
def gpu() -> Iterator[Any]:
    with standin.device(order=2) as found:
        yield found


#: Of three ranks, two share a host.
TOPOLOGY = Topology([0, 0, 1])
REDUCED = ("fake", "flat", "4 bits", "nearest with feedback", "bits by block", "bfloat16", "sign")
CASES = [(name, "sra") for name in COMPRESSORS]
CASES += [
    (name, reduction)
    for name, compressor in COMPRESSORS.items()
    if compressor.traits.reduces
    for reduction in ("ring", "tree", "all_to_all", "gather", "parameter_server", "hierarchical")
    if name in REDUCED
]


def assert_same_step(
    ranks: Simulation, alone: Simulation, gradients: Any = None, during: Callable[[], None] | None = None
) -> None:
    """A step of both leaves the same bytes."""
    gradients = gradients or alone.gradients()
    expected, found = alone.step(gradients), ranks.step(gradients, during=during)
    for mine, theirs in zip(found.all_means(), expected.all_means(), strict=True):
        assert mine.tobytes() == theirs.tobytes()


def assert_alike(
    ranks: Simulation, alone: Simulation, exact: bool, during: Callable[[], None] | None = None
) -> None:
    """Three steps of both, in one of which a layer is absent, come to the same."""
    for number in range(3):
        gradients = alone.gradients(absent=[4] if number == 1 else [])
        expected, found = alone.step(gradients), ranks.step(gradients, during=during)
        assert found.committed == expected.committed == [True] * 3
        for mine, theirs in zip(found.all_means(), expected.all_means(), strict=True):
            assert (mine is None) == (theirs is None)
            if exact or mine is None:
                assert mine is None or mine.tobytes() == theirs.tobytes()
            else:
                np.testing.assert_allclose(mine.astype(np.float64), theirs.astype(np.float64), atol=2e-2)
    if exact:
        assert ranks.state() == alone.state()


@pytest.mark.parametrize(
    ("name", "reduction"), every_value(CASES, lambda case: (type(COMPRESSORS[case[0]]), case[1]))
)
def test_ranks_of_both_kinds_hold_the_bytes_of_the_host(name: str, reduction: str, gpu: Any) -> None:
    device, kernels = gpu
    settings: dict[str, Any] = {"slice_elements": 512, "reduction": reduction, "topology": TOPOLOGY}
    alone = Simulation(LAYERS, COMPRESSORS[name], 3, **settings)
    mixed = Simulation(LAYERS, COMPRESSORS[name], 3, devices=[HOST, device, device], **settings)
    assert_alike(mixed, alone, exact=name not in INEXACT)
    assert kernels.called
    if name in ("TopK", "DGC", "RedSync", "AdaComp", "topk-bitmap"):
        assert {"encode_indices", "decode_indices", "scatter_mean"} <= kernels.called
    if name == "PowerSGD":
        assert {"subspace_project", "subspace_iterate", "subspace_finish"} <= kernels.called
    elif name.startswith("PowerSGD"):
        assert {"project", "orthogonalise", "back_project", "subtract", "expand"} <= kernels.called


@pytest.mark.parametrize("name", REDUCED)
def test_a_root_on_a_device_adds_up_there(name: str, gpu: Any) -> None:
    device, kernels = gpu
    settings: dict[str, Any] = {"slice_elements": 512, "reduction": "gather"}
    alone = Simulation(LAYERS, COMPRESSORS[name], 3, **settings)
    mixed = Simulation(LAYERS, COMPRESSORS[name], 3, devices=[device, HOST, HOST], **settings)
    assert_alike(mixed, alone, exact=True)
    assert "decode_add" in kernels.called


@pytest.mark.parametrize("name", ["nearest with feedback", "DGC", "PowerSGD", "dgc-momentum"])
def test_a_checkpoint_goes_from_a_device_to_the_host_and_back(name: str, gpu: Any) -> None:
    device, _ = gpu

    def ranks(*devices: Any) -> Simulation:
        return Simulation(LAYERS, COMPRESSORS[name], 2, devices=devices, slice_elements=512)

    first = ranks(device, device)
    for _ in range(2):
        first.step()
    for places in ((HOST, HOST), (device, HOST)):
        second = ranks(*places)
        for old, new in zip(first.pipelines, second.pipelines, strict=True):
            restore(new, snapshot(old))
        assert second.state() == first.state()
        first = second
    assert any(b"".join(rows).strip(b"\0") for rows, _ in first.state())


@pytest.mark.parametrize("moved", ["plan", "order"])
def test_second_residuals_move_on_a_device_as_on_the_host(moved: str, gpu: Any) -> None:
    device, _ = gpu
    states = []
    for places in ([HOST] * 3, [device, HOST, device]):
        ranks = Simulation(
            LAYERS, COMPRESSORS["nearest with feedback"], 3, devices=places, slice_elements=512
        )
        ranks.step()
        for pipeline in ranks.pipelines:
            plan, order = pipeline.plan, list(range(len(LAYERS)))
            if moved == "plan":
                plan = plan_for(LAYERS, Quantize(2, bucket_size=64, rounding="nearest", feedback=True), 1)
            order = order[::-1] if moved == "order" else order
            pipeline.restore(pipeline.step, plan, order)
        states.append(ranks.state())
    assert states[0] == states[1]


def test_a_bucket_begins_behind_the_events_of_its_layers(gpu: Any) -> None:
    device, _ = gpu
    ranks = Simulation(LAYERS, Quantize(4), 2, devices=[device, HOST], slice_elements=1024)
    driver = device.driver
    launched: list[int] = []
    launch = driver.launch
    driver.launch = lambda *arguments: (launched.append(len(driver.events)), launch(*arguments))
    ranks.step()
    marks = {number + 1: layer for number, (kind, layer) in enumerate(driver.events) if kind == "mark"}
    follows = [(at, event) for at, (kind, event) in enumerate(driver.events) if kind == "follow"]
    assert sorted(marks.values()) == list(range(len(LAYERS)))
    assert {marks[event] for _, event in follows} == set(range(len(LAYERS)))
    # The layers of the first bucket, and only they, come before the first kernel.
    first = {marks[event] for at, event in follows if at < launched[0]}
    assert first == set(ranks.pipelines[0].layout.buckets[0].layers.tolist())


@pytest.mark.parametrize("compressor", [Quantize(4), TopK(0.1), DGC(0.1), PowerSGD(2)], ids=lambda c: c.name)
def test_launches_and_waits_of_a_step_do_not_depend_on_the_number_of_layers(
    compressor: Compressor, gpu: Any
) -> None:
    device, _ = gpu
    counts = []
    for number in (3, 40):
        layers = [LayerSpec(f"{i}.weight", (12, 16), "float32", "weight") for i in range(number)]
        ranks = Simulation(layers, compressor, 2, devices=[device, HOST], slice_elements=1 << 20)
        ranks.step()
        before = len(device.driver.launched), device.driver.synchronized
        ranks.step()
        counts.append((len(device.driver.launched) - before[0], device.driver.synchronized - before[1]))
    assert counts[0] == counts[1]


def test_gradients_that_are_late_hold_nobody_up(gpu: Any) -> None:
    device, _ = gpu
    ranks = Simulation(LAYERS, Quantize(4), 2, devices=[device, HOST], slice_elements=1024)
    device.driver.late = 3
    pipeline = ranks.pipelines[0]
    waited = []
    poll = pipeline.poll
    pipeline.poll = lambda: waited.append(poll()) or waited[-1]
    assert_same_step(ranks, Simulation(LAYERS, Quantize(4), 2, slice_elements=1024))
    assert Waiting.DEVICE in waited


def test_a_value_that_is_not_finite_reaches_every_rank(gpu: Any) -> None:
    device, _ = gpu
    ranks = Simulation(LAYERS, Quantize(4, rounding="nearest"), 2, devices=[device, HOST])
    gradients = ranks.gradients()
    gradients[0][0][7] = np.inf
    outcome = ranks.step(gradients)
    assert outcome.result.nonfinite.tolist() == [True, False, False, False, False, False]
    assert outcome.committed == [False, False]
    assert np.isnan(outcome.mean(0)).all()


@pytest.mark.parametrize("blocks", [1, 4])
def test_a_controller_chooses_on_a_device_what_it_chooses_on_the_host(blocks: int, gpu: Any) -> None:
    device, kernels = gpu
    plans = []
    for devices in ([HOST, HOST], [device, HOST]):
        controller = LGreCo(every_steps=3, blocks=blocks)
        ranks = Simulation(
            LAYERS, Quantize(4, 64), 2, devices=devices, controller=controller, slice_elements=1024
        )
        for _ in range(9):
            gradients = ranks.gradients()
            for rank in gradients:
                rank[0] *= 30  # so that bits are worth more here
                rank[4][:600] *= 9
            ranks.step(gradients)
        plans.append([(a.layer, a.level) for a in ranks.pipelines[0].plan.assignments])
    assert plans[0] == plans[1]
    assert len({level for _, level in plans[0]}) > 1
    assert any(isinstance(level, tuple) for _, level in plans[0]) == (blocks > 1)
    assert {"losses", "moments"} <= kernels.called


@pytest.mark.parametrize("byte", [0xFF, 0x00])
def test_indices_that_cannot_be_are_refused_by_the_rank_that_reads_them(byte: int, gpu: Any) -> None:
    device, kernels = gpu

    def tamper(source: int, destination: int, message: np.ndarray) -> np.ndarray:
        if source == 1 and len(message) > 300:
            message[100:300] = byte  # among the raw indices, which come first
        return message

    layer = LayerSpec("a.weight", (40, 50), "float32", "weight")
    ranks = Simulation([layer], TopK(0.1, indices="raw"), 2, devices=[device, HOST], tamper=tamper)
    errors = ranks.attempt()
    assert isinstance(errors[0], WireFormatError)
    assert "rank 1 sent an impossible sparse payload" in str(errors[0])
    assert "decode_indices" in kernels.called
