"""One contract, all transports: see ``transport_checks`` for what is checked, ``transport_engines`` for over what."""

from __future__ import annotations

import pytest
from contract import Engine, verdicts
from transport_checks import CHECKS
from transport_engines import ENGINES

CASES = [pytest.param(engine, world, id=f"{engine}-{world}") for engine in ENGINES for world in engine.worlds]


@pytest.mark.parametrize(("engine", "world"), CASES)
@pytest.mark.parametrize("check", CHECKS)
def test_transport(engine: Engine, world: int, check: str) -> None:
    if missing := engine.missing():
        pytest.skip(missing)
    verdict = verdicts(engine, world, tuple(CHECKS))[check]
    if verdict:
        pytest.fail(verdict, pytrace=False)
