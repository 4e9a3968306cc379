"""Cuts, changes, replays and omits every message of every reduction: errors are typed, and no rank hangs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reduce.schemes import PARTIAL, REDUCTIONS
from tiers import examples

from gradcomp import (
    Cast,
    GradcompError,
    Identity,
    LayerSpec,
    PlanMismatchError,
    Quantize,
    TransportError,
    WireFormatError,
)
from gradcomp.core.topology import Topology
from gradcomp.kernels.reference_headers import FIXED
from gradcomp.reduce.header import DIFFERENT, NONFINITE, PREEMPTED, PRESENT, ByteHeader
from gradcomp.testing.recording import payload_of
from gradcomp.testing.simulation import DTYPES, Simulation, same_bytes

LAYERS = [LayerSpec("a", (300,)), LayerSpec("b", (100,))]
HEADER = ByteHeader.size(len(LAYERS))
HOSTS = Topology((0, 0, 1, 1))
WORLD = HOSTS.world
BITS4 = Quantize(4, 50)

every_reduction = pytest.mark.parametrize("reduction", REDUCTIONS)

#: Makes another message of one; it gets the messages before this one, too.
Change = Callable[[list[np.ndarray], np.ndarray], np.ndarray]


class Wire:
    """Numbers the messages of a run, keeps them, and changes one."""

    def __init__(self, number: int = -1, change: Change | None = None):
        self.number, self.change = number, change
        self.kept: list[np.ndarray] = []
        self.ways: list[tuple[int, int]] = []

    def __call__(self, source: int, destination: int, message: np.ndarray) -> np.ndarray:
        changed = self.change(self.kept, message.copy()) if len(self.kept) == self.number else message
        self.kept.append(message.copy())
        self.ways.append((source, destination))
        return changed

    def messages(self, first_round: int = 0) -> list[int]:
        """Returns the numbers of the messages from this round on, without the empty ones of a rank to itself."""
        return [n for n, message in enumerate(self.kept) if len(message) and message[3] >= first_round]


def simulate(
    reduction: str, wire: Wire | None = None, compressor=BITS4, *, checksums: bool = False, **options
):
    """Simulates ranks, by default without checksums, so that all other checks are reached."""
    settings = {
        "reduction": reduction,
        "topology": HOSTS,
        "checksums": checksums,
        "reorder": False,
        **options,
    }
    return Simulation(LAYERS, compressor, WORLD, tamper=wire, **settings)


@functools.cache
def untouched(reduction: str, compressor=BITS4, checksums: bool = False) -> Wire:
    """Returns the messages of an unchanged step."""
    wire = Wire()
    simulate(reduction, wire, compressor, checksums=checksums).step()
    return wire


def overwritten(at: int, operate: Callable[[np.ndarray], object]) -> Change:
    def change(_: list[np.ndarray], message: np.ndarray) -> np.ndarray:
        message[at] = operate(message[at])
        return message

    return change


def attempts(reduction: str, change: Change, first_round: int = 0) -> Iterator[tuple[int, list]]:
    """Changes one message after the other; yields its receiver and every rank's error."""
    wire = untouched(reduction)
    numbers = wire.messages(first_round)
    assert numbers
    for number in numbers:
        yield wire.ways[number][1], simulate(reduction, Wire(number, change)).attempt()


def all_have_left(errors: list[Exception | None]) -> None:
    assert all(isinstance(error, TransportError) for error in errors), errors


def one_noticed(errors: list[Exception | None], who: int, kind: type) -> None:
    """The receiver reports the fault; the others lose it, or had finished before."""
    assert type(errors[who]) is kind, errors
    others = errors[:who] + errors[who + 1 :]
    assert all(error is None or isinstance(error, TransportError | kind) for error in others), errors


@every_reduction
@pytest.mark.parametrize("kept", [0, 10, HEADER, -1])
def test_a_truncated_message_is_an_error_on_every_rank(reduction: str, kept: int):
    wire = untouched(reduction)
    late = len(wire.kept) if kept == -1 else 0  # in the second step buffers hold the first one's bytes
    for number in wire.messages():
        ranks = simulate(reduction, Wire(late + number, lambda _, message: message[:kept]))
        if late:
            ranks.step()
        all_have_left(ranks.attempt())


@every_reduction
def test_a_message_that_is_too_long_is_an_error_on_every_rank(reduction: str):
    for _, errors in attempts(reduction, lambda _, message: np.append(message, np.uint8(0))):
        all_have_left(errors)


HEADER_FIELDS = {
    "magic": 0,
    "protocol": 2,
    "round": 3,
    "check": 4,
    "step": 8,
    "bucket": 12,
    "chunk": 14,
    "sender": 22,
    "a state that does not exist": 32,
}


@every_reduction
@pytest.mark.parametrize("field", HEADER_FIELDS)
def test_a_wrong_header_is_noticed_where_it_arrives(reduction: str, field: str):
    kind = PlanMismatchError if field in ("protocol", "check") else WireFormatError
    for receiver, errors in attempts(reduction, overwritten(HEADER_FIELDS[field], lambda byte: byte ^ 0x40)):
        one_noticed(errors, receiver, kind)


#: The first round of results. What leaders forward in round 3 of two levels are their own messages of round 2.
RESULTS = {
    "sra": 1,
    "ring": WORLD - 1,
    "tree": 2,
    "gather": 1,
    "parameter_server:servers=2": 1,
    "hierarchical": 2,
}


@pytest.mark.parametrize("reduction", [r for r in RESULTS if r not in ("tree", "gather")])  # several results
def test_results_that_disagree_on_the_ranks_are_refused(reduction: str):
    """No rank is preempted, but one result says that a rank is."""
    change = overwritten(32 + len(LAYERS), lambda byte: byte | PREEMPTED)
    for receiver, errors in attempts(reduction, change, RESULTS[reduction]):
        one_noticed(errors, receiver, WireFormatError)


@pytest.mark.parametrize("reduction", RESULTS)
def test_a_result_without_a_layer_that_the_receiver_sent_is_refused(reduction: str):
    """Otherwise the receiver would take the layer for absent and apply its own gradient."""
    change = overwritten(32, lambda byte: byte & ~np.uint8(PRESENT))
    for receiver, errors in attempts(reduction, change, RESULTS[reduction]):
        assert isinstance(errors[receiver], WireFormatError), errors
        assert "lacks states" in str(errors[receiver])


@every_reduction
def test_a_message_of_the_last_step_is_refused(reduction: str):
    wire = untouched(reduction)
    for number in wire.messages():
        replay = Wire(len(wire.ways) + number, lambda kept, _, number=number: kept[number])
        ranks = simulate(reduction, replay)
        ranks.step()
        errors = ranks.attempt()
        one_noticed(errors, wire.ways[number][1], WireFormatError)
        assert "step 0 instead of 1" in str(errors[wire.ways[number][1]])


@every_reduction
def test_a_message_of_another_round_or_sender_is_refused(reduction: str):
    """The message has the right step and length, but another round or sender."""
    wire = untouched(reduction)
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
    rounds = simulate(reduction).pipelines[0].laid_out.programs[0].reduction.rounds
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
        timing = {"seed": seed, "shuffle": True, "delay": 0.3, "slice_elements": 120, "reorder": True}
        errors = simulate(reduction, checksums=True, **timing).attempt(dying=[gone])
        assert all(error is None or isinstance(error, GradcompError) for error in errors)


@every_reduction
@examples(40)
@given(data=st.data())
def test_with_checksums_a_changed_message_is_noticed_where_it_arrives(reduction: str, data):
    wire = untouched(reduction, checksums=True)
    number = data.draw(st.sampled_from(wire.messages()))
    at = data.draw(st.integers(0, len(wire.kept[number]) - 1))
    difference = data.draw(st.integers(1, 255))
    change = overwritten(at, lambda byte: byte ^ difference)
    errors = simulate(reduction, Wire(number, change), checksums=True).attempt()
    assert isinstance(errors[wire.ways[number][1]], WireFormatError | PlanMismatchError), errors


def with_noise(reduction: str, compressor, data, numbers: list[int], first_byte: int = 0) -> Simulation:
    """Returns ranks of which one receives random bytes at a random place of one of these messages."""
    number = data.draw(st.sampled_from(numbers))
    at = data.draw(st.integers(first_byte, len(untouched(reduction, compressor).kept[number]) - 1))
    noise = np.frombuffer(data.draw(st.binary(min_size=1, max_size=40)), np.uint8)

    def change(_: list[np.ndarray], message: np.ndarray) -> np.ndarray:
        part = message[at : at + len(noise)]
        part[:] = noise[: len(part)]
        return message

    return simulate(reduction, Wire(number, change), compressor)


def all_that_passes_for_finite_is(ranks: Simulation) -> None:
    for rank, pipeline in zip(ranks.ranks, ranks.pipelines, strict=True):
        for i, bad in enumerate(pipeline.result.nonfinite.tolist()):
            assert bad or np.isfinite(rank.outputs[i]).all()


@every_reduction
@pytest.mark.parametrize("compressor", [BITS4, Cast("float32"), Cast("float16")], ids=str)
@examples(25)
@given(data=st.data())
def test_random_bytes_are_a_typed_error_or_leave_no_wrong_mean_unnoticed(reduction: str, compressor, data):
    """Whatever a message holds, no rank crashes, and means that a rank takes for finite are finite.

    A rank that is told of different fingerprints waits for a comparison, which the others may know nothing of.
    """
    ranks = with_noise(reduction, compressor, data, untouched(reduction, compressor).messages())
    errors = ranks.attempt(last=True)
    assert all(error is None or isinstance(error, GradcompError) for error in errors)
    if errors == [None] * WORLD:
        all_that_passes_for_finite_is(ranks)


@pytest.mark.parametrize("reduction", ["all_to_all", "tree"])
def test_a_rank_that_alone_is_told_of_different_fingerprints_does_not_wait_for_ever(reduction: str):
    number = untouched(reduction).messages()[-1]

    def change(_: list[np.ndarray], message: np.ndarray) -> np.ndarray:
        message[FIXED.itemsize + len(LAYERS)] |= DIFFERENT
        return message

    wire = Wire(number, change)
    errors = simulate(reduction, wire).attempt(last=True)
    alone = wire.ways[number][1]
    assert isinstance(errors.pop(alone), TransportError)
    assert errors == [None] * (WORLD - 1)


@pytest.mark.parametrize("reduction", [*PARTIAL, "sra"])
@examples(20)
@given(data=st.data())
def test_random_bytes_on_the_way_to_the_sum_are_one_mean_for_all(reduction: str, data):
    """All ranks get the same consequences of one message."""
    wire = untouched(reduction)
    up = [n for n in wire.messages() if wire.kept[n][3] == 0]
    ranks = with_noise(reduction, BITS4, data, up, 0 if reduction == "sra" else HEADER)
    errors = ranks.attempt()
    if reduction == "sra" and errors != [None] * WORLD:  # noise in a header
        assert all(error is None or isinstance(error, GradcompError) for error in errors)
        return
    assert errors == [None] * WORLD
    means = [[rank.outputs[i] for i in range(len(LAYERS))] for rank in ranks.ranks]
    assert all(same_bytes(a, b) for other in means for a, b in zip(other, means[0], strict=True))
    verdicts = [p.result.nonfinite.tolist() for p in ranks.pipelines]
    assert verdicts == [verdicts[0]] * WORLD
    all_that_passes_for_finite_is(ranks)


# --- what is possible, and wrong: under scatter-reduce-allgather --------------------------------------------


def with_change(compressor, at: int, data: bytes) -> Simulation:
    """Returns ranks of which rank 2 changes bytes of its first message with so large a payload."""
    wire = untouched("sra", compressor)
    number = next(
        n
        for n in wire.messages()
        if wire.ways[n][0] == 2 != wire.ways[n][1] and len(payload_of(wire.kept[n])) >= len(data)
    )

    def change(_: list[np.ndarray], message: np.ndarray) -> np.ndarray:
        message[at : at + len(data)] = np.frombuffer(data, np.uint8)
        return message

    return simulate("sra", Wire(number, change), compressor)


@pytest.mark.parametrize(
    ("compressor", "dtype"),
    [
        (Quantize(4, 50), "float32"),
        (Quantize(4, 50, "l2"), "float32"),
        (Cast("float32"), "float32"),
        (Cast("float16"), "float32"),  # of the block's scale
        (Cast("bfloat16"), "bfloat16"),
    ],
)
@pytest.mark.parametrize("bad", [np.nan, np.inf], ids=str)
def test_a_scale_or_value_that_is_not_finite_is_flagged_on_every_rank(compressor, dtype: str, bad: float):
    """The owner decodes it, so all ranks see its mean."""
    ranks = with_change(compressor, HEADER, np.full(4, bad, DTYPES[dtype]).tobytes())
    assert ranks.attempt() == [None] * WORLD
    assert all(not p.result.finite for p in ranks.pipelines)
    assert not any(p.commit() for p in ranks.pipelines)


@pytest.mark.parametrize("layer", range(len(LAYERS)))
def test_a_vote_that_reached_one_owner_only_reaches_all(layer: int):
    ranks = with_change(BITS4, 32 + layer, bytes([PRESENT | NONFINITE]))
    assert ranks.attempt() == [None] * WORLD
    for pipeline in ranks.pipelines:
        assert pipeline.result.nonfinite.tolist() == [i == layer for i in range(len(LAYERS))]
    assert all(np.isnan(rank.outputs[layer]).all() for rank in ranks.ranks)


def test_a_count_that_is_off_is_refused():
    """An allreduce has no single sender, so its header is checked in the sum."""
    ranks = Simulation(LAYERS, Identity(), 3, reorder=False)

    def spoil() -> None:
        for fused in (
            s for p in ranks.pipelines for program in p.laid_out.programs for s in program._sums.values()
        ):
            fused._counts[3] += 1

    errors = ranks.attempt(during=spoil)
    assert any(isinstance(error, PlanMismatchError) for error in errors)
    assert all(error is not None for error in errors)
