"""How large buckets are where no setting says: one size for all ranks, whatever their gradients lie on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from exchange.test_engine import ranks

from gradcomp import (
    Compressor,
    Config,
    Identity,
    LayerSpec,
    PlanMismatchError,
    Quantize,
    TopK,
    WireFormatError,
)
from gradcomp.core.config import DEVICE_SLICE, FINE_SLICE, HOST_SLICE
from gradcomp.core.topology import Topology
from gradcomp.exchange import slices
from gradcomp.exchange.agreement import agree, describe
from gradcomp.exchange.pipeline import Pipeline
from gradcomp.exchange.settings import Settings
from gradcomp.exchange.slices import agree_on_slices, elements_for
from gradcomp.kernels.devices import HOST, Device
from gradcomp.testing.simulation import plan_for
from gradcomp.transport.inprocess import World

__all__ = ["ranks"]  # the fixture

LAYERS = [LayerSpec("a.weight", (40, 50))]


#: More than one bucket of the finest slices.
LARGE = [LayerSpec("a.weight", (2, FINE_SLICE))]


def agreed(
    on_device: Sequence[bool],
    configs: Sequence[Config],
    tamper=None,
    *,
    layers: Sequence[LayerSpec] = LAYERS,
    compressor: Compressor = Quantize(4),  # noqa: B008 - it is frozen
    hosts: Sequence[int] | None = None,
) -> list[Config | Exception]:
    """What every rank comes to, as it does when an exchanger is made."""
    transports = World(len(on_device), tamper=tamper).transports()
    topology = Topology(tuple(hosts or [0] * len(on_device)))
    plan = plan_for(layers, compressor)

    def rank(number: int) -> Config | Exception:
        transport, config = transports[number], configs[number]
        try:
            agree(transport, describe(layers, plan, config))
            return agree_on_slices(transport, config, on_device[number], topology, layers, plan)
        except Exception as error:  # noqa: BLE001  (the verdict is the test's)
            return error

    with ThreadPoolExecutor(len(on_device)) as threads:
        return list(threads.map(rank, range(len(on_device))))


@pytest.mark.parametrize(
    ("on_device", "setting", "elements"),
    [
        ([True, True, True], Config(), DEVICE_SLICE),
        ([False, False], Config(), HOST_SLICE),
        ([True, False, True], Config(), HOST_SLICE),
        ([True, False], Config(slice_elements=4096), 4096),
    ],
    ids=["all on devices", "none", "mixed", "a setting"],
)
def test_ranks_come_to_one_size(on_device: list[bool], setting: Config, elements: int) -> None:
    found = agreed(on_device, [setting] * len(on_device))
    assert [config.slice_elements for config in found] == [elements] * len(on_device)


def test_a_setting_on_some_ranks_is_an_error_on_all() -> None:
    found = agreed([True, True], [Config(slice_elements=DEVICE_SLICE), Config()])
    assert [type(error) for error in found] == [PlanMismatchError] * 2
    assert "slice_elements" in str(found[0])


def test_an_answer_that_cannot_be_is_refused() -> None:
    def tamper(source: int, destination: int, message: np.ndarray) -> np.ndarray:
        return np.full_like(message, 7) if source == 1 and len(message) == 1 else message

    found = agreed([True, True], [Config()] * 2, tamper)
    assert isinstance(found[0], WireFormatError)


# --- by the rate of the link --------------------------------------------------------------------------------


def link(monkeypatch: pytest.MonkeyPatch, *mbit: float) -> list[int]:
    """Make every rank's link to the next one as fast; return a list of the sizes that rank 0 measures."""
    measured: list[int] = []

    def shift(transport, nbytes: int, wait_for, *, repeats: int, choose) -> float:
        if transport.rank == 0:
            measured.append(nbytes)
        return 1e-3 + 8e-6 * nbytes / mbit[transport.rank % len(mbit)]

    monkeypatch.setattr(slices, "shift", shift)
    return measured


@pytest.mark.parametrize(
    ("world", "mbit", "reduction", "elements"),
    [
        (2, 94, "sra", 1 << 18),
        (4, 94, "sra", 1 << 18),
        (8, 94, "sra", 1 << 18),
        (16, 94, "sra", 1 << 19),  # messages to more ranks cost more time of the processor
        (16, 9, "sra", 1 << 19),
        (32, 94, "sra", 1 << 20),
        (2, 940, "sra", 1 << 20),
        (4, 940, "sra", 1 << 20),
        (4, 94, "ring", 1 << 18),
        (6, 94, "ring", 1 << 19),  # as do more rounds
        (8, 94, "ring", 1 << 20),
        (4, 94, "gather", 1 << 18),
        (4, 94, "auto", 1 << 18),
    ],
)
def test_buckets_are_as_small_as_the_link_is_slow(monkeypatch, world, mbit, reduction, elements) -> None:
    measured = link(monkeypatch, mbit)
    configs = [Config(reduction=reduction)] * world
    found = agreed([False] * world, configs, layers=LARGE, hosts=range(world))
    assert [config.slice_elements for config in found] == [elements] * world
    assert measured == [1 << 10, 1 << 18]


def test_the_slowest_link_between_hosts_decides_for_all(monkeypatch) -> None:
    link(monkeypatch, 940, 940, 94, 940)
    settings = {"layers": LARGE, "configs": [Config()] * 4, "on_device": [False] * 4}
    assert {c.slice_elements for c in agreed(**settings, hosts=range(4))} == {1 << 18}
    # From rank 2 to rank 3 nothing crosses between these hosts.
    assert {c.slice_elements for c in agreed(**settings, hosts=(0, 0, 1, 1))} == {1 << 20}


@pytest.mark.parametrize(
    ("changes", "elements"),
    [
        ({"hosts": (0, 0)}, HOST_SLICE),
        ({"layers": LAYERS}, HOST_SLICE),  # one bucket anyway
        ({"configs": [Config(deterministic=True)] * 2}, HOST_SLICE),
        ({"configs": [Config(slice_elements=4096)] * 2}, 4096),
        ({"on_device": (True, False)}, HOST_SLICE),
        # Sums have no gaps that other buckets could fill.
        ({"layers": [LayerSpec("a.weight", (16, FINE_SLICE))], "compressor": Identity()}, HOST_SLICE),
    ],
    ids=["one host", "a small model", "deterministic", "a setting", "mixed devices", "uncompressed"],
)
def test_nothing_is_measured_where_the_choice_does_not_depend_on_it(monkeypatch, changes, elements) -> None:
    measured = link(monkeypatch, 94)
    settings = {"layers": LARGE, "hosts": (0, 1), "configs": [Config()] * 2, "on_device": (False, False)}
    found = agreed(**{**settings, **changes})
    assert [config.slice_elements for config in found] == [elements] * 2
    assert not measured


def test_few_bytes_make_large_buckets(monkeypatch) -> None:
    link(monkeypatch, 94)
    found = agreed([False] * 2, [Config()] * 2, layers=LARGE, hosts=(0, 1), compressor=TopK(0.001))
    assert {config.slice_elements for config in found} == {HOST_SLICE}


@pytest.mark.parametrize("seconds", [math.nan, math.inf])
def test_a_time_that_cannot_be_is_refused_on_every_rank(monkeypatch, seconds: float) -> None:
    def shift(transport, nbytes: int, wait_for, *, repeats: int, choose) -> float:
        return seconds if transport.rank and nbytes > 1 << 10 else 1e-3

    monkeypatch.setattr(slices, "shift", shift)
    found = agreed([False] * 2, [Config()] * 2, layers=LARGE, hosts=(0, 1))
    assert [type(error) for error in found] == [WireFormatError] * 2
    assert "rank 1" in str(found[0])


def test_links_are_measured_in_messages_that_no_counter_counts() -> None:
    def rank(transport) -> tuple[Config, int]:
        plan = plan_for(LARGE, Quantize(4))
        return agree_on_slices(
            transport, Config(), False, Topology((0, 1)), LARGE, plan
        ), transport.bytes_sent

    transports = World(2).transports()
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(rank, transports))
    assert found[0] == found[1]
    assert FINE_SLICE <= found[0][0].slice_elements <= HOST_SLICE
    assert found[0][1] < 100


def test_a_bucket_is_on_the_wire_for_longer_than_its_rounds_take_the_processor() -> None:
    for peers in (1, 3, 7, 100):
        for exponent in np.linspace(-11, -5, 30):
            second = 10.0**exponent
            elements = elements_for(second, 2, peers)
            least = slices.LEAST_WIRE * 2 * (slices.ROUND_SECONDS + slices.PEER_SECONDS * peers)
            enough = max(FINE_SLICE, slices.RANK_ELEMENTS * (peers + 1))
            assert elements == HOST_SLICE or (elements * second >= least and elements >= enough)
            assert elements / 2 * second < least or elements / 2 < enough


def test_a_pipeline_that_nobody_chose_for_takes_the_host_s() -> None:
    (transport,) = World(1).transports()
    pipeline = Pipeline(LAYERS, plan_for(LAYERS, Quantize(4)), transport, Config(), lambda layer: 0)
    assert pipeline.config.slice_elements == HOST_SLICE


@pytest.mark.parametrize(("second", "elements"), [("device", DEVICE_SLICE), ("host", HOST_SLICE)])
def test_exchangers_are_made_with_it(second: str, elements: int, gpu: Device, ranks) -> None:
    devices = [gpu, {"host": HOST, "device": gpu}[second]]
    world = ranks(of=lambda rank: Settings(device=devices[rank]))
    assert [made.pipeline.config.slice_elements for made in world.exchangers] == [elements] * 2
    assert 16 <= DEVICE_SLICE / 2**20 <= 32
