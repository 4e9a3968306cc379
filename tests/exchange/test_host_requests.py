"""Reduce-scatters and all-gathers in two levels, among hosts of several ranks, all in one thread."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from exchange.test_requests import (
    COMPARED_BYTES,
    FEEDBACK,
    FLOATS,
    LAYERS,
    Ranked,
    as_bytes,
    every_kind,
    inputs_of,
    shards,
)
from reduce.schemes import total

from gradcomp import Cast, Identity, LayerSpec, Quantize, TransportError, WireFormatError
from gradcomp.core.topology import Topology
from gradcomp.exchange.request_group import RequestGroup, Run
from gradcomp.exchange.requests import ALL_GATHER, REDUCE_SCATTER, Request
from gradcomp.exchange.waiting import Waiting
from gradcomp.reduce.header import ByteHeader, padded
from gradcomp.testing.simulation import DTYPES

every_place = pytest.mark.parametrize(
    "hosts",
    [(0, 0, 1, 1), (0, 0, 0, 1), (0, 1, 1), (0, 1, 0, 1), (0, 0, 1, 1, 2), (0, 1, 0, 2, 2, 1, 1)],
    ids=str,
)
#: A codec without draws, so that the reference needs none.
NEAREST = Quantize(4, 16, "linf", "nearest", feedback=False)


def in_two_levels(kind: str, codec, hosts: tuple[int, ...], layers=LAYERS, **options) -> Ranked:
    return Ranked(Request.of(kind, layers, codec, hosts=hosts, **options), len(hosts))


def coded(values: np.ndarray) -> np.ndarray:
    """What a shard is after it was encoded and decoded."""
    alone = Ranked(Request.of(ALL_GATHER, [LayerSpec("x", values.shape)], NEAREST), 1)
    return alone.run([[values]])[0][0]


# --- values -----------------------------------------------------------------------------------------------------


@every_place
@pytest.mark.parametrize("codec", [Identity(), Quantize(4, 64), Cast("float16"), *FEEDBACK[:1]], ids=repr)
def test_a_gather_has_the_bits_of_one_level(codec, hosts: tuple[int, ...]):
    """Residuals, decoding anew and the checksum of what all ranks decode included."""
    flat, ours = (
        Ranked(Request.of(ALL_GATHER, LAYERS, codec), len(hosts)),
        in_two_levels(ALL_GATHER, codec, hosts),
    )
    for seed in range(3):
        inputs = inputs_of(flat, seed)
        wanted, found = (ranked.run(inputs, commit=False) for ranked in (flat, ours))
        assert [as_bytes(arrays) for arrays in found] == [as_bytes(arrays) for arrays in wanted]
        (checksum,) = {prepared.result.checksum for prepared in (*flat.prepared, *ours.prepared)}
        assert checksum
        for prepared, arrays in zip(ours.prepared, found, strict=True):
            again = [np.zeros_like(array) for array in arrays]
            prepared.decode_again(again)
            assert as_bytes(again) == as_bytes(arrays)
            prepared.commit()
        for prepared in flat.prepared:
            prepared.commit()


def mean_of(inputs: list[np.ndarray], hosts: tuple[int, ...], owner: int, code: Callable) -> np.ndarray:
    """The owner's shard: sums of hosts, each coded but that of the owner's own, over the number of ranks."""
    sums = []
    for host in range(max(hosts) + 1):
        own = total([a.astype(np.float32) for a, at in zip(inputs, hosts, strict=True) if at == host])
        shard = shards(own, len(hosts))[owner]
        sums.append(shard if host == hosts[owner] else code(shard))
    return total(sums) / np.float32(len(hosts))


@every_place
@pytest.mark.parametrize("codec", [Identity(), NEAREST], ids=["none", "nearest"])
@pytest.mark.parametrize("average", [True, False])
def test_a_reduction_adds_ranks_then_hosts_in_order(codec, average: bool, hosts: tuple[int, ...]):
    """Bit for bit, in every run; exact codes stay exact for all dtypes."""
    world, layers = len(hosts), LAYERS if codec == Identity() else FLOATS
    ours = in_two_levels(REDUCE_SCATTER, codec, hosts, layers, average=average)
    inputs = inputs_of(ours)
    code = coded if codec == NEAREST else (lambda values: values)
    for _ in range(2):
        for rank, arrays in enumerate(ours.run(inputs)):
            for i, (layer, array) in enumerate(zip(layers, arrays, strict=True)):
                wanted = mean_of([own[i] for own in inputs], hosts, rank, code)
                wanted = (wanted * np.float32(1 if average else world)).astype(DTYPES[layer.dtype])
                assert array.tobytes() == wanted.tobytes(), layer.name


def test_what_rounding_costs_lies_between_half_of_one_level_and_the_same():
    """With two hosts of two ranks: gradients without anything in common give a half, equal ones give the same."""
    layers, codec, hosts = [LayerSpec("x", (64 * 64,))], Quantize(4, 64), (0, 0, 1, 1)
    generator = np.random.default_rng(3)
    for common, low, high in ((0.0, 0.4, 0.6), (1.0, 0.9, 1.1)):
        shared = generator.standard_normal(layers[0].size)
        own = np.sqrt(1 - common) * generator.standard_normal((4, layers[0].size)) + np.sqrt(common) * shared
        inputs = [[array.astype(np.float32)] for array in own]
        wanted, lost = np.mean([array for (array,) in inputs], axis=0), []
        for request in (
            Request.of(REDUCE_SCATTER, layers, codec),
            Request.of(REDUCE_SCATTER, layers, codec, hosts=hosts),
        ):
            found = np.concatenate([arrays[0] for arrays in Ranked(request, 4).run(inputs)])
            lost.append(np.square(found - wanted).mean())
        assert low < lost[1] / lost[0] < high


@every_kind
def test_a_value_that_is_not_finite_is_known_to_all(kind: str):
    ranked = in_two_levels(kind, Quantize(4, 16), (0, 0, 1), FLOATS)
    inputs = inputs_of(ranked)
    inputs[1][3].reshape(-1)[0] = np.nan
    outputs = ranked.run(inputs, commit=False)
    assert all(np.isnan(arrays[3]).all() and np.isfinite(arrays[2]).all() for arrays in outputs)
    assert [p.result.nonfinite.tolist() for p in ranked.prepared] == [[False, False, False, True]] * 3


# --- bytes ------------------------------------------------------------------------------------------------------


@every_kind
@every_place
@pytest.mark.parametrize("codec", [Quantize(4, 64), Identity()], ids=repr)
def test_bytes_inside_and_between_hosts_are_the_formulas(kind: str, codec, hosts: tuple[int, ...]):
    world, topology, sent = len(hosts), Topology(hosts), Counter()

    def tamper(source: int, destination: int, message: np.ndarray) -> np.ndarray:
        sent[source, destination] += len(message)
        return message

    ranked = Ranked(Request.of(kind, FLOATS, codec, hosts=hosts), world, tamper=tamper)
    ranked.run(inputs_of(ranked))
    sizes = [[len(shards(np.zeros(layer.size), world)[rank]) for layer in FLOATS] for rank in range(world)]
    header = ByteHeader.size(len(FLOATS))
    floats = [header + padded(4 * sum(own)) for own in sizes]
    codes = [header + padded(sum(8 * -(-n // 64) + -(-4 * n // 8) for n in own)) for own in sizes]
    codes = floats if codec == Identity() else codes
    for rank, prepared in enumerate(ranked.prepared):
        members, served = topology.members(rank), topology.served(rank)
        mine = served[members.index(rank)]
        wanted = Counter()
        for member, theirs in zip(members, served, strict=True):
            if member != rank:
                inside = [codes[j] for j in mine] if kind == ALL_GATHER else [floats[j] for j in theirs]
                wanted[member] = sum(inside)
        across = topology.counterparts(rank) if kind == ALL_GATHER else [j for j in mine if j != rank]
        wanted.update({each: codes[rank if kind == ALL_GATHER else each] for each in across})
        assert {
            j: n - COMPARED_BYTES for (i, j), n in sent.items() if i == rank and n > COMPARED_BYTES
        } == wanted
        assert list(prepared.sent_to) == [wanted[j] for j in range(world)]
        assert (prepared.bytes_sent, prepared.exchanged) == (wanted.total(), 1)
        outside = sum(n for j, n in wanted.items() if j not in members)
        if hosts == (
            0,
            0,
            1,
            1,
        ):  # half of what one level sends, which is as much again to the other rank there
            assert outside == codes[rank if kind == ALL_GATHER else (rank + 2) % 4]


# --- messages that are damaged, and ranks that are lost ---------------------------------------------------------


@every_kind
@pytest.mark.parametrize("link", [(1, 0), (2, 0), (0, 2)], ids=["inside", "between", "back"])
def test_damage_is_found_where_it_arrives(kind: str, link: tuple[int, int]):
    sent = [0]

    def tamper(source: int, destination: int, message: np.ndarray) -> np.ndarray:
        sent[0] += (source, destination) == link
        if (source, destination, sent[0]) == (*link, 2):  # the first one behind the comparison
            message[-20] ^= 0x10
        return message

    ranked = Ranked(Request.of(kind, FLOATS, Quantize(4, 16), hosts=(0, 0, 1)), 3, tamper=tamper)
    for prepared in ranked.prepared:
        prepared._checksums = True
    found = ranked.attempt(inputs_of(ranked))
    assert type(found.pop(link[1])) is WireFormatError
    assert all(not isinstance(other, Exception) or type(other) is TransportError for other in found)


@every_kind
@pytest.mark.parametrize("rounds", [0, 1])
@pytest.mark.parametrize("lost", [1, 2])
def test_a_rank_that_is_lost_between_two_rounds_ends_the_exchange_on_all(kind: str, rounds: int, lost: int):
    """After the comparison and so many rounds: rank 1 shares its host, rank 2 is alone on its."""
    ranked = in_two_levels(kind, Quantize(4, 16), (0, 0, 1))
    ranked.world.delay = lambda rank, _, polls: (
        rank == lost and polls < 2
    )  # it joins one collective in a poll
    inputs, errors = inputs_of(ranked), {}
    groups = [
        RequestGroup([Run(ranked.prepared[rank], inputs[rank])], ranked.transports[rank], lambda *_: None)
        for rank in range(3)
    ]
    for _ in range(20):
        for rank in {0, 1, 2} - errors.keys() - ranked.world.dead:
            try:
                assert groups[rank].poll() is not Waiting.NOTHING, "an exchange without a rank ended well"
            except TransportError as error:
                errors[rank] = error
            if rank == lost and len(ranked.transports[lost].sent) == 1 + rounds:
                ranked.world.kill(lost)
    assert ranked.world.dead == {lost}
    assert sorted(errors) == sorted({0, 1, 2} - {lost})
