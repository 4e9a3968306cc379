"""A rank is told at any moment that it will be stopped: all ranks hear of it in the same exchange."""

from __future__ import annotations

import random

import pytest
from exchange.test_fingerprints import COMPRESSORS, simulate
from reduce.schemes import REDUCTIONS

from gradcomp.reduce.header import PREEMPTED
from gradcomp.testing.simulation import Simulation

STEPS = 6


def told_at(ranks: Simulation, told: tuple[int, ...], begin: int, turn: int) -> list[bool]:
    """Tell some ranks some turns after step ``begin`` has begun; by step, whether all ranks, and not some, hear it."""
    turns, heard = iter(range(1 << 30)), []

    def during() -> None:
        if len(heard) >= begin and next(turns) == turn:
            for rank in told:
                ranks.pipelines[rank].preemption.requested = True

    for _ in range(STEPS):
        notices = {result.notices for result in ranks.step(during=during).results}
        assert notices in ({0}, {PREEMPTED})
        heard.append(notices == {PREEMPTED})
    return heard


def travels(compressor, reduction: str, world: int) -> None:
    drawn = random.Random(f"{compressor} {reduction} {world}")
    seen = set()
    for told in (*((rank,) for rank in range(world)), (0, world - 1)):
        ranks = simulate(compressor, reduction, world, shuffle=True, seed=drawn.randrange(1 << 30))
        heard = told_at(ranks, told, drawn.randrange(3), drawn.randrange(40))
        assert heard == sorted(heard)
        assert heard[-1]
        seen.add(sum(heard))
    assert len(seen) > 1 or world < 4  # they were told in different steps


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_all_ranks_hear_in_the_same_step(reduction: str):
    for world in (2, 3, 4):
        travels(COMPRESSORS[0], reduction, world)


@pytest.mark.parametrize("compressor", COMPRESSORS[1:], ids=str)
def test_it_travels_with_messages_of_every_kind(compressor):
    for world in (2, 3, 4):
        travels(compressor, "sra", world)


def test_it_changes_neither_sizes_nor_means():
    quiet, told = (simulate(COMPRESSORS[0]) for _ in range(2))
    told.pipelines[1].preemption.requested = True
    for _ in range(3):
        expected, found = quiet.step(), told.step()
        for mine, theirs in zip(expected.means, found.means, strict=True):
            assert all((a == b).all() for a, b in zip(mine, theirs, strict=True))
    sent = [[p.transport.bytes_sent for p in ranks.pipelines] for ranks in (quiet, told)]
    assert sent[0] == sent[1]
