"""The contract of transports over NCCL itself, as far as there are GPUs for its ranks."""

from __future__ import annotations

import pytest
from contract import Engine
from transport import test_contract
from transport_engines import ON_GPUS

CASES = [pytest.param(engine, world, id=engine.name) for engine in ON_GPUS for world in engine.worlds]


@pytest.mark.parametrize(("engine", "world"), CASES)
@pytest.mark.parametrize("check", test_contract.CHECKS)
def test_nccl(engine: Engine, world: int, check: str) -> None:
    test_contract.test_transport(engine, world, check)
