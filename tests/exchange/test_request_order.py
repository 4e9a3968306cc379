"""Requests that run as predicted, without a comparison; what is predicted; ranks that do otherwise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from exchange.test_requests import Ranked, every_kind, inputs_of, overwritten, tampered
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

from gradcomp import (
    Cast,
    Compressor,
    ConfigError,
    GradcompError,
    Identity,
    LayerSpec,
    PlanMismatchError,
    Quantize,
    StateError,
    TransportError,
    WireFormatError,
)
from gradcomp.exchange import request_group
from gradcomp.exchange.request_group import TRUSTED, RequestGroup, RequestOrder, Run
from gradcomp.exchange.requests import ALL_GATHER, REDUCE_SCATTER, PreparedRequest, Request
from gradcomp.exchange.waiting import Waiting
from gradcomp.kernels.reference_headers import FIXED
from gradcomp.reduce.header import DECLINED, ByteHeader

CODEC = Quantize(4, 16)
LAYERS = (LayerSpec("a", (70,)), LayerSpec("b", (9, 5)))
#: The order of a step: forward, backward, and gradients.
STEP = ("first", "second", "second", "gradients")
REQUESTS = {
    "first": Request.of(ALL_GATHER, LAYERS, CODEC, name="first"),
    "second": Request.of(ALL_GATHER, LAYERS[:1], CODEC, name="second"),
    "gradients": Request.of(REDUCE_SCATTER, LAYERS, CODEC),
    "other": Request.of(REDUCE_SCATTER, LAYERS[:1], Quantize(8, 16), name="other"),
}


# --- what is predicted ------------------------------------------------------------------------------------------


def fake(text: str, keeps_state: bool = False) -> PreparedRequest:
    return SimpleNamespace(text=text, keeps_state=keeps_state)  # type: ignore[return-value]


def continuation(history: Sequence[str]) -> str | None:
    """What came behind the longest sequence that has just been repeated."""
    for length in range(len(history) // 2, 0, -1):
        if history[-length:] == history[-2 * length : -length]:
            return history[-length]
    return None


@examples(100)
@given(st.lists(st.sampled_from("abc"), max_size=40))
def test_the_longest_repetition_goes_on_once_that_was_right_three_times(history: list[str]):
    order, right = RequestOrder(), 0
    for i, text in enumerate(history):
        right = right + 1 if continuation(history[:i]) == text else 0
        order.note([fake(text)], True)
        expected = continuation(history[: i + 1]) if right >= TRUSTED else None
        assert (order.predicted.text if order.predicted else None) == expected


@examples(50)
@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=12), st.booleans())
def test_of_repeated_steps_all_groups_are_predicted(step: list[str], drops: bool):
    """Also while the older half of the history is forgotten, if a step fits into the other twice."""
    with pytest.MonkeyPatch.context() as patched:
        if drops:
            patched.setattr(request_group, "_MOST", 4 * len(step))
        order = RequestOrder()
        for number in range(9):
            for text in step:
                if number >= 2 + -(-TRUSTED // len(step)):
                    assert order.predicted.text == text
                order.note([fake(text)], True)


def test_what_was_forgotten_is_not_held(monkeypatch):
    monkeypatch.setattr(request_group, "_MOST", 8)
    order = RequestOrder()
    order.note([fake("once")], True)
    for _ in range(8):
        order.note([fake("often")], True)
    assert list(order._requests) == ["often"]
    assert order.predicted.text == "often"


@pytest.mark.parametrize(
    ("requests", "changed"),
    [([fake("a"), fake("b")], True), ([fake("a")], False), ([fake("a", keeps_state=True)], True), ([], True)],
    ids=["two in a group", "unchanged inputs", "residuals", "none"],
)
def test_some_groups_are_always_compared(requests: list[PreparedRequest], changed: bool):
    order = RequestOrder()
    for _ in range(10):
        order.note(requests, changed)
    assert order.predicted is None


def test_the_request_that_ran_last_is_the_one_that_is_predicted():
    """Numbers of runs of that one are the same on all ranks."""
    order, again = RequestOrder(), fake("a")
    for request in [fake("a")] * 5 + [again]:
        order.note([request], True)
    assert order.predicted is again


# --- ranks that do what is expected -----------------------------------------------------------------------------


Hosts = tuple[int, ...] | None
#: Worlds, and hosts if messages travel in two levels.
PLACES = [(2, None), (3, None), (3, (0, 0, 1)), (4, (0, 0, 1, 1))]


class Steps(Ranked):
    """All requests above on N ranks. ``without``: every group is compared."""

    def __init__(self, world: int, *, without: bool = False, hosts: Hosts = None, **options) -> None:
        super().__init__(REQUESTS["first"], world, **options)
        self.hosts = hosts
        self.requests = [self.prepare(rank) for rank in range(world)]
        self.without = without
        self.generator = np.random.default_rng(7)

    def prepare(self, rank: int) -> dict[str, PreparedRequest]:
        checks = self.world.tamper is None
        return {
            name: PreparedRequest(replace(request, hosts=self.hosts), rank, self.size, checksums=checks)
            for name, request in REQUESTS.items()
        }

    def inputs(self, name: str) -> list[list[np.ndarray]]:
        return [
            [self.generator.standard_normal(shape).astype(np.float32) for shape in own[name].input_shapes]
            for own in self.requests
        ]

    def go(self, names: Sequence[str] = STEP, unchanged: Sequence[bool] | None = None) -> list[bytes]:
        """Run groups of one request; of each the bytes that rank 0 gets, and every rank if they gather."""
        results = []
        for name in names:
            inputs = self.inputs(name)
            outputs = [[np.zeros(s, np.float32) for s in own[name].output_shapes] for own in self.requests]
            same = unchanged or [False] * self.size
            runs = [
                [Run(own[name], inputs[rank], outputs[rank], unchanged=same[rank])]
                for rank, own in enumerate(self.requests)
            ]
            for one in self.attempt(inputs, runs.__getitem__):
                if isinstance(one, Exception):
                    raise one
            every = [b"".join(a.tobytes() for a in arrays) for arrays in outputs]
            if REQUESTS[name].kind == ALL_GATHER:
                assert set(every) == {every[0]}
            results.append(b"".join(every))
        return results

    def attempt(self, inputs, runs=None):
        if self.without:
            self.orders = [RequestOrder() for _ in range(self.size)]
        return super().attempt(inputs, runs)

    def collectives(self) -> list[int]:
        """Of every rank, how many since the last time."""
        counts = [len(transport.sent) for transport in self.transports]
        for transport in self.transports:
            transport.sent.clear()
        return counts

    @property
    def expects(self) -> set[str | None]:
        return {order.predicted.text if order.predicted else None for order in self.orders}


def steady(world: int, steps: int = 3, **options) -> Steps:
    ranked = Steps(world, **options)
    ranked.go(STEP * steps)
    assert ranked.expects == {ranked.requests[0]["first"].text}
    ranked.collectives()
    return ranked


@pytest.mark.parametrize("world", [2, 3, 4])
def test_in_steps_that_repeat_a_request_takes_one_round(world: int):
    compared = Steps(world, without=True)
    compared.go(STEP * 3)
    compared.collectives()
    before = [transport.bytes_sent for transport in compared.transports]
    compared.go()
    assert compared.collectives() == [2 * len(STEP)] * world
    bytes_compared = [t.bytes_sent - at for t, at in zip(compared.transports, before, strict=True)]
    ranked = steady(world)
    before = [transport.bytes_sent for transport in ranked.transports]
    ranked.go()
    assert ranked.collectives() == [len(STEP)] * world
    for transport, at, wanted in zip(ranked.transports, before, bytes_compared, strict=True):
        assert transport.bytes_sent - at == wanted - len(STEP) * 56 * (world - 1)


@examples(40)
@given(
    st.lists(st.sampled_from([*STEP, "other"]), max_size=20),
    st.sampled_from([*PLACES, (4, None)]),
    st.sampled_from([0.0, 0.4]),
)
def test_results_are_those_of_compared_groups(behind: list[str], place: tuple[int, Hosts], delay: float):
    """Bit for bit, in any order of requests behind steps that repeat."""
    names, (world, hosts) = [*STEP * 3, *behind, *STEP], place
    compared = Steps(world, without=True, hosts=hosts)
    assert Steps(world, delay=delay, hosts=hosts).go(names) == compared.go(names)


def test_a_world_of_one_predicts_nothing_that_it_would_wait_for():
    assert Steps(1).go(STEP * 5) == Steps(1, without=True).go(STEP * 5)


# --- ranks that do otherwise ------------------------------------------------------------------------------------


def runs_of(ranked: Steps, what: str, rank: int) -> list[Run]:
    """What a rank begins instead of ``first``."""
    own = ranked.requests[rank]

    def run(request: PreparedRequest, wrong: int = 0) -> Run:
        inputs = [np.ones(np.prod(shape) + wrong, np.float32) for shape in request.input_shapes]
        return Run(request, inputs, [np.full(shape, 77, np.float32) for shape in request.output_shapes])

    if what == "arrays that do not fit":
        return [run(own["first"], wrong=1)]
    if what == "two requests":
        return [run(own["first"]), run(own["second"])]
    if what == "none":
        return []
    if what == "made anew":
        return [run(ranked.prepare(rank)["first"])]
    return [run(own[what])]


OTHERWISE = {
    "second": PlanMismatchError,  # it was to come later
    "other": PlanMismatchError,  # it never ran
    "two requests": PlanMismatchError,
    "none": PlanMismatchError,
    "made anew": PlanMismatchError,  # runs have other numbers
    "arrays that do not fit": ConfigError,
}


@pytest.mark.parametrize(("what", "error"), OTHERWISE.items())
@pytest.mark.parametrize(("world", "hosts"), PLACES)
def test_a_rank_that_does_otherwise_is_an_error_on_every_rank_and_changes_nothing(
    what: str, error: type[GradcompError], world: int, hosts: Hosts
):
    """Also where other ranks hear of it in the second round only."""
    ranked, undisturbed = steady(world, hosts=hosts), steady(world, hosts=hosts)
    for other in (0, world - 1):
        runs = [runs_of(ranked, what if rank == other else "first", rank) for rank in range(world)]
        found = ranked.attempt([], lambda rank, runs=runs: runs[rank])
        assert [type(one) for one in found] == [error] * world
        assert len({str(one) for one in found}) == 1
        for run in (run for of_rank in runs for run in of_rank):
            assert all((array == 77).all() for array in run.outputs)
        ranked.collectives()
    assert ranked.expects == undisturbed.expects
    ranked.generator, undisturbed.generator = (np.random.default_rng(1) for _ in range(2))
    assert ranked.go() == undisturbed.go()
    assert ranked.collectives() == [len(STEP) * (2 if hosts else 1)] * world


@pytest.mark.parametrize("hosts", [None, (0, 0, 1)])
@pytest.mark.parametrize("what", ["second", "other", "two requests", "made anew"])
def test_ranks_that_all_do_otherwise_go_on(what: str, hosts: Hosts):
    """One exchange is thrown away, then they compare."""
    ranked = steady(3, hosts=hosts)
    runs = [runs_of(ranked, what, rank) for rank in range(3)]
    found = ranked.attempt([], lambda rank: runs[rank])
    assert not any(isinstance(one, Exception) for one in found)
    rounds = 2 if hosts else 1
    assert ranked.collectives() == [rounds + 1 + rounds * len(runs[0])] * 3
    for run in (run for of_rank in runs for run in of_rank):
        assert not any((array == 77).any() for array in run.outputs)
    ranked.go(STEP[1:] + STEP * 3)
    ranked.collectives()
    ranked.go()
    assert ranked.collectives() == [rounds * len(STEP)] * 3


def test_codes_of_before_stay_where_a_rank_declines_and_are_gone_where_it_did_not():
    ranked = steady(3)
    kept = [own["first"] for own in ranked.requests]
    before, after = ([np.zeros(shape, np.float32) for shape in kept[0].output_shapes] for _ in range(2))
    kept[1].decode_again(before)
    runs = [runs_of(ranked, "second" if rank == 1 else "first", rank) for rank in range(3)]
    found = ranked.attempt([], lambda rank: runs[rank])
    assert [type(one) for one in found] == [PlanMismatchError] * 3
    kept[1].decode_again(after)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(before, after, strict=True))
    for rank in (0, 2):
        with pytest.raises(StateError, match="no complete all-gather"):
            kept[rank].decode_again(after)


def test_unchanged_inputs_travel_where_new_ones_were_predicted():
    """Headers tell all ranks whether some inputs were new. If none were, this does not count as a repetition."""
    ranked = steady(3)
    for changed, expected in ((1, ranked.requests[0]["second"].text), (None, None)):
        ranked.go(["first"], unchanged=[rank != changed for rank in range(3)])
        assert ranked.collectives() == [1] * 3
        assert ranked.expects == {expected}
        ranked.go(STEP[1:])
        ranked.collectives()


def test_where_inputs_are_unchanged_in_every_step_only_the_comparison_travels():
    ranked = Steps(2)
    ranked.go(["first"], unchanged=[True, True])
    assert ranked.collectives() == [2, 2]  # there are no codes yet
    for _ in range(5):
        ranked.go()
        ranked.go(["first"], unchanged=[True, True])
    ranked.collectives()
    ranked.go()
    assert ranked.collectives() == [len(STEP)] * 2
    ranked.go(["first"], unchanged=[True, True])
    assert [transport.sent for transport in ranked.transports] != [[], []]
    assert all(len(data) == 56 for transport in ranked.transports for _, data in transport.sent)
    assert ranked.collectives() == [1] * 2


# --- messages from elsewhere ------------------------------------------------------------------------------------

HEADER = ByteHeader.size(len(LAYERS))


def disturbed(name: str, change: Callable[[np.ndarray], np.ndarray], world: int) -> list:
    """What ranks find if rank 1's message to rank 0 is changed, of a request that was predicted."""
    ranked = before(name, change, world)
    inputs = ranked.inputs(name)
    found = ranked.attempt(inputs, lambda rank: [Run(ranked.requests[rank][name], inputs[rank])])
    sent = {len(transport.sent) for transport in ranked.transports}
    assert sent != {0}
    return found


def before(name: str, change: Callable[[np.ndarray], np.ndarray], world: int) -> Steps:
    """Ranks that are about to run a request that is predicted; from now on rank 1's messages to rank 0 are changed."""
    on = [False]

    def tamper(source: int, destination: int, message: np.ndarray) -> np.ndarray:
        return change(message) if on[0] and (source, destination) == (1, 0) else message

    ranked = steady(world, tamper=tamper)
    ranked.go(STEP[: STEP.index(name)])
    on[0] = True
    return ranked


def declined(message: np.ndarray) -> np.ndarray:
    message[FIXED.itemsize + len(LAYERS)] |= DECLINED
    return message


def damaged(kind: str, change: Callable[[np.ndarray], np.ndarray], predicted: bool) -> list:
    """What three ranks find if a message is changed, of a request that was predicted or compared."""
    if predicted:
        return disturbed("first" if kind == ALL_GATHER else "gradients", change, 3)
    ranked = tampered(kind, change)
    return ranked.attempt(inputs_of(ranked))


@every_kind
@pytest.mark.parametrize("predicted", [False, True], ids=["compared", "predicted"])
@pytest.mark.parametrize(
    ("at", "error"),
    [(0, WireFormatError), (2, PlanMismatchError), (4, PlanMismatchError), (8, WireFormatError)],
)
def test_a_wrong_header_is_an_error_where_it_arrives(kind: str, predicted: bool, at: int, error: type):
    found = damaged(kind, overwritten(at, b"\xee"), predicted)
    assert type(found[0]) is error
    assert all(not isinstance(other, Exception) or isinstance(other, TransportError) for other in found[1:])


@every_kind
@pytest.mark.parametrize("predicted", [False, True], ids=["compared", "predicted"])
@pytest.mark.parametrize("kept", [0, 10, HEADER, -1])
def test_a_truncated_message_is_an_error_on_every_rank(kind: str, predicted: bool, kept: int):
    found = damaged(kind, lambda message: message[:kept], predicted)
    assert [type(one) for one in found] == [TransportError] * 3


@pytest.mark.parametrize("name", ["first", "gradients"])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_refusal_that_only_one_rank_hears_of_ends_all_with_an_error(name: str, world: int):
    """That rank compares, while the others run what comes next."""
    ranked = before(name, declined, world)
    at = STEP.index(name)
    left = [[runs_of(ranked, each, rank) for each in (STEP * 2)[at : at + 2]] for rank in range(world)]
    first = [runs[0][0] for runs in left]
    groups: list = [None] * world
    errors: dict[int, GradcompError] = {}
    for _ in range(100):
        for rank in {*range(world)} - errors.keys():
            try:
                if groups[rank] is None or groups[rank].poll() is Waiting.NOTHING:
                    assert left[rank], "both groups ended well"
                    transport, order = ranked.transports[rank], ranked.orders[rank]
                    groups[rank] = RequestGroup(left[rank].pop(0), transport, lambda *_: None, order)
            except GradcompError as error:
                errors[rank] = error
    assert [type(errors[rank]) for rank in range(world)] == [TransportError] * world
    assert (first[0].outputs[0] == 77).all()


@every_kind
def test_a_refusal_of_what_was_compared_is_an_error(kind: str):
    def tamper(source: int, destination: int, message: np.ndarray) -> np.ndarray:
        return declined(message) if (source, destination) == (1, 0) and len(message) != 56 else message

    ranked = Ranked(Request.of(kind, LAYERS, CODEC), 3, tamper=tamper)
    inputs = [[np.zeros(shape, np.float32) for shape in own.input_shapes] for own in ranked.prepared]
    found = ranked.attempt(inputs)
    with pytest.raises(WireFormatError, match="unknown state"):
        raise found[0]


@pytest.mark.parametrize("predicted", [True, False], ids=["predicted", "compared"])
@examples(60)
@given(
    st.sampled_from([REDUCE_SCATTER, ALL_GATHER]),
    st.integers(0, HEADER + 40),
    st.binary(min_size=1, max_size=40),
    st.sampled_from([CODEC, Quantize(2, 16, "linf"), Cast("float16"), Identity()]),
)
def test_random_bytes_are_a_typed_error_or_numbers(
    predicted: bool, kind: str, at: int, noise: bytes, compared: Compressor
):
    refusal = FIXED.itemsize + len(LAYERS)

    def change(message: np.ndarray) -> np.ndarray:
        message = overwritten(at, noise)(message)
        message[refusal] &= ~np.uint8(DECLINED)
        return message

    if predicted:
        found = disturbed("first" if kind == ALL_GATHER else "gradients", change, 2)
    else:
        ranked = tampered(kind, overwritten(at, noise), compared)
        found = ranked.attempt(inputs_of(ranked))
    assert all(isinstance(one, list | GradcompError) for one in found)
