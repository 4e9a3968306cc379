"""While a device works on one bucket, the program goes on with others; what waits, and what becomes of errors then."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from exchange.test_devices import assert_same_step

from gradcomp import (
    DGC,
    Compressor,
    DeviceError,
    Filter,
    LayerSpec,
    MomentumCorrection,
    Policy,
    PowerSGD,
    Quantize,
    TopK,
    WireFormatError,
)
from gradcomp.exchange.waiting import Waiting
from gradcomp.kernels.cuda.driver import Driver
from gradcomp.kernels.cuda.layout import Launch, Source
from gradcomp.kernels.cuda.prepared import Plans
from gradcomp.kernels.devices import HOST
from gradcomp.testing.simulation import Simulation

LAYERS = [LayerSpec(f"{i}.weight", (24, 40), "float32", "weight") for i in range(3)]
FOUR_BITS = Quantize(4, bucket_size=64, rounding="nearest")
ONE_LAYER = 960  # elements


def ranks_of(gpu: Any, compressor: Compressor = FOUR_BITS, world: int = 2, **settings: Any) -> Simulation:
    devices = [gpu] + [HOST] * (world - 1)
    return Simulation(LAYERS, compressor, world, devices=devices, slice_elements=ONE_LAYER, **settings)


def hand_in(ranks: Simulation, gradients: Any) -> None:
    for rank, own in zip(ranks.ranks, gradients, strict=True):
        rank.outputs.clear()
        rank.pipeline.open()
        for layer, gradient in enumerate(own):
            rank.submit(layer, gradient)
        rank.pipeline.arrivals.flush()


def encodes(gpu: Any, name: str = "encode") -> int:
    return sum(each.startswith(name) for each, _ in gpu.driver.launched)


#: By a kernel of an encode, of which there is one for a bucket.
COMPRESSORS = {
    "encode": FOUR_BITS,
    "contribute_histogram": TopK(0.1, zeros=True),
    "scan": TopK(0.1),
    "project": PowerSGD(2),
}


@pytest.mark.parametrize("kernel", COMPRESSORS)
def test_the_next_bucket_is_encoded_while_the_first_one_is_not_through(kernel: str, gpu: Any) -> None:
    ranks = ranks_of(gpu, COMPRESSORS[kernel])
    ranks.step()
    first, one = ranks.pipelines[0], encodes(gpu, kernel) // len(LAYERS)
    assert one > 0
    before = encodes(gpu, kernel)
    hand_in(ranks, ranks.gradients())
    issued, blocked = ranks.ranks[0].transport._number, gpu.driver.synchronized
    gpu.driver.held = True
    assert {first.poll() for _ in range(9)} == {Waiting.DEVICE}
    assert encodes(gpu, kernel) - before == 2 * one  # and of no further one, which takes memory
    assert ranks.ranks[0].transport._number == issued
    assert first.position[1:] == (0, -1)
    gpu.driver.held = False
    first.poll()
    assert ranks.ranks[0].transport._number > issued
    assert gpu.driver.synchronized == blocked


def test_without_overlap_buckets_come_one_by_one(gpu: Any) -> None:
    ranks = ranks_of(gpu, overlap=False)
    ranks.step()
    one, before = encodes(gpu) // len(LAYERS), encodes(gpu)
    hand_in(ranks, ranks.gradients())
    gpu.driver.held = True
    for _ in range(9):
        ranks.pipelines[0].poll()
    assert encodes(gpu) - before == one


@pytest.mark.parametrize(
    ("compressor", "reduction"),
    [(FOUR_BITS, "sra"), (FOUR_BITS, "ring"), (TopK(0.1, zeros=True), "sra"), (TopK(0.1), "sra")],
)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_means_and_state_are_those_of_the_host_whenever_events_come(
    world: int, compressor: Compressor, reduction: str, gpu: Any
) -> None:
    chance = random.Random(world)

    def during() -> None:
        gpu.driver.held = chance.random() < 0.7

    settings: dict[str, Any] = {"slice_elements": ONE_LAYER, "reduction": reduction}
    for places in ([gpu] * world, [HOST] * (world - 1) + [gpu]):
        alone = Simulation(LAYERS, compressor, world, **settings)
        ranks = Simulation(LAYERS, compressor, world, devices=places, shuffle=True, **settings)
        for _ in range(2):
            assert_same_step(ranks, alone, during=during)
        assert ranks.state() == alone.state()


@pytest.mark.parametrize(
    "compressor",
    [TopK(0.1, feedback=False), TopK(0.1, values=Quantize(4), feedback=False), MomentumCorrection(TopK(0.1))],
    ids=["exact", "coded", "masked"],
)
def test_a_selection_of_any_size_is_that_of_the_host(compressor: Compressor, gpu: Any) -> None:
    """Of as many elements as before, of fewer, of none; in a call that is kept, and in a new one."""
    settings: dict[str, Any] = {"slice_elements": ONE_LAYER, "reorder": False}
    alone = Simulation(LAYERS, compressor, 2, **settings)
    ranks = Simulation(LAYERS, compressor, 2, devices=[gpu, HOST], **settings)
    for kept in (960, 960, 960, 20, 3, 0, 960, 960, 20):
        gradients = alone.gradients()
        for layer in gradients[0]:
            layer[kept:] = 0
        assert_same_step(ranks, alone, gradients)
    assert ranks.state() == alone.state()


def test_messages_of_one_size_may_hold_other_counts(gpu: Any) -> None:
    """Kernel calls are kept by the views of messages, which stay while sizes do."""
    settings: dict[str, Any] = {"slice_elements": 3 * ONE_LAYER, "reorder": False}
    compressor = TopK(0.1, feedback=False)
    alone = Simulation(LAYERS, compressor, 2, **settings)
    ranks = Simulation(LAYERS, compressor, 2, devices=[gpu, HOST], **settings)
    assert len(ranks.pipelines[0].layout.buckets) == 1
    for layer in (0, 0, 0, 1, 1, 2, 0):
        gradients = alone.gradients()
        for rank in gradients:
            rank[layer][20:] = 0
        assert_same_step(ranks, alone, gradients)


@pytest.mark.parametrize(
    ("compressor", "waits"), [(TopK(0.1, feedback=False), 3), (TopK(0.1, feedback=False, zeros=True), 2)]
)
def test_a_selection_blocks_nobody(compressor: Compressor, waits: int, gpu: Any) -> None:
    """An event behind what is selected, one behind the payload, one behind the means."""
    ranks = ranks_of(gpu, compressor, reorder=False)
    ranks.step()
    for kept in (960, 20, 0):
        gradients = ranks.gradients()
        for layer in gradients[0]:
            layer[kept:] = 0
        before = gpu.driver.waited, gpu.driver.synchronized
        ranks.step(gradients)
        assert gpu.driver.waited - before[0] == waits * len(LAYERS)
        assert gpu.driver.synchronized == before[1]


def test_a_threshold_is_waited_for_and_nothing_else(gpu: Any) -> None:
    """What is selected of it is encoded and decoded behind events."""
    ranks = ranks_of(gpu, DGC(0.1, momentum_factor=0.0))
    ranks.step()
    before = gpu.driver.waited
    ranks.step()
    assert gpu.driver.waited - before == 2 * len(LAYERS)


def test_buckets_of_more_and_of_fewer_rounds_begin_once(gpu: Any) -> None:
    """The last bucket lands before the one in front of it; its gradients come late."""
    chance = random.Random(7)
    layers = [*LAYERS[:2], LayerSpec("b", (960,), "float32", "bias")]
    policy = Policy(PowerSGD(2), filter=Filter(min_elements=0))
    gpu.driver.late = 3

    def during() -> None:
        gpu.driver.held = chance.random() < 0.7

    ranks = Simulation(layers, policy, 2, devices=[gpu, HOST], slice_elements=ONE_LAYER, shuffle=True)
    for _ in range(2):
        ranks.step(during=during)
        assert [len(p._exchange._flags) for p in ranks.pipelines] == [3, 3]


@pytest.mark.parametrize(("compressor", "kernel"), [(FOUR_BITS, "encode"), (TopK(0.1), "encode_streams")])
def test_a_device_that_fails_behind_a_kernel_is_an_error_of_its_rank(
    compressor: Compressor, kernel: str, gpu: Any, monkeypatch: Any
) -> None:
    """Behind an encode, and between selecting and encoding."""
    ranks = ranks_of(gpu, compressor)
    ranks.step()
    hand_in(ranks, ranks.gradients())
    before, reached = encodes(gpu, kernel), gpu.driver.reached

    def fails(event: Any) -> bool:
        if encodes(gpu, kernel) > before:
            raise DeviceError("cuda:0 failed: an illegal memory access was encountered")
        return bool(reached(event))

    monkeypatch.setattr(gpu.driver, "reached", fails)
    with pytest.raises(DeviceError, match="illegal memory access"):
        ranks.pipelines[0].poll()


def test_a_device_that_fails_while_a_step_waits_for_it_is_an_error_of_its_rank(
    gpu: Any, monkeypatch: Any
) -> None:
    ranks = ranks_of(gpu)
    ranks.step()
    hand_in(ranks, ranks.gradients())
    gpu.driver.held = True
    assert ranks.pipelines[0].poll() is Waiting.DEVICE

    def fails(event: Any) -> bool:
        raise DeviceError("cuda:0 failed: an illegal memory access was encountered")

    monkeypatch.setattr(gpu.driver, "reached", fails)
    with pytest.raises(DeviceError, match="illegal memory access"):
        ranks.pipelines[0].poll()


def test_after_an_error_the_device_is_waited_for(gpu: Any, monkeypatch: Any) -> None:
    """Whoever hears of it may free gradients that kernels of another bucket still read."""
    ranks = ranks_of(gpu)
    ranks.step()
    hand_in(ranks, ranks.gradients())
    gpu.driver.held = True
    first = ranks.pipelines[0]
    first.poll()
    asked = []
    reached = gpu.driver.reached

    def soon(event: Any) -> bool:
        asked.append(event)
        gpu.driver.held = len(asked) < 4
        return reached(event)

    def breaks() -> Waiting:
        monkeypatch.setattr(gpu.driver, "reached", soon)
        raise WireFormatError("rank 1 sent something else")

    monkeypatch.setattr(first._exchange._in_flight[0], "prepare", breaks)
    with pytest.raises(WireFormatError):
        first.poll()
    assert len(asked) == 4


class _Recording:
    """A driver that starts nothing; events come when they are told."""

    stream = 7

    def __init__(self) -> None:
        self.come = False
        self.taken: list[np.ndarray] = []
        self.synchronized = 0

    def allocate(self, nbytes: int) -> Any:
        return type("Block", (), {"address": 1 << 40})()

    def pinned(self, nbytes: int) -> np.ndarray:
        self.taken.append(np.zeros(nbytes, np.uint8))
        return self.taken[-1]

    def function(self, *_: object) -> str:
        return "kernel"

    def upload(self, *_: object) -> None:
        pass

    launch = zero = download = upload

    def mark(self, stream: int) -> object:
        assert stream == self.stream
        return object()

    def reached(self, event: object) -> bool:
        return self.come

    def synchronize(self) -> None:
        self.synchronized += 1


def starter(driver: Driver) -> Any:
    """Starts a call."""
    plans = Plans(driver)
    notes = np.zeros(3, np.uint8)

    def write_down(call: Any) -> None:
        call.launches.append(Launch("kernel", 1, 32, (call.result(notes, Source(0)),)))

    def start() -> Any:
        with plans.together() as pending:
            plans.run("a call", write_down, (notes,))
        return pending

    return start


def test_what_nobody_waits_for_any_more_is_used_again_when_the_device_is_through() -> None:
    driver: Any = _Recording()
    start = starter(driver)
    forgotten = start()
    assert len(driver.taken) == 1
    del forgotten
    second = start()
    assert len(driver.taken) == 2  # the first may still be written to
    driver.come = True
    second.finish()
    for _ in range(3):
        start().finish()
    both = start(), start()
    assert len(driver.taken) == 2
    assert driver.synchronized == 0
    del both


def test_finishing_early_waits() -> None:
    driver: Any = _Recording()
    start = starter(driver)
    pending = start()
    assert not pending.done()
    pending.finish()
    assert driver.synchronized == 1
    assert pending.done()
