"""One contract, all transports: see ``transport_checks`` for what is checked, ``transport_engines`` for over what."""

from __future__ import annotations

import pytest
from contract import Engine, verdicts
from transport_checks import CHECKS
from transport_engines import ENGINES

#: What another launch shows: Open MPI runs the code that MPICH does, and two levels differ only between hosts.
AGAIN = {"openmpi-3", "shm+mpich-4"}
CASES = [
    pytest.param(engine, world, id=of, marks=pytest.mark.full if of in AGAIN else [])
    for engine in ENGINES
    for world in engine.worlds
    for of in [f"{engine}-{world}"]
]


@pytest.mark.parametrize(("engine", "world"), CASES)
@pytest.mark.parametrize("check", CHECKS)
def test_transport(engine: Engine, world: int, check: str) -> None:
    if missing := engine.missing():
        pytest.skip(missing)
    verdict = verdicts(engine, world, tuple(CHECKS))[check]
    if verdict:
        pytest.fail(verdict, pytrace=False)
