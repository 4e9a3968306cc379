"""What every message says of its sender's parameters: behind an exchange all ranks know that one differs."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
from reduce.schemes import REDUCTIONS

from gradcomp import Identity, LayerSpec, PowerSGD, Quantize, TopK
from gradcomp.core.topology import Topology
from gradcomp.exchange.fingerprint import NOTHING, Fingerprint, Fingerprints
from gradcomp.exchange.reports import different_fingerprints
from gradcomp.kernels.devices import HOST
from gradcomp.kernels.reference_headers import FIXED
from gradcomp.reduce.header import EDITED, ByteHeader, padded
from gradcomp.testing.simulation import Simulation

LAYERS = [LayerSpec("a", (300,)), LayerSpec("b", (20, 10))]
SAME = Fingerprint(np.array([1, 2], np.uint32), "[]")
OTHER = Fingerprint(np.array([1, 3], np.uint32), "[]")

#: How codes, sums, and what is gathered travel.
COMPRESSORS = [Quantize(4, 50), Identity(), TopK(0.1), PowerSGD(2)]


def simulate(compressor, reduction: str = "sra", world: int = 4, **options) -> Simulation:
    hosts = Topology(tuple(r // 2 for r in range(world)))
    return Simulation(
        LAYERS, compressor, world, reduction=reduction, topology=hosts, reorder=False, **options
    )


def noticed(ranks: Simulation) -> list[int]:
    """Which ranks know of a difference behind one exchange."""
    ranks.step()
    assert {bool(p.fingerprints) for p in ranks.pipelines} in ({True}, {False})
    return [r for r, p in enumerate(ranks.pipelines) if p.fingerprints is not None]


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_whoever_differs_all_ranks_know(reduction: str):
    for world, other in ((2, 1), (3, 0), (3, 2), (4, 1), (5, 3)):
        ranks = simulate(COMPRESSORS[0], reduction, world)
        ranks.fingerprints = [SAME] * world
        assert noticed(ranks) == []
        ranks.fingerprints[other] = OTHER
        assert noticed(ranks) == list(range(world)), (world, other)


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=str)
def test_it_travels_with_messages_of_every_kind(compressor):
    for other in range(3):
        ranks = simulate(compressor, world=3)
        ranks.fingerprints = [SAME] * 3
        assert noticed(ranks) == []
        ranks.fingerprints[other] = OTHER
        assert noticed(ranks) == [0, 1, 2]
        found = ranks.pipelines[0].fingerprints
        assert found.layers.tolist() == [[1, 3] if r == other else [1, 2] for r in range(3)]
    ranks = simulate(compressor)
    # Ranks without a say are left out of sums and gathers.
    ranks.fingerprints = [SAME, NOTHING, SAME, NOTHING]
    assert noticed(ranks) == []
    ranks.fingerprints = [NOTHING, OTHER, SAME, NOTHING]
    assert noticed(ranks) == [0, 1, 2, 3]


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_ranks_without_a_say_pass_on_what_they_hear(reduction: str):
    for silent in itertools.combinations(range(4), 2):
        ranks = simulate(COMPRESSORS[0], reduction)
        ranks.fingerprints = [NOTHING if r in silent else SAME for r in range(4)]
        assert noticed(ranks) == []
        last = max(set(range(4)) - set(silent))
        ranks.fingerprints[last] = OTHER
        assert noticed(ranks) == [0, 1, 2, 3]


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_all_ranks_come_to_the_same_value_of_the_results(reduction: str):
    ranks = simulate(COMPRESSORS[0], reduction)
    values = []
    for _ in range(2):
        ranks.step()
        (value,) = {p.results for p in ranks.pipelines}
        values.append(value)
    assert values[0] != values[1]


def altered(buffer: np.ndarray) -> np.ndarray:
    """One bit of the last payload is another, and every checksum is right: as if the sender had meant it."""
    changed, at = buffer.copy(), 0
    while at < len(changed):
        fixed = changed[at : at + FIXED.itemsize].view(FIXED)[0]
        begin, size = ByteHeader.size(int(fixed["layers"])), int(fixed["payload_bytes"])
        message = changed[at : at + begin + padded(size)]
        at += len(message)
        if at == len(changed):
            message[begin + size - 1] ^= 1
            payload = HOST.kernels.crc32c(message[begin:])
            fixed["checksum"] = HOST.kernels.crc32c(
                message[FIXED.itemsize : begin], HOST.kernels.crc32c(message[:28], payload)
            )
    return changed


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_result_that_one_rank_passes_on_otherwise_is_noticed_in_the_next_exchange(reduction: str):
    """In the last message that anybody sends."""
    sent: list[int] = []
    last = None

    def tamper(source: int, destination: int, message: np.ndarray) -> np.ndarray:
        sent.append(len(message))
        return altered(message) if len(sent) - 1 == last else message

    simulate(COMPRESSORS[0], reduction, tamper=tamper, checksums=True).step()
    last = max(n for n, size in enumerate(sent) if size)
    sent.clear()
    ranks = simulate(COMPRESSORS[0], reduction, tamper=tamper, checksums=True)
    ranks.fingerprints = [SAME] * 4
    assert noticed(ranks) == []
    assert len({p.results for p in ranks.pipelines}) == 2
    assert noticed(ranks) == [0, 1, 2, 3]


def test_notices_reach_all_ranks_once():
    ranks = simulate(Identity())
    ranks.step()
    ranks.pipelines[2].notices = EDITED
    assert {r.notices for r in ranks.step().results} == {EDITED}
    assert {r.notices for r in ranks.step().results} == {0}


def fingerprints(layers, scalars=("[]", "[]"), results=(0, 0)) -> Fingerprints:
    return Fingerprints(
        np.array([True] * len(layers)), np.array(layers, np.uint32), np.array(results, np.uint32), scalars
    )


RATES = ('[{"lr": 0.00125, "momentum": 0.9}]', '[{"lr": 0.01, "momentum": 0.9}]')
DECAYS = ('[{"lr": 1}, {"weight_decay": 0.1}]', '[{"lr": 1}, {"weight_decay": 0}]')


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (fingerprints([[1, 2], [1, 3]]), r"the parameter of layer 'b' differs between rank 0 and rank 1"),
        (fingerprints([[1, 2]] * 2, RATES), r"learning rate 0.01 on rank 1, 0.00125 on rank 0"),
        (fingerprints([[1, 2]] * 2, DECAYS), r"weight decay of group 1 0 on rank 1, 0.1 on rank 0"),
        (fingerprints([[1, 2]] * 2, ("[]", "\x1b[31m")), r"the optimizer of rank 1 has other settings"),
        (fingerprints([[1, 2]] * 2, results=(5, 6)), r"what rank 1 decoded"),
    ],
)
def test_what_differs_is_named(found: Fingerprints, said: str):
    error = different_fingerprints(found, ["a", "b"], [0, 1], "after step 7")
    assert "after step 7" in str(error)
    assert re.search(said, str(error)), error


def test_a_rank_that_has_no_say_is_not_blamed():
    found = fingerprints([[0, 0], [1, 2], [1, 3]], ("", "[]", "[]"), (0, 0, 0))
    found.has_say[0] = False
    assert "between rank 1 and rank 2" in str(
        different_fingerprints(found, ["a", "b"], [0, 1, 2], "after step 1")
    )
