"""How large buckets are where no setting says: one size for all ranks, whatever their gradients lie on."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from exchange.test_engine import ranks

from gradcomp import Config, LayerSpec, PlanMismatchError, Quantize, WireFormatError
from gradcomp.core.config import DEVICE_SLICE, HOST_SLICE
from gradcomp.exchange.agreement import agree, agree_on_slices, describe
from gradcomp.exchange.pipeline import Pipeline
from gradcomp.exchange.settings import Settings
from gradcomp.kernels.devices import HOST, Device
from gradcomp.testing.simulation import plan_for
from gradcomp.transport.inprocess import World

__all__ = ["ranks"]  # the fixture

LAYERS = [LayerSpec("a.weight", (40, 50))]


def agreed(on_device: Sequence[bool], configs: Sequence[Config], tamper=None) -> list[Config | Exception]:
    """What every rank comes to, as it does when an exchanger is made."""
    transports = World(len(on_device), tamper=tamper).transports()
    plan = plan_for(LAYERS, Quantize(4))

    def rank(number: int) -> Config | Exception:
        try:
            agree(transports[number], describe(LAYERS, plan, configs[number]))
            return agree_on_slices(transports[number], configs[number], on_device[number])
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
