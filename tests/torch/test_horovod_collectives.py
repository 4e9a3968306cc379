"""Horovod's collectives, in values, gradients, names and errors; all checks of a world run in one job."""

from __future__ import annotations

import functools
import json

import preloaded
import pytest
from horovod_checks import CHECKS
from launching import run_ranks


@functools.cache
def outcomes(world: int) -> list[dict[str, str]]:
    results = run_ranks(
        "from horovod_checks import main\nmain()", world, timeout=110, imported=preloaded.TORCH
    )
    for result in results:
        assert result.returncode == 0, result.stderr
    return [json.loads(result.stdout) for result in results]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("name", CHECKS)
def test_in_a_world(name: str, world: int) -> None:
    wrong = [f"rank {rank}: {outcome[name]}" for rank, outcome in enumerate(outcomes(world)) if outcome[name]]
    assert not wrong, "\n".join(wrong)
