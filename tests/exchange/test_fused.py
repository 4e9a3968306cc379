"""Gathers, broadcasts and sums of several rounds: fused over the groups of a bucket, in lock step, not believed."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from simple_compressors import Everyone, Rounds, Selected, Turns

from gradcomp import Assignment, Identity, LayerSpec, Plan, PlanMismatchError, Quantize, TopK
from gradcomp.compress import registry
from gradcomp.compress.policy import assign
from gradcomp.core.errors import TransportError, WireFormatError
from gradcomp.exchange.variable_gather import VariableGather
from gradcomp.reduce.header import ByteHeader, HeaderId
from gradcomp.testing.simulation import SPARSE, Simulation, same_bytes, true_mean


@pytest.fixture(autouse=True)
def _known(monkeypatch):
    known = {**registry.registered(), **{kind.name: kind for kind in (Everyone, Selected, Turns, Rounds)}}
    monkeypatch.setattr(registry, "registered", lambda: known)


KINDS = {
    "fixed": Everyone(),
    "varying": Everyone(varying=True),
    "selected": Selected(),
    "turns": Turns(),
    "turns varying": Turns(varying=True),
    "rounds": Rounds(),
    "top": TopK(0.2, zeros=True),
    "non-zeros": TopK(0.5),
    "quantised": Quantize(4, 16),
    "sum": Identity(),
}
MIXED = [
    LayerSpec(f"{name} {i}", shape, dtype)
    for name in KINDS
    for i, (shape, dtype) in enumerate([((3, 7), "float32"), ((0,), "float32"), ((11,), "bfloat16")])
] + [LayerSpec("sum double", (5,), "float64")]


def job(layers, world: int = 3, **settings) -> Simulation:
    kinds = [KINDS[layer.name.rsplit(" ", 1)[0]] for layer in layers]
    plan = Plan(0, tuple(assign(layer.name, kind) for layer, kind in zip(layers, kinds, strict=True)))
    return Simulation(layers, plan, world, **settings)


def of(kind: str) -> list[LayerSpec]:
    return [layer for layer in MIXED if layer.name.rsplit(" ", 1)[0] == kind]


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("kind", ["fixed", "varying", "selected", "rounds"])
@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_the_mean_arrives(kind: str, world: int, scale: float):
    ranks = job(of(kind), world, shuffle=True, delay=0.4)
    for step in range(3):
        gradients = ranks.gradients()
        for rank in gradients:
            rank[0][step * 5 :] = 0  # another size in every step
        outcome = ranks.step(gradients, scale=scale)
        for layer, mean in enumerate(outcome.all_means()):
            np.testing.assert_allclose(
                mean.astype(np.float64), true_mean(gradients, layer), rtol=1e-2, atol=1e-6
            )


@pytest.mark.parametrize("kind", ["turns", "turns varying"])
def test_the_root_rotates_and_may_have_nothing_to_say(kind: str):
    ranks = job(of(kind), shuffle=True, delay=0.4)
    for step in range(6):
        gradients = ranks.gradients()
        if step >= 3:
            gradients[step % 3] = [np.zeros_like(g) for g in gradients[step % 3]]
        means = ranks.step(gradients).all_means()
        assert all(same_bytes(m, g) for m, g in zip(means, gradients[step % 3], strict=True))


@pytest.mark.parametrize("seed", range(2))
def test_all_kinds_in_one_bucket_do_what_they_do_alone(seed: int):
    whole = job(MIXED, seed=seed, shuffle=True, delay=0.4, slice_elements=10**6, reorder=False)
    alone = {kind: job(of(kind), reorder=False) for kind in KINDS}
    assert len(whole.pipelines[0].layout.buckets) == 1
    for step in range(4):
        gradients = whole.gradients()
        gradients[1][step] = None
        means = dict(zip(MIXED, whole.step(gradients, commit=step != 2).all_means(), strict=True))
        for ranks in alone.values():
            place = [MIXED.index(layer) for layer in ranks.layers]
            expected = ranks.step([[rank[i] for i in place] for rank in gradients], commit=step != 2)
            for layer, mean in zip(ranks.layers, expected.all_means(), strict=True):
                assert same_bytes(means[layer], mean), (step, layer.name)


def kinds_sent(layers) -> list[str]:
    ranks = job(layers, 2, record=True, reorder=False, slice_elements=10**6)
    ranks.step()
    return [kind for kind, _ in ranks.ranks[0].transport.sent]


def test_messages_of_a_kind_share_a_collective():
    assert kinds_sent([*of("fixed"), *of("top"), *of("turns")]) == ["allgatherv"]
    assert kinds_sent([*of("fixed"), *of("varying"), *of("turns varying")]) == ["allgatherv"] * 2
    gathered, summed = "allgatherv", "allreduce"
    assert kinds_sent([*of("rounds"), *of("fixed")]) == [gathered, summed, gathered, gathered]


def test_a_second_round_only_where_a_payload_does_not_fit():
    ranks = job(of("varying"), 2, record=True, reorder=False)
    largest = 0
    for count in (3, 3, 2, 5, 5, 1, 5, 6):
        gradients = ranks.gradients()
        gradients[1][0][count:] = 0
        assert same_bytes(ranks.step(gradients).mean(0), job(of("varying"), 2).step(gradients).mean(0))
        for rank in ranks.ranks:
            assert len(rank.transport.sent) == (2 if count > largest else 1)
            rank.transport.sent.clear()
        largest = max(largest, count)


def test_the_room_follows_what_was_sent_in_the_last_steps():
    ranks = job(of("varying"), 2, record=True, reorder=False)
    sizes = []
    for step in range(20):
        for rank in ranks.ranks:
            rank.transport.sent.clear()
        ranks.step([[g if step == 0 else 0 * g for g in of_rank] for of_rank in ranks.gradients()])
        sizes.append(len(ranks.ranks[0].transport.sent[0][1]))
    assert sizes == [sizes[0]] + [sizes[1]] * 16 + [sizes[0]] * 3
    assert sizes[0] < sizes[1]


@pytest.mark.parametrize("kind", ["fixed", "varying", "selected", "turns varying", "rounds", "top"])
class TestVotes:
    def test_presence(self, kind: str):
        ranks = job(of(kind))
        gradients = ranks.gradients(absent=[2])
        gradients[1][0], gradients[0][0] = None, SPARSE
        outcome = ranks.step(gradients)
        assert outcome.result.present.tolist() == [True, True, False]
        assert outcome.result.sparse.tolist() == [True, False, False]
        assert outcome.mean(2) is None

    @pytest.mark.parametrize("layer", [0, 2])
    def test_a_value_that_is_not_finite(self, kind: str, layer: int):
        ranks = job(of(kind))
        gradients = ranks.gradients()
        gradients[2][layer][4] = np.inf
        outcome = ranks.step(gradients)
        assert outcome.committed == [False] * 3
        assert outcome.result.nonfinite.tolist() == [i == layer for i in range(3)]
        assert np.isnan(outcome.mean(layer).astype(np.float32)).all()

    def test_readiness(self, kind: str):
        ranks = job(of(kind), slice_elements=8, shuffle=True, delay=0.3)
        assert len(ranks.pipelines[0].layout.buckets) > 1
        for pipeline in ranks.pipelines:
            ranks.step()
            assert {p.plan.version for p in ranks.pipelines} == {0}
            pipeline.propose(Plan(1, tuple(Assignment(a.name, "quantize", 2) for a in ranks.layers)))
        ranks.step().all_means()
        assert {p.plan.version for p in ranks.pipelines} == {1}
        ranks.step().all_means()


def test_a_flag_of_a_later_sum_reaches_every_rank():
    ranks = job(of("rounds"))
    gradients = ranks.gradients()
    gradients[1][0][0] = 13
    outcome = ranks.step(gradients)
    assert outcome.result.nonfinite[0]
    assert outcome.committed == [False] * 3


def test_payloads_of_the_same_size_come_in_the_same_views():
    """Kernel calls that are kept know them. One rank alone gets its own payload."""
    announced, most = VariableGather(1, 0, 1, [0]), np.array([[100]], np.int64)
    found = []

    def gather(payload: np.ndarray) -> Iterator[object]:
        found.extend(*(yield from announced.run([payload], most, HeaderId(0, 0, 0))))

    for step, size in enumerate((9, 9, 9, 5, 9)):
        list(gather(np.full(size, step, np.uint8)))
        assert found[-1].tolist() == [step] * size
    assert found[1] is found[2]
    assert found[3] is not found[4]


# --- lies ---------------------------------------------------------------------------------------------------

HEADER = ByteHeader.size(1)


def lie(kind: str, change, nbytes=None) -> list[Exception | None]:
    """What the ranks raise when rank 1's messages (of so many bytes) to rank 0 are changed: in place, or by another."""

    def tamper(source: int, destination: int, message: np.ndarray) -> np.ndarray:
        if (source, destination) != (1, 0) or nbytes not in (None, len(message)):
            return message
        changed = change(message)
        return message if changed is None else changed

    return job(of(kind)[:1], tamper=tamper, reorder=False).attempt()


@pytest.mark.parametrize("kind", ["varying", "turns varying"])
@pytest.mark.parametrize("size", [-1, 4 * 21 + 1, 2**40, 2**63 - 1, 2**63 + 8, 2**64 - 1])
def test_an_impossible_size_is_refused(kind: str, size: int):
    def change(message):
        message[HEADER : HEADER + 8] = np.frombuffer((size % 2**64).to_bytes(8, "little"), np.uint8)

    errors = lie(kind, change, HEADER + 16)
    assert isinstance(errors[0], WireFormatError)
    assert "rank 1 announced" in str(errors[0])
    assert [type(error) for error in errors[1:]] == [TransportError] * 2  # they hear of it, and do not wait


def test_another_possible_size_ends_the_step_too():
    def change(message):
        message[HEADER] -= 4

    errors = lie("varying", change, HEADER + 16)
    assert all(isinstance(error, TransportError | WireFormatError) for error in errors)


@pytest.mark.parametrize("kind", ["fixed", "varying", "turns", "rounds"])
@pytest.mark.parametrize("change", [lambda m: m[:-1], lambda m: np.append(m, np.uint8(0)), lambda m: m[:0]])
def test_a_message_of_another_length_is_refused(kind: str, change):
    assert all(isinstance(error, TransportError) for error in lie(kind, change))


@pytest.mark.parametrize("kind", ["fixed", "varying", "turns", "rounds"])
@pytest.mark.parametrize("at", [0, 3, 4, 8, 14, 16, 22])
def test_a_wrong_header_is_refused(kind: str, at: int):
    def change(message):
        message[at] ^= 0x40

    errors = lie(kind, change)
    assert type(errors[0]) is (PlanMismatchError if at == 4 else WireFormatError)
    assert all(other is None or isinstance(other, TransportError) for other in errors[1:])
