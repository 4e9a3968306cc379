"""The life of a step, against an exchanger that only writes down what it is asked to do."""

from __future__ import annotations

import gc
import itertools
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gradcomp import ConfigError, LayerSpec, StateError, TransportError
from gradcomp.core.trace import Statistics
from gradcomp.exchange.arrivals import Submission
from gradcomp.exchange.driver import TRANSITIONS, Phase, StepDriver, Verb, Words
from gradcomp.exchange.preemption import Preemption
from gradcomp.exchange.step import StepResult
from gradcomp.reduce.header import APPLIED, DISCARDED, KEPT

LAYERS = [LayerSpec("dense", (4, 3)), LayerSpec("rows", (10, 2)), LayerSpec("others", (10, 2), "float64")]


class Exchanger:
    """Alone, so that what is gathered is its own; ``says``: what the ranks vote."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.error: Exception | None = None
        self.owes_vote = False
        self.says = True
        self.sparse_layers: list[int] = []
        self.recorder = None
        self.pipeline = SimpleNamespace(
            layers=LAYERS,
            ordering=SimpleNamespace(sparse=frozenset()),
            active=0,
            preemption=Preemption(),
            outcome=0,
            statistics=Statistics(),
            arrivals=self,
        )
        self.result = StepResult(1, *(np.zeros(3, dtype=bool) for _ in range(3)))

    def open(self, scale: float, rate: float, momenta: None) -> None:
        self.calls.append(("open", scale, rate))

    def submit(self, submission: Submission) -> None:
        self.calls.append(("submit", submission.layer))

    def submit_absent(self, layer: int, *, sparse: bool) -> None:
        self.calls.append(("submit rows", layer))

    def flush(self, *, late: bool = False) -> None:
        self.calls.append("late flush" if late else "flush")

    def wait(self) -> StepResult:
        self.calls.append("wait")
        if self.error is not None:
            raise self.error
        self.pipeline.ordering.sparse = frozenset(self.sparse_layers)
        return self.result

    def vote(self, yes: bool) -> bool:
        self.owes_vote = False
        self.calls.append(("vote", yes))
        return yes and self.says

    def commit(self, outcome: int = APPLIED, *, edited: bool = False) -> bool:
        self.calls.append(("commit", outcome, "edited") if edited else ("commit", outcome))
        return True

    def discard(self) -> None:
        self.calls.append("discard")

    def skip(self) -> None:
        self.calls.append("skip")

    def abort(self, message: str) -> None:
        self.calls.append(("abort", message))

    def allgather_bytes(self, payload: bytes) -> list[bytes]:
        self.calls.append("gather")
        return [payload]


class CheckpointManager:
    def __init__(self, calls: list[Any]) -> None:
        self.calls = calls
        self.wrong: Exception | None = None

    def before_step(self) -> None:
        self.calls.append("before step")
        if self.wrong is not None:
            raise self.wrong


class Adapter:
    words = Words("a step is open here", "; hand it in earlier", "; step together")
    listener = None

    def __init__(self, calls: list[Any]) -> None:
        self.calls = calls
        self.wrong: Exception | None = None
        self.at_rest = True

    def means_complete(self) -> None:
        self.calls.append("means complete")
        if self.wrong is not None:
            raise self.wrong

    def finalise(self) -> bool:
        self.calls.append("finalise")
        return self.at_rest


class Case:
    """A driver with everything that it drives; ``calls``: in the order in which they were made."""

    def __init__(self, **arguments: Any) -> None:
        self.exchanger = Exchanger()
        self.calls = self.exchanger.calls
        self.adapter = Adapter(self.calls)
        self.checkpoint_manager: Any = CheckpointManager(self.calls)
        exchanger: Any = self.exchanger
        adapter: Any = self.adapter
        shapes = [layer.shape for layer in LAYERS]
        self.driver = StepDriver(exchanger, self.checkpoint_manager, adapter, shapes, rank=3, **arguments)

    def at(self, phase: Phase) -> Case:
        """Bring the driver to ``phase`` on the shortest way, and forget the calls."""
        for verb in WAYS[phase]:
            do(self.driver, verb)
        assert self.driver.phase is phase
        self.calls.clear()
        return self


WAYS = {
    Phase.IDLE: [],
    Phase.OPEN: [Verb.OPEN],
    Phase.FLUSHED: [Verb.OPEN, Verb.FLUSH],
    Phase.DONE: [Verb.OPEN, Verb.FLUSH, Verb.WAIT],
    Phase.COMMITTED: [Verb.OPEN, Verb.FLUSH, Verb.WAIT, Verb.COMMIT],
    Phase.DISCARDED: [Verb.OPEN, Verb.FLUSH, Verb.WAIT, Verb.DISCARD],
    Phase.RETIRED: [Verb.RETIRE],
}


def do(driver: StepDriver, verb: Verb) -> object:
    if verb is Verb.SUBMIT:
        return driver.submit(Submission(0, 8, 8))
    if verb is Verb.AMEND:
        return driver.amend(DISCARDED)
    if verb is Verb.RETIRE:
        return driver.retire("another has the layers")
    return getattr(driver, verb.name.lower())()


BETWEEN_STEPS = {Phase.IDLE, Phase.COMMITTED, Phase.DISCARDED}

#: Written out once more, so that a change of the table is one on purpose.
LEGAL = {
    (Verb.SUBMIT, Phase.OPEN): Phase.OPEN,
    (Verb.FLUSH, Phase.OPEN): Phase.FLUSHED,
    (Verb.WAIT, Phase.FLUSHED): Phase.DONE,
    (Verb.COMMIT, Phase.DONE): Phase.COMMITTED,
    (Verb.KEEP, Phase.DONE): Phase.COMMITTED,
    (Verb.REFUSE, Phase.DONE): Phase.DISCARDED,
    (Verb.DISCARD, Phase.DONE): Phase.DISCARDED,
    **{(Verb.OPEN, phase): Phase.OPEN for phase in BETWEEN_STEPS},
    **{(Verb.AMEND, phase): phase for phase in BETWEEN_STEPS},
    **{(Verb.RETIRE, phase): Phase.RETIRED for phase in Phase},
}


def test_the_table_has_every_verb_and_no_other_way():
    assert set(TRANSITIONS) == set(Verb)
    assert {(verb, at): to for verb, ways in TRANSITIONS.items() for at, to in ways.items()} == LEGAL


@pytest.mark.parametrize(("verb", "phase"), list(itertools.product(Verb, Phase)))
def test_a_verb_leads_where_the_table_says_or_is_a_state_error_that_changes_nothing(verb: Verb, phase: Phase):
    case = Case().at(phase)
    if (verb, phase) in LEGAL:
        do(case.driver, verb)
        assert case.driver.phase is LEGAL[verb, phase]
        return
    with pytest.raises(StateError):
        do(case.driver, verb)
    assert case.driver.phase is phase
    assert case.calls == []


def test_an_illegal_verb_says_what_cannot_be_done_and_why():
    with pytest.raises(StateError, match="cannot accept the step: a step is open"):
        Case().at(Phase.OPEN).driver.commit()


def test_a_late_gradient_is_named_with_the_frontends_advice():
    case = Case().at(Phase.FLUSHED)
    late = r"layer 'rows' has a gradient after its step closed; hand it in earlier"
    with pytest.raises(StateError, match=late):
        case.driver.submit_rows(1, lambda: pytest.fail("nobody asks for them"))
    with pytest.raises(StateError, match=late):
        case.driver.submit(Submission(1, 8, 8))


def test_a_step_from_the_checkpoints_look_to_its_end():
    case = Case()
    case.driver.open(1024.0, 0.5)
    case.driver.submit(Submission(0, 8, 8))
    case.driver.flush()
    assert case.driver.under_way
    means = case.driver.wait()
    assert not case.driver.under_way
    assert means is case.driver.means
    assert means.result is case.exchanger.result
    assert case.driver.commit()
    assert case.driver.means is None
    assert case.calls == [
        "before step",
        ("open", 1024.0, 0.5),
        ("submit", 0),
        "flush",
        "wait",
        "means complete",
        ("commit", APPLIED),
    ]


def test_a_checkpoint_of_another_model_keeps_the_step_from_opening():
    case = Case()
    case.checkpoint_manager.wrong = StateError("another model")
    with pytest.raises(StateError, match="another model"):
        case.driver.open()
    assert case.calls == ["before step"]
    case.checkpoint_manager.wrong = None
    case.driver.open()
    assert case.driver.phase is Phase.OPEN


# ------------------------------------------------------------------------------------------ what becomes of a step


@pytest.mark.parametrize(
    ("verb", "then"),
    [(Verb.KEEP, ("commit", KEPT)), (Verb.REFUSE, ("commit", DISCARDED)), (Verb.DISCARD, "discard")],
)
@pytest.mark.parametrize("agrees", [False, True])
def test_who_does_not_step_votes_against_it_once(verb: Verb, then: Any, agrees: bool):
    case = Case(agrees=agrees).at(Phase.DONE)
    do(case.driver, verb)
    assert case.calls == [*([("vote", False)] if agrees else []), then]
    assert case.driver.means is None


@pytest.mark.parametrize("agreed", [False, True])
def test_ranks_that_vote_accept_a_step_together_or_skip_it(agreed: bool):
    case = Case(agrees=True).at(Phase.DONE)
    case.exchanger.says = agreed
    assert case.driver.commit() is agreed
    assert case.calls == [("vote", True), ("commit", APPLIED) if agreed else "skip"]
    assert case.driver.phase is (Phase.COMMITTED if agreed else Phase.DISCARDED)


@pytest.mark.parametrize("agrees", [False, True])
def test_a_vote_is_owed_from_the_means_on(agrees: bool):
    case = Case(agrees=agrees).at(Phase.FLUSHED)
    assert not case.exchanger.owes_vote
    case.driver.wait()
    assert case.exchanger.owes_vote is agrees


@pytest.mark.parametrize("known", [0, APPLIED])
def test_only_an_outcome_that_there_was_is_corrected(known: int):
    case = Case().at(Phase.COMMITTED)
    case.exchanger.pipeline.outcome = known
    case.driver.amend(DISCARDED)
    assert case.exchanger.pipeline.outcome == (DISCARDED if known else 0)


# ------------------------------------------------------------------------------------------ means that cannot be used


def test_what_the_frontend_finds_wrong_with_the_means_throws_them_away():
    case = Case(agrees=True).at(Phase.FLUSHED)
    case.adapter.wrong = ConfigError("two scalers")
    with pytest.raises(ConfigError, match="two scalers"):
        case.driver.wait()
    assert case.calls == ["wait", "means complete", "discard"]
    assert case.driver.phase is Phase.DISCARDED
    assert case.driver.means is None
    assert not case.exchanger.owes_vote
    case.driver.open()


def test_a_layer_that_is_sparse_here_and_dense_there_is_a_state_error():
    case = Case().at(Phase.FLUSHED)
    case.exchanger.result.present[1] = case.exchanger.result.sparse[1] = True
    with pytest.raises(StateError, match="layer 'rows' has a sparse gradient on one rank and a dense one on"):
        case.driver.wait()
    assert case.calls[-1] == "discard"


# ------------------------------------------------------------------------------------------ sparse layers


def rows() -> tuple[Any, Any]:
    return np.array([7, 2, 7]), np.ones((3, 2), dtype=np.float32)


def test_rows_are_read_when_the_step_is_done_and_their_mean_is_returned():
    case = Case(divisor=2.0).at(Phase.OPEN)
    case.exchanger.sparse_layers = [1, 2]
    read: list[str] = []

    def late() -> tuple[Any, Any]:
        read.append("read")
        return rows()

    case.driver.submit_rows(1, late)
    case.driver.flush()
    assert read == []
    found = case.driver.wait().rows
    assert case.calls[:5] == [("submit rows", 1), "flush", "wait", "means complete", "gather"]
    assert found[2] is None
    assert found[1] is not None
    index, values = found[1]
    np.testing.assert_array_equal(index, [2, 7])
    np.testing.assert_array_equal(values, np.array([[0.5, 0.5], [1.0, 1.0]], dtype=np.float32))
    assert values.dtype == np.float32


def test_a_layer_that_was_sparse_takes_no_dense_gradient():
    case = Case()
    case.driver.refuse_dense(1)
    case.exchanger.pipeline.ordering.sparse = frozenset([1])
    case.driver.refuse_dense(0)
    with pytest.raises(StateError, match="'rows' had sparse gradients before and has a dense one now"):
        case.driver.refuse_dense(1)


@pytest.mark.parametrize("bad", ["not read", "not there"])
def test_rows_that_cannot_be_sent_are_told_to_those_who_wait_for_them(bad: str):
    def wrong() -> tuple[Any, Any]:
        if bad == "not read":
            raise StateError("no rows")
        return np.array([10]), np.ones((1, 2), dtype=np.float32)

    case = Case().at(Phase.OPEN)
    case.exchanger.sparse_layers = [1]
    case.driver.submit_rows(1, wrong)
    case.driver.flush()
    with pytest.raises(StateError) as caught:
        case.driver.wait()
    assert case.calls[-1] == ("abort", f"rank 3: StateError: {caught.value}")


# ------------------------------------------------------------------------------------------ errors


class Kept:
    """What a frame holds when an error is raised in it."""


def test_an_error_is_told_to_the_others_once_and_ends_all_steps():
    case = Case().at(Phase.OPEN)
    with pytest.raises(ConfigError, match="mine"), case.driver.telling(), case.driver.telling():
        raise ConfigError("mine")
    assert case.calls == [("abort", "rank 3: ConfigError: mine")]
    for _ in range(2):
        with pytest.raises(ConfigError, match="mine"):
            case.driver.check()
    with pytest.raises(ConfigError, match="mine"):
        case.driver.commit()
    with pytest.raises(ConfigError, match="mine"):
        case.driver.rest()


def test_an_error_that_is_not_ours_comes_again_as_a_state_error_with_its_text():
    case = Case().at(Phase.OPEN)
    with pytest.raises(ZeroDivisionError), case.driver.telling():
        raise ZeroDivisionError("by nought")
    assert case.calls == [("abort", "rank 3: ZeroDivisionError: by nought")]
    with pytest.raises(StateError, match="ZeroDivisionError: by nought"):
        case.driver.check()


def test_an_error_does_not_keep_what_its_frames_hold():
    case = Case().at(Phase.OPEN)

    def fails() -> weakref.ref[Kept]:
        kept = Kept()
        try:
            with case.driver.telling():
                raise ConfigError("mine")
        except ConfigError:
            return weakref.ref(kept)

    found = fails()
    gc.collect()
    assert found() is None


def test_nobody_is_told_what_all_know():
    case = Case().at(Phase.OPEN)
    case.exchanger.error = TransportError("rank 1 is gone")
    with pytest.raises(ValueError, match="mine"), case.driver.telling():
        raise ValueError("mine")
    assert case.calls == []
    with pytest.raises(TransportError, match="rank 1 is gone"):
        case.driver.check()


def test_after_a_failed_wait_every_verb_raises_its_error():
    case = Case().at(Phase.FLUSHED)
    case.exchanger.error = TransportError("rank 1 is gone")
    for verb in (Verb.WAIT, Verb.WAIT, Verb.OPEN, Verb.SUBMIT, Verb.FLUSH, Verb.COMMIT):
        with pytest.raises(TransportError, match="rank 1 is gone"):
            do(case.driver, verb)
    assert case.driver.means is None


# ------------------------------------------------------------------------------------------ between steps


@pytest.mark.parametrize("phase", Phase)
def test_the_state_is_read_between_steps_only(phase: Phase):
    case = Case().at(phase)
    if phase in BETWEEN_STEPS:
        case.checkpoint_manager.finish_step()
        return
    text = "another has the layers" if phase is Phase.RETIRED else "a step is open here"
    with pytest.raises(StateError, match=text):
        case.checkpoint_manager.finish_step()


def test_a_frontend_may_end_a_step_for_it():
    case = Case().at(Phase.DONE)
    case.adapter.finalise = case.driver.commit  # type: ignore[method-assign]
    case.driver.rest()
    assert case.driver.phase is Phase.COMMITTED


def test_gradients_that_wait_for_a_step_are_one_that_is_open():
    case = Case()
    case.adapter.at_rest = False
    with pytest.raises(StateError, match="a step is open here"):
        case.driver.rest()


def test_a_world_of_one_looks_at_checkpoints_and_has_no_steps():
    calls: list[Any] = []
    checkpoint_manager: Any = CheckpointManager(calls)
    adapter: Any = Adapter(calls)
    driver = StepDriver(None, checkpoint_manager, adapter, [])
    driver.checkpoint_manager.before_step()
    driver.rest()
    assert calls == ["before step"]
    assert not driver.attached
    assert driver.error is None
