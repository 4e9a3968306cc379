"""Between a device's kernels and NCCL, payloads stay on the device: steps over the stand-ins of both.

Inside hosts NCCL's stand-in sums for `hierarchical`, to any rank, and broadcasts from it.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cuda_on_cpu.nccl import hosts_over_nccl, nccl_ranks
from exchange.test_device_calls import Copies
from exchange.test_devices import LAYERS, TOPOLOGY, assert_alike
from kernels import standin
from tiers import every_value

from gradcomp import DGC, Cast, Compressor, LayerSpec, OneBit, PowerSGD, Quantize, ScaledSign, Signum, TopK
from gradcomp.compress import Identity
from gradcomp.core.topology import Topology
from gradcomp.kernels.cuda import mirrors
from gradcomp.kernels.cuda.mirrors import DeviceMirror
from gradcomp.kernels.devices import HOST, Device
from gradcomp.reduce.header import ByteHeader
from gradcomp.testing.simulation import Simulation, same_bytes, true_mean
from gradcomp.transport.base import host_allocator, wait

DOUBLE = LayerSpec("e.weight", (50,), "float64", "weight")

COMPRESSORS: dict[str, Compressor] = {
    "none": Identity(),
    "4 bits": Quantize(4, bucket_size=128),
    "3 bits, with feedback": Quantize(3, bucket_size=100, rounding="nearest"),
    "bfloat16": Cast("bfloat16"),
    "sign": ScaledSign(),
    "one bit": OneBit(),
    "vote": Signum(),
    "TopK": TopK(0.1, zeros=True),
    "TopK of 4 bits": TopK(0.1, values=Quantize(4), zeros=True),
    "TopK without zeros": TopK(0.1),
    "TopK, deflated": TopK(0.1, indices="deflate"),
    "DGC": DGC(0.1),
    "PowerSGD": PowerSGD(2),
}
#: That make partial sums, which votes do not have.
PARTIAL = ("ring", "tree", "hierarchical")
OTHERS = ("all_to_all", "gather", "parameter_server", "parameter_server:servers=2")
STAY = {*COMPRESSORS} - {"TopK without zeros", "TopK, deflated", "DGC"}


@pytest.fixture
def gpu() -> Iterator[Device]:
    with standin.device(order=2) as (device, _):
        yield device


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[DeviceMirror]:
    """All device mirrors there are."""
    found: list[DeviceMirror] = []
    monkeypatch.setattr(
        "gradcomp.transport.nccl.mirror", lambda *given: found.append(mirrors.mirror(*given)) or found[-1]
    )
    return found


def over_nccl(
    device: Device, compressor: Compressor, layers: Any = LAYERS, world: int = 3, **settings: Any
) -> Simulation:
    transports: list[Any] = nccl_ranks(world)
    for transport in transports:
        driver = transport._driver
        driver.reaches = lambda address, own=driver.reaches: own(address) or device.driver.reaches(address)
    return Simulation(layers, compressor, world, devices=[device] * world, transports=transports, **settings)


def step(ranks: Simulation, gradients: Any) -> Any:
    return ranks.step(gradients, during=breathe)


def breathe() -> None:
    """Let the threads of the streams go on."""
    time.sleep(1e-5)


CASES = [(name, "sra") for name in COMPRESSORS]
CASES += [
    (name, reduction)
    for name, compressor in COMPRESSORS.items()
    if compressor.traits.reduces
    for reduction in (OTHERS if name == "vote" else OTHERS + PARTIAL)
]


@pytest.mark.parametrize(("name", "reduction"), every_value(CASES))
def test_the_same_bytes_as_on_the_host(
    name: str, reduction: str, gpu: Device, made: list[DeviceMirror]
) -> None:
    layers = [*LAYERS, DOUBLE] if name == "none" else LAYERS
    settings: dict[str, Any] = {"slice_elements": 900, "reduction": reduction, "topology": TOPOLOGY}
    alone = Simulation(layers, COMPRESSORS[name], 3, **settings)
    ranks = over_nccl(gpu, COMPRESSORS[name], layers, **settings)
    assert_alike(ranks, alone, exact=name != "PowerSGD", during=breathe)
    assert [p.transport.bytes_sent for p in ranks.pipelines] == [
        p.transport.bytes_sent for p in alone.pipelines
    ]
    assert bool(made) == (name in STAY)
    for message in made:
        assert not payload(message).any(), "written on the host"


def payload(message: DeviceMirror) -> Any:
    """The host's side of a device mirror without headers."""
    found = np.array(message)
    for part, _ in message.host_parts():
        begin = part.ctypes.data - message.ctypes.data
        found[begin : begin + len(part)] = 0
    return found


def test_only_headers_are_copied(gpu: Device, made: list[DeviceMirror]) -> None:
    ranks = over_nccl(gpu, Quantize(4), [LayerSpec("a.weight", (300, 400), "float32", "weight")])
    step(ranks, ranks.gradients())
    copies = [Copies(driver) for driver in (gpu.driver, *(p.transport._driver for p in ranks.pipelines))]
    step(ranks, ranks.gradients())
    copied = [size for each in copies for _, size in each.up + each.down]
    assert made
    assert max(copied) < 300 * 400 // 2 // 3 / 5  # of a chunk
    # Headers of one layer: of chunks to and from two ranks each; of the own chunk's mean, once, and of two others.
    assert copied.count(ByteHeader.size(1)) == 3 * (2 + 2 + 1 + 2)


def test_what_is_not_finite_is_not_finite_everywhere(gpu: Device) -> None:
    for compressor in (Identity(), Quantize(4)):
        ranks = over_nccl(gpu, compressor)
        gradients = ranks.gradients()
        gradients[1][0][7] = np.inf
        outcome = step(ranks, gradients)
        assert outcome.committed == [False] * 3
        assert outcome.result.nonfinite.tolist() == [True, False, False, False, False, False]
        assert np.isnan(outcome.mean(0).astype(np.float64)).all()
        assert np.isfinite(outcome.mean(4)).all()


def test_of_other_places_messages_are_the_hosts(gpu: Device) -> None:
    transport = nccl_ranks(1)[0]
    assert transport.allocator(HOST) is host_allocator
    assert transport.allocator(gpu) is host_allocator  # another device than the communicator's


def test_messages_of_both_kinds_travel_together(gpu: Device) -> None:
    ranks = over_nccl(gpu, Quantize(4), world=2)
    transports = [p.transport for p in ranks.pipelines]
    buffers = [t.allocator(gpu)(100, [(0, 10)]) for t in transports]
    for number, buffer in enumerate(buffers):
        buffer[:10] = 40 + number
        mirrors.fill(buffer[20:60], 7 + number)
    plain = [np.full(30, 90 + number, np.uint8) for number in range(2)]
    handles = [
        transports[0].exchange([(1, plain[0])], [(1, buffers[0])]),
        transports[1].exchange([(0, buffers[1])], [(0, plain[1])]),
    ]
    for handle in handles:
        wait(handle)
    assert plain[1].tolist() == [90] * 30
    assert buffers[0][:10].tolist() == [41] * 10
    assert list(ctypes.string_at(buffers[0].address, 100)) == [41] * 10 + [0] * 10 + [8] * 40 + [0] * 40
    with pytest.raises(AssertionError, match="cannot send itself"):
        transports[0].alltoallv(buffers[0], [50, 50], np.zeros(100, np.uint8), [50, 50])


# --- sums inside hosts ----------------------------------------------------------------------------------------

SUMMED: dict[str, Compressor] = {
    "none": Cast("float32"),
    "4 bits": Quantize(4, bucket_size=33),
    "3 bits, with feedback": Quantize(3, bucket_size=100, rounding="nearest", feedback=True),
    "bits by bucket": Quantize(4, bucket_size=32, allocate="bucket", feedback=True),
    "one bit": OneBit(50),
}
HALVES = [LayerSpec("empty", (0,)), LayerSpec("half", (129,), "float16"), LayerSpec("odd", (301,))]


def hierarchies(
    hosts: tuple[int, ...], compressor: Compressor, devices: Any = (), **settings: Any
) -> tuple[Simulation, Simulation]:
    """The same ranks twice: messages go to leaders in process; NCCL inside hosts sums and broadcasts."""
    settings = {"topology": Topology(hosts), "reduction": "hierarchical", "slice_elements": 100, **settings}
    transports: list[Any] = hosts_over_nccl(hosts)
    return (
        Simulation(HALVES, compressor, len(hosts), **settings),
        Simulation(HALVES, compressor, len(hosts), transports=transports, devices=devices, **settings),
    )


TWOS = [(0,), (0, 0), (0, 1), (0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 1, 2)]


@pytest.mark.parametrize(("hosts", "name"), every_value([(h, name) for name in SUMMED for h in TWOS]))
def test_sums_of_two_have_the_bytes_of_messages(hosts: tuple[int, ...], name: str) -> None:
    messages, sums = hierarchies(hosts, SUMMED[name])
    for _ in range(3):
        gradients = messages.gradients()
        want = messages.step([[g.copy() for g in rank] for rank in gradients]).all_means()
        assert all(map(same_bytes, step(sums, gradients).all_means(), want))
    for ours, theirs in zip(sums.pipelines, messages.pipelines, strict=True):
        assert ours.transport.bytes_sent == theirs.transport.bytes_sent
        for layer in range(len(HALVES)):
            assert same_bytes(ours.residuals.first.value(layer), theirs.residuals.first.value(layer))


THREES = [(0, 0, 0), (0, 0, 0, 1), (0, 1, 1, 0, 1)]


@pytest.mark.parametrize("hosts", THREES)
def test_longer_sums_have_the_order_of_the_engine(hosts: tuple[int, ...]) -> None:
    messages, sums = hierarchies(hosts, SUMMED["none"])
    gradients = messages.gradients()
    want, means = messages.step(gradients), step(sums, gradients)
    assert not same_bytes(means.mean(2), want.mean(2))  # the stand-in's order is another
    for layer, eps in ((1, np.finfo(np.float16).eps), (2, np.finfo(np.float32).eps)):
        sizes = np.mean([np.abs(rank[layer].astype(np.float64)) for rank in gradients], axis=0)
        error = np.abs(means.mean(layer).astype(np.float64) - true_mean(gradients, layer))
        assert (error <= len(hosts) * eps * sizes).all()


@pytest.mark.parametrize("hosts", THREES[1:])
@pytest.mark.parametrize("name", ["bits by bucket", "one bit"])
def test_feedback_telescopes_over_sums_of_the_engine(hosts: tuple[int, ...], name: str) -> None:
    _, ranks = hierarchies(hosts, SUMMED[name])
    missing = np.zeros(301)
    for _ in range(8):
        gradients = ranks.gradients()
        missing += true_mean(gradients, 2) - step(ranks, gradients).mean(2).astype(np.float64)
        owed = ranks.owed(2)
        np.testing.assert_allclose(missing, owed, rtol=0, atol=4e-6 * max(1.0, np.abs(owed).max()))


@pytest.mark.parametrize("values", [(np.nan, 0.0), (3e38, 3e38)], ids=["of a rank", "of a host's sum"])
def test_what_is_not_finite_in_a_sum_of_the_engine_is_so_everywhere(values: tuple[float, float]) -> None:
    _, ranks = hierarchies((0, 0, 1, 1), SUMMED["4 bits"], slice_elements=1000)
    gradients = ranks.gradients()
    gradients[2][2][7], gradients[3][2][7] = values
    outcome = step(ranks, gradients)
    assert outcome.committed == [False] * 4
    assert outcome.result.nonfinite.tolist() == [False, False, True]
    assert np.isnan(outcome.mean(2)).all()


def test_gradients_on_a_device_are_summed_from_pinned_memory(gpu: Device) -> None:
    compressor = SUMMED["3 bits, with feedback"]
    messages, sums = hierarchies((0, 0, 1), compressor, devices=[gpu] * 3, slice_elements=300)
    for _ in range(2):
        gradients = messages.gradients()
        want = messages.step([[g.copy() for g in rank] for rank in gradients]).all_means()
        assert all(map(same_bytes, step(sums, gradients).all_means(), want))


def test_a_round_waits_for_the_ranks_whose_values_it_brings() -> None:
    """Clocks are aligned by this: a member may have sent its part before another member has begun."""
    _, ranks = hierarchies((0, 0, 0), SUMMED["4 bits"], slice_elements=1000)
    step(ranks, ranks.gradients())
    senders = [
        [span.senders for span in pipeline.trace.spans() if span.name == "send" and span.bucket == 0]
        for pipeline in ranks.pipelines
    ]
    assert [[sorted(each) for each in rank] for rank in senders] == [[[1, 2], []], [[], [0]], [[], [0]]]
