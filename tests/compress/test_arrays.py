"""Tests a compressor that computes on its group as one array, on the host and on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from kernels import standin

from gradcomp import Compressor, ConfigError, LayerSpec, MomentumCorrection
from gradcomp.compress import Gather, GroupArray, Traits, register, registry
from gradcomp.kernels.devices import HOST
from gradcomp.testing import Simulation

LAYERS = [
    LayerSpec("a.weight", (33, 20)),
    LayerSpec("empty", (0,)),
    LayerSpec("b.weight", (65, 31), "float16"),
    LayerSpec("c.weight", (700,), "bfloat16"),
]


@dataclass(frozen=True)
class Eighths(Compressor):
    """Rounds all values to multiples of 1/8."""

    keeps: bool = True

    @property
    def traits(self) -> Traits:
        return Traits(keeps_residual=self.keeps)

    def fill(self, table, level) -> None:
        table["level"], table["bucket_size"] = 0, 1

    def wire_bytes(self, group):
        return 4 * group.table["length"].astype(np.int64)

    def exchange(self, group, context):
        array = GroupArray.of(group)

        def write(view):
            p, flags = array.read(context)
            sent = np.rint(8 * p) / 8
            view[:] = sent.view(np.uint8)
            array.keep(p - sent)
            return flags, len(view)

        reply = yield Gather(4 * group.elements, write)
        return array.finish(sum(payload.view(np.float32) for payload in reply.data), reply.flags, context)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "REGISTERED", dict(registry.REGISTERED))
    register("eighths")(Eighths)
    yield
    monkeypatch.undo()
    registry.registered.cache_clear()


def test_it_reads_gradient_and_residual_and_gives_the_mean():
    ranks = Simulation(LAYERS[:1], Eighths(), 2)
    owed = np.zeros(LAYERS[0].size, np.float32)
    for _ in range(3):
        gradients = ranks.gradients()
        p = [
            rank[0] + pipeline.residuals.first.value(0)
            for rank, pipeline in zip(gradients, ranks.pipelines, strict=True)
        ]
        sent = [np.rint(8 * each) / 8 for each in p]
        np.testing.assert_array_equal(ranks.step(gradients).mean(0), (sent[0] + sent[1]) / 2)
        owed = p[1] - sent[1]
        np.testing.assert_array_equal(ranks.pipelines[1].residuals.first.value(0), owed)
    assert owed.any()


@pytest.mark.parametrize(
    "compressor", [Eighths(), MomentumCorrection(Eighths(), 0.5)], ids=["own", "momentum"]
)
def test_on_a_device_it_is_what_it_is_on_the_host(compressor: Compressor):
    with standin.device() as (device, _):
        alone, there = (
            Simulation(LAYERS, compressor, 2, devices=places) for places in ([HOST] * 2, [device, HOST])
        )
        for scale in (1.0, 8.0):
            want, got = alone.step(scale=scale).all_means(), there.step(scale=scale).all_means()
            assert [mean.tobytes() for mean in got] == [mean.tobytes() for mean in want]
            assert there.state() == alone.state()


def test_without_memory_for_what_is_read_it_is_refused():
    with pytest.raises(ConfigError, match="keeps_residual or contributes"):
        Simulation(LAYERS, Eighths(keeps=False), 2)
