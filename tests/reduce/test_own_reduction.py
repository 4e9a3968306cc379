"""Tests a reduction outside of the package: a setting names it, it has a cost, and it keeps the contract."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from configurations import ROWS
from reduce.test_contract import PROMISES

from gradcomp import ConfigError
from gradcomp.core import scheme as schemes
from gradcomp.core.config import Config
from gradcomp.core.topology import Topology
from gradcomp.reduce import Reduction, base, register
from gradcomp.reduce.base import HOST_MEMORY, Message, exchange
from gradcomp.reduce.chunks import WholeCodes, encode
from gradcomp.reduce.costs import cost
from gradcomp.reduce.header import ByteHeader
from gradcomp.reduce.model import Cost, Load, to
from gradcomp.testing import CHECKS, Simulation, cases


class Rotation(Reduction):
    """In round t every rank sends its whole code to the rank t places further. Each adds the N codes in rank order."""

    def __init__(self, parts, layers, rank, world, memory=HOST_MEMORY) -> None:
        self._rank, self._world = rank, world
        self._whole = WholeCodes(parts, layers, world, memory.local)
        codes = self._whole.codes
        header = ByteHeader(layers, np.full(world, codes.payload_bytes[0], dtype=np.int64))
        self._encode, buffers = codes.inputs(), codes.copies(memory, world)
        self._messages = [Message(buffer, header, r) for r, buffer in enumerate(buffers)]
        self.rounds = world - 1
        self.bytes_sent = (world - 1) * codes.sizes[0]

    @staticmethod
    def cost(load, topology, scheme) -> Cost:
        world = topology.world
        sizes = np.repeat(load.chunks(1), world)
        flows = [to(topology, np.arange(world) + t, sizes) for t in range(1, world)]
        return Cost(flows, 1, 1, world + 1)

    def run(self, context, binding, flags):
        me, world, own = self._rank, self._world, self._messages[self._rank]
        yield from encode(self._whole.codes.parts, self._encode, own.buffer, context, binding, flags)
        for t in range(1, world):
            source = (me - t) % world
            yield exchange([((me + t) % world, own)], [(source, self._messages[source])])
        yield from self._whole.add(self._messages, context, binding)
        return (yield from self._whole.decode(self._whole.sum, context, binding, flags))


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schemes, "_names", [*schemes._names])
    monkeypatch.setattr(base, "_classes", {**base._classes})
    register("rotation")(Rotation)
    monkeypatch.setattr(cases, "Simulation", partial(Simulation, reduction="rotation"))


@pytest.mark.parametrize("name", ["minmax-5-feedback", "onebit", "signum-odd"])
def test_compressors_keep_their_contract(name: str):
    for promise in PROMISES:
        CHECKS[promise](ROWS[name])
    CHECKS["ranks_hold_the_same_bytes"].run(ROWS[name], 5)
    CHECKS["every_byte_that_is_sent_is_counted"].run(ROWS[name], 4)


def test_a_setting_names_it_and_it_has_a_price():
    assert Config(reduction="rotation").reduction == "rotation"
    topology = Topology(tuple(range(4)))
    price = cost(schemes.parse("rotation"), Load(1000.0, 8000.0), topology)
    assert price.bytes_sent().tolist() == [3000.0] * 4


@pytest.mark.parametrize("name", ["rotation", "sra", "auto"])
def test_a_name_is_given_once(name: str):
    with pytest.raises(ConfigError, match=f"named '{name}' already"):
        register(name)(Rotation)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("SRA", "sra"), ("hierachical", "hierarchical"), ("all-to-all", "all_to_all"),
        ("ps:servers=2", "parameter_server"), ("allreduce", "ring"), ("nccl", None),
    ],
)  # fmt: skip
def test_a_name_that_is_nearly_one_is_shown(text: str, meant: str | None) -> None:
    with pytest.raises(ConfigError, match="there are sra, ring") as caught:
        schemes.parse(text)
    assert ("did you mean" in str(caught.value)) == (meant is not None)
    assert meant is None or f"(did you mean {meant!r}?)" in str(caught.value)
