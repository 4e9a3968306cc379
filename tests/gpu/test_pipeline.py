"""Whole steps on a GPU: the host's means and state, launches that do not grow with the layers, memory from a pool."""

from __future__ import annotations

from typing import Any

import pytest
from exchange.test_devices import CASES, COMPRESSORS, INEXACT, LAYERS, TOPOLOGY, assert_alike

from gradcomp import LayerSpec, PowerSGD, Quantize, TopK
from gradcomp.kernels import devices
from gradcomp.kernels.cuda import driver as driver_module
from gradcomp.kernels.devices import HOST
from gradcomp.testing.simulation import Simulation


@pytest.mark.parametrize(("name", "reduction"), CASES)
def test_ranks_of_both_kinds_hold_the_bytes_of_the_host(name: str, reduction: str) -> None:
    device = devices.cuda(0)
    settings: dict[str, Any] = {"slice_elements": 512, "reduction": reduction, "topology": TOPOLOGY}
    alone = Simulation(LAYERS, COMPRESSORS[name], 3, **settings)
    mixed = Simulation(LAYERS, COMPRESSORS[name], 3, devices=[HOST, device, device], **settings)
    assert_alike(mixed, alone, exact=name not in INEXACT)


@pytest.mark.parametrize("compressor", [Quantize(4), TopK(0.1), PowerSGD(2)], ids=lambda c: c.family_string())
def test_launches_of_a_step_do_not_grow_with_the_layers(
    compressor: Any, driver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[Any] = []
    launch = driver.launch
    monkeypatch.setattr(driver, "launch", lambda *given: (launched.append(given[0]), launch(*given)))
    device, numbers = devices.cuda(0), []
    for count in (10, 100):
        layers = [LayerSpec(f"{i}.weight", (16, 16), "float32", "weight") for i in range(count)]
        ranks = Simulation(layers, compressor, 2, devices=[device, HOST])
        for _ in range(2):
            launched.clear()
            ranks.step()
        numbers.append(len(launched))
    assert numbers[0] == numbers[1] > 0


def test_the_pool_stops_growing(
    driver: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_module, "_lent", {})
    layers = [LayerSpec(f"{i}.weight", (1000, 500), "float32", "weight") for i in range(4)]
    ranks = Simulation(layers, Quantize(4), 2, devices=[devices.cuda(0), HOST])
    taken = []
    for _ in range(6):
        ranks.step()
        taken.append(driver.pooled_bytes)
    with capsys.disabled():
        print(f"\npool of the device beside gradients: {taken[-1] / 1e6:.1f} MB for 8 MB of gradients")
    assert taken[-1] == taken[2]
