"""Every message of every reduction cut short, changed, replayed or never sent: typed errors, and nobody hangs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reduce.schemes import PARTIAL, REDUCTIONS
from tiers import examples

from gradcomp import (
    Cast,
    GradcompError,
    LayerSpec,
    PlanMismatchError,
    Quantize,
    TransportError,
    WireFormatError,
)
from gradcomp.core.topology import Topology
from gradcomp.reduce.header import PRESENT, READY, ByteHeader
from gradcomp.testing.simulation import Simulation, same_bytes

LAYERS = [LayerSpec("a", (300,)), LayerSpec("b", (100,))]
HEADER = ByteHeader.size(len(LAYERS))
HOSTS = Topology((0, 0, 1, 1))
WORLD = HOSTS.world

every_reduction = pytest.mark.parametrize("reduction", REDUCTIONS)

Change = Callable[[np.ndarray], np.ndarray]


class Wire:
    """Numbers the messages of a run, keeps them, and changes one."""

    def __init__(
        self, number: int = -1, change: Callable[[list[np.ndarray], np.ndarray], np.ndarray] | None = None
    ):
        self.number, self.change = number, change
        self.kept: list[np.ndarray] = []
        self.ways: list[tuple[int, int]] = []

    def __call__(self, source: int, destination: int, message: np.ndarray) -> np.ndarray:
        changed = self.change(self.kept, message.copy()) if len(self.kept) == self.number else message
        self.kept.append(message.copy())
        self.ways.append((source, destination))
        return changed


def simulate(
    reduction: str, wire: Wire | None = None, compressor=None, *, checksums: bool = False
) -> Simulation:
    """Without checksums, what is behind them has to hold by itself."""
    return Simulation(
        LAYERS,
        compressor or Quantize(4, 50),
        WORLD,
        tamper=wire,
        reduction=reduction,
        topology=HOSTS,
        reorder=False,
        checksums=checksums,
    )


def ways_of(reduction: str) -> list[tuple[int, int]]:
    """(source, destination) of all messages of a step, in order."""
    wire = Wire()
    simulate(reduction, wire).step()
    return wire.ways


def messages(reduction: str) -> range:
    """Numbers of the messages that have at least a header: an owner's own message to nobody is none."""
    wire = Wire()
    simulate(reduction, wire).step()
    return [number for number, message in enumerate(wire.kept) if len(message)]


def all_have_left(errors: list[Exception | None]) -> None:
    assert all(isinstance(error, TransportError) for error in errors), errors


def one_noticed(errors: list[Exception | None], who: int, kind: type) -> None:
    """The receiver says what is wrong; the others lose it, or were done already."""
    assert type(errors[who]) is kind, errors
    others = errors[:who] + errors[who + 1 :]
    assert all(error is None or isinstance(error, TransportError | kind) for error in others), errors


@every_reduction
@pytest.mark.parametrize("kept", [0, HEADER, -1])
def test_a_truncated_message_is_an_error_on_every_rank(reduction: str, kept: int):
    for number in messages(reduction):
        all_have_left(simulate(reduction, Wire(number, lambda _, message: message[:kept])).attempt())


@every_reduction
def test_a_message_that_is_too_long_is_an_error_on_every_rank(reduction: str):
    for number in messages(reduction):
        longer = Wire(number, lambda _, message: np.append(message, np.uint8(0)))
        all_have_left(simulate(reduction, longer).attempt())


HEADER_FIELDS = {"magic": 0, "protocol": 2, "round": 3, "check": 4, "step": 8, "chunk": 14, "sender": 22}


@every_reduction
@pytest.mark.parametrize("field", HEADER_FIELDS)
def test_a_wrong_header_is_noticed_where_it_arrives(reduction: str, field: str):
    kind = PlanMismatchError if field in ("protocol", "check") else WireFormatError

    def change(_, message: np.ndarray) -> np.ndarray:
        message[HEADER_FIELDS[field]] ^= 0x40
        return message

    ways = ways_of(reduction)
    for number in messages(reduction):
        one_noticed(simulate(reduction, Wire(number, change)).attempt(), ways[number][1], kind)


@every_reduction
def test_states_that_do_not_exist_are_refused(reduction: str):
    def change(_, message: np.ndarray) -> np.ndarray:
        message[32] |= 8
        return message

    ways = ways_of(reduction)
    for number in messages(reduction):
        one_noticed(simulate(reduction, Wire(number, change)).attempt(), ways[number][1], WireFormatError)


@pytest.mark.parametrize(
    ("reduction", "first_round"),
    [("sra", 1), ("ring", WORLD - 1), ("parameter_server:servers=2", 1), ("hierarchical", 2)],
)
def test_results_that_disagree_on_the_ranks_are_refused(reduction: str, first_round: int):
    """Nobody holds the next plan; one result says that somebody does."""

    def change(_, message: np.ndarray) -> np.ndarray:
        message[32 + len(LAYERS)] |= READY
        return message

    wire = Wire()
    simulate(reduction, wire).step()
    final = [n for n, message in enumerate(wire.kept) if len(message) and message[3] >= first_round]
    assert final
    for number in final:
        errors = simulate(reduction, Wire(number, change)).attempt()
        one_noticed(errors, wire.ways[number][1], WireFormatError)


@every_reduction
def test_a_message_of_the_last_step_is_refused(reduction: str):
    ways = ways_of(reduction)
    for number in messages(reduction):
        replay = Wire(len(ways) + number, lambda kept, _, number=number: kept[number])
        ranks = simulate(reduction, replay)
        ranks.step()
        errors = ranks.attempt()
        one_noticed(errors, ways[number][1], WireFormatError)
        assert "step 0 instead of 1" in str(errors[ways[number][1]])


@every_reduction
def test_a_message_of_another_round_or_sender_is_refused(reduction: str):
    """Of the same step and of the right length, but not the one that belongs here."""
    wire = Wire()
    simulate(reduction, wire).step()
    swaps = [
        (late, early)
        for late, message in enumerate(wire.kept)
        for early in range(late)
        if len(message) and len(wire.kept[early]) == len(message)
        if wire.kept[early][:24].tobytes() != message[:24].tobytes()
    ]
    assert swaps
    for late, early in swaps:
        ranks = simulate(reduction, Wire(late, lambda kept, _, early=early: kept[early]))
        one_noticed(ranks.attempt(), wire.ways[late][1], WireFormatError)


@every_reduction
def test_a_rank_that_leaves_in_any_round_is_an_error_on_every_other(reduction: str):
    rounds = simulate(reduction).pipelines[0]._programs[0].reduction.rounds
    for number in range(rounds):
        for gone in range(WORLD):
            ranks = simulate(reduction)
            ranks.step()
            transport = ranks.pipelines[gone].transport
            join = transport._join

            def leave(kind: str, *arguments, transport=transport, join=join, at=rounds + number):
                if transport._number == at:
                    raise TransportError("gone")
                return join(kind, *arguments)

            transport._join = leave
            errors = ranks.attempt()
            all_have_left(errors)
            assert str(errors[gone]) == "gone"
            for other, error in enumerate(errors):
                assert other == gone or f"rank {gone} left before collective" in str(error)


@every_reduction
@pytest.mark.parametrize("seed", range(3))
def test_ranks_that_leave_at_any_time_never_make_the_others_hang(reduction: str, seed: int):
    for gone in range(WORLD):
        ranks = Simulation(
            LAYERS,
            Quantize(4, 50),
            WORLD,
            seed=seed,
            shuffle=True,
            delay=0.3,
            slice_elements=120,
            reduction=reduction,
            topology=HOSTS,
        )
        errors = ranks.attempt(dying=[gone])
        assert all(error is None or isinstance(error, GradcompError) for error in errors)


@every_reduction
@examples(40)
@given(data=st.data())
def test_with_checksums_a_changed_message_is_noticed_where_it_arrives(reduction: str, data):
    wire = Wire()
    simulate(reduction, wire, checksums=True).step()
    number = data.draw(st.sampled_from([n for n, message in enumerate(wire.kept) if len(message)]))
    at = data.draw(st.integers(0, len(wire.kept[number]) - 1))
    difference = data.draw(st.integers(1, 255))

    def change(_, message: np.ndarray) -> np.ndarray:
        message[at] ^= difference
        return message

    errors = simulate(reduction, Wire(number, change), checksums=True).attempt()
    assert isinstance(errors[wire.ways[number][1]], WireFormatError | PlanMismatchError), errors


#: Rounds in which the sender speaks for all ranks.
RESULTS = {
    "sra": 1,
    "ring": WORLD - 1,
    "tree": 2,
    "gather": 1,
    "parameter_server:servers=2": 1,
    "hierarchical": 3,
}


@pytest.mark.parametrize("reduction", RESULTS)
def test_a_result_without_a_layer_that_the_receiver_sent_is_refused(reduction: str):
    """Else the receiver would take the layer for absent, and step on its own gradient."""

    def change(_, message: np.ndarray) -> np.ndarray:
        message[32] &= ~np.uint8(PRESENT)
        return message

    wire = Wire()
    simulate(reduction, wire).step()
    # What leaders hand on in round 3 are their own messages of round 2.
    last = 2 if reduction == "hierarchical" else RESULTS[reduction]
    final = [n for n, message in enumerate(wire.kept) if len(message) and message[3] >= last]
    assert final
    for number in final:
        errors = simulate(reduction, Wire(number, change)).attempt()
        receiver = errors[wire.ways[number][1]]
        assert isinstance(receiver, WireFormatError), errors
        assert "lacks states" in str(receiver)


@every_reduction
@pytest.mark.parametrize("compressor", [Quantize(4, 50), Cast("float32"), Cast("float16")], ids=str)
@examples(25)
@given(data=st.data())
def test_random_bytes_are_a_typed_error_or_leave_no_wrong_mean_unnoticed(reduction: str, compressor, data):
    """Whatever a message holds: no crash; what a rank takes for finite is finite."""
    wire = Wire()
    simulate(reduction, wire, compressor).step()
    number = data.draw(st.sampled_from([n for n, message in enumerate(wire.kept) if len(message)]))
    at = data.draw(st.integers(0, len(wire.kept[number]) - 1))
    noise = np.frombuffer(data.draw(st.binary(min_size=1, max_size=40)), np.uint8)

    def change(_, message: np.ndarray) -> np.ndarray:
        room = message[at : at + len(noise)]
        room[:] = noise[: len(room)]
        return message

    ranks = simulate(reduction, Wire(number, change), compressor)
    errors = ranks.attempt()
    assert all(error is None or isinstance(error, GradcompError) for error in errors)
    if errors != [None] * WORLD:
        return
    for rank, pipeline in zip(ranks.ranks, ranks.pipelines, strict=True):
        for i, bad in enumerate(pipeline.result.nonfinite.tolist()):
            assert bad or np.isfinite(rank.outputs[i]).all()


@pytest.mark.parametrize("reduction", PARTIAL)
@examples(20)
@given(data=st.data())
def test_random_bytes_in_a_partial_sum_are_a_typed_error_or_one_mean_for_all(reduction: str, data):
    """On the way to the sum, what one message brings reaches all ranks alike."""
    wire = Wire()
    simulate(reduction, wire).step()
    up = [n for n, message in enumerate(wire.kept) if len(message) and message[3] == 0]
    number = data.draw(st.sampled_from(up))
    at = data.draw(st.integers(HEADER, len(wire.kept[number]) - 1))
    noise = np.frombuffer(data.draw(st.binary(min_size=1, max_size=40)), np.uint8)

    def change(_, message: np.ndarray) -> np.ndarray:
        room = message[at : at + len(noise)]
        room[:] = noise[: len(room)]
        return message

    ranks = simulate(reduction, Wire(number, change))
    assert ranks.attempt() == [None] * WORLD
    means = [[rank.outputs[i] for i in range(len(LAYERS))] for rank in ranks.ranks]
    assert all(same_bytes(a, b) for other in means for a, b in zip(other, means[0], strict=True))
    verdicts = [p.result.nonfinite.tolist() for p in ranks.pipelines]
    assert verdicts == [verdicts[0]] * WORLD
    for layer, bad in enumerate(verdicts[0]):
        assert bad or np.isfinite(means[0][layer]).all()
