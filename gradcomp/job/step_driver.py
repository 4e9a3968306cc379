"""``StepDriver``: the life of a step, the same under every framework.

A step is opened, gradients are submitted, it is flushed and waited for; then it is accepted or thrown away:
:mod:`gradcomp.job.step_phases` has the table. A frontend translates what its framework calls (hooks, buckets, ops) into
these verbs, and gives an :class:`gradcomp.job.adapter.Adapter` for what only the framework can do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gradcomp.core.errors import GradcompError, StateError
from gradcomp.engine import Exchanger
from gradcomp.job.adapter import Adapter
from gradcomp.job.checkpoint_manager import CheckpointManager
from gradcomp.job.sparse import Array, Rows, mean_of_rows
from gradcomp.job.step_phases import BETWEEN_STEPS, TRANSITIONS, Phase, Verb
from gradcomp.pipeline import Number, StepResult, Submission
from gradcomp.reduce.header import DISCARDED, KEPT

#: A tuple: to hash enumerations takes longer than the rest of a submission.
_TAKES_GRADIENTS = tuple(TRANSITIONS[Verb.SUBMIT])


@dataclass(frozen=True)
class Means:
    """A step that is done. ``rows``: of every sparse layer; None for one without a gradient on any rank."""

    result: StepResult
    rows: Mapping[int, Rows | None]


class StepDriver:
    """Takes one exchanger through its steps.

    ``exchanger``: None in a world of one, where :meth:`before_step` is all that is called. ``shapes``: of the gradients
    by layer; ``divisor``: of the sums of sparse ones. ``agrees``: the ranks vote before a step is accepted. ``rank``:
    this one's number in the job.

    One thread at a time calls a verb. When the exchanger has failed, verbs raise its error.
    """

    def __init__(
        self,
        exchanger: Exchanger | None,
        checkpoint_manager: CheckpointManager,
        adapter: Adapter,
        shapes: Sequence[tuple[int, ...]],
        *,
        divisor: float = 1.0,
        agrees: bool = False,
        rank: int = 0,
    ) -> None:
        self._exchanger = exchanger
        #: Where the compression state is.
        self.checkpoint_manager = checkpoint_manager
        checkpoint_manager.finish_step = self.rest
        self._adapter = adapter
        self._shapes = shapes
        self._divisor = divisor
        #: Whether the ranks vote before a step is accepted.
        self.agrees = agrees
        #: Called when a step that is done is about to end, whatever becomes of it. Collective; may raise on all ranks
        #: alike. Not before: ranks that wait for several exchanges may come to the ends of these in different orders.
        self.before_end: Callable[[], None] = lambda: None
        self._rank = rank
        self._phase = Phase.IDLE
        self._means: Means | None = None
        self._rows: dict[int, Callable[[], tuple[Array, Array]]] = {}
        self._failed: tuple[type[GradcompError], str] | None = None  # here; the other ranks were told to stop

    # -- what a frontend may ask ----------------------------------------------------------------------------------

    @property
    def attached(self) -> bool:
        """Whether there is an exchanger: not in a world of one."""
        return self._exchanger is not None

    @property
    def exchanger(self) -> Exchanger:
        """The exchanger, where there is one."""
        assert self._exchanger is not None, "a world of one exchanges nothing"
        return self._exchanger

    @property
    def phase(self) -> Phase:
        """Where the step is."""
        return self._phase

    @property
    def under_way(self) -> bool:
        """Whether a step has begun that nobody has waited for."""
        return self._phase is Phase.OPEN or self._phase is Phase.FLUSHED

    @property
    def means(self) -> Means | None:
        """Of the step that is done and neither accepted nor thrown away."""
        return self._means

    @property
    def error(self) -> GradcompError | None:
        """Why there can be no step any more, if that is so."""
        if self._failed is not None:
            kind, text = self._failed
            return kind(text)
        return None if self._exchanger is None else self._exchanger.error

    def refuse_dense(self, layer: int) -> None:
        """StateError if the layer has had sparse gradients, on any rank: it is about to have a dense one."""
        pipeline = self.exchanger.pipeline
        if layer in pipeline.ordering.sparse:
            name = pipeline.layers[layer].name
            raise StateError(f"layer {name!r} had sparse gradients before and has a dense one now")

    def check(self) -> None:
        """Raise why there can be no step any more."""
        if (error := self.error) is not None:
            raise error

    # -- a step ---------------------------------------------------------------------------------------------------

    def before_step(self) -> None:
        """Raise if a checkpoint was loaded that is not the model's; :meth:`open` does it, a world of one calls it."""
        self.checkpoint_manager.before_step()

    def open(
        self,
        scale: Number = 1.0,
        learning_rate: Number = 0.0,
        momenta: npt.NDArray[np.float64] | None = None,
    ) -> None:
        """Begin a step; see :meth:`gradcomp.engine.Exchanger.open`."""
        after = self._after(Verb.OPEN)
        self.before_step()
        self.exchanger.open(scale, learning_rate, momenta)
        self._rows = {}
        self._phase = after

    def submit(self, submission: Submission) -> None:
        """A dense gradient is ready."""
        if self._phase not in _TAKES_GRADIENTS:
            raise self.late(submission.layer)
        self.exchanger.submit(submission)

    def submit_rows(self, layer: int, rows: Callable[[], tuple[Array, Array]]) -> None:
        """A sparse gradient; ``rows`` gives numbers and values of its rows when the step is waited for."""
        if self._phase not in _TAKES_GRADIENTS:
            raise self.late(layer)
        self.exchanger.submit_absent(layer, sparse=True)
        self._rows[layer] = rows

    def flush(self, *, late: bool = False) -> None:
        """No more gradients will come in this step; ``late``: nor have this rank's own ended it, as the others' did."""
        after = self._after(Verb.FLUSH)
        self.exchanger.flush(late=late)
        self._phase = after

    def wait(self) -> Means:
        """Block until the means are there, those of sparse layers too.

        A step whose means cannot be used is thrown away: StateError on every rank if a layer has a sparse gradient on
        one and a dense one on another, and whatever the adapter raises.
        """
        after = self._after(Verb.WAIT)
        result = self.exchanger.wait()
        self._phase = Phase.DISCARDED  # unless nothing is wrong with it
        try:
            self._adapter.means_complete()
            self._means = Means(result, self._means_of_rows(result))
        except Exception:
            if self.error is None:
                self.exchanger.discard()
            raise
        self.exchanger.owes_vote = self.agrees
        self._phase = after
        return self._means

    def _means_of_rows(self, result: StepResult) -> Mapping[int, Rows | None]:
        """Of all layers that some rank has had a sparse gradient of, now or earlier: all ranks know them."""
        layers = self.exchanger.pipeline.layers
        mixed = np.flatnonzero(result.present & result.sparse).tolist()
        if mixed:
            raise StateError(
                f"layer {layers[mixed[0]].name!r} has a sparse gradient on one rank and a dense one on another"
            )
        means: dict[int, Rows | None] = {}
        for layer in sorted(self.exchanger.pipeline.ordering.sparse):
            wire = np.dtype("<f8" if layers[layer].dtype == "float64" else "<f4")
            rows = self._rows.pop(layer, None)
            with self.telling():  # the others wait for this rank's rows
                own = None if rows is None else rows()
                means[layer] = mean_of_rows(
                    self.exchanger, layers[layer].name, self._shapes[layer], wire, own, self._divisor
                )
        return means

    def commit(self, *, edited: bool = False) -> bool:
        """The means will be applied: residuals take their new values. False if the ranks agreed to skip the step.

        ``edited``: they were changed, while some rank is late.
        """
        after = self._ending(Verb.COMMIT)
        if self.agrees and not self.exchanger.vote(True):
            self.exchanger.discard()
            self.exchanger.pipeline.statistics.skipped_steps += 1
            self._end(self._after(Verb.DISCARD))
            return False
        self.exchanger.commit(edited=edited)
        self._end(after)
        return True

    def keep(self) -> None:
        """The means stay where they are and are added to: what was sent counts as sent."""
        after = self._ending(Verb.KEEP)
        self._vote_against()
        self.exchanger.commit(KEPT)
        self._end(after)

    def refuse(self) -> None:
        """End a step that cannot be accepted, for a value was not finite."""
        after = self._ending(Verb.REFUSE)
        self._vote_against()
        self.exchanger.commit(DISCARDED)
        self._end(after)

    def discard(self) -> None:
        """Throw the means away: the compression state stays what it was."""
        after = self._ending(Verb.DISCARD)
        self._vote_against()
        self.exchanger.discard()
        self._end(after)

    def amend(self, outcome: int) -> None:
        """What became of the last step, where a frontend learns of it later only; 0: this rank had no step.

        The others hear of it in the next one.
        """
        self._after(Verb.AMEND)
        if self.exchanger.pipeline.outcome:
            self.exchanger.pipeline.outcome = outcome

    def _ending(self, verb: Verb) -> Phase:
        """Where ``verb`` leads from here; a step whose end is refused is thrown away."""
        after = self._after(verb)
        try:
            self.before_end()
        except Exception:
            if self.error is None:
                self.exchanger.owes_vote = False
                self.exchanger.discard()
                self._end(self._after(Verb.DISCARD))
            raise
        return after

    def _vote_against(self) -> None:
        if self.agrees:
            self.exchanger.vote(False)  # one vote per exchange: the others cast theirs, too

    def _end(self, phase: Phase) -> None:
        self._phase, self._means = phase, None

    def _after(self, verb: Verb) -> Phase:
        """Where ``verb`` leads from here."""
        after = TRANSITIONS[verb].get(self._phase)
        if after is None or self._failed is not None:
            raise self.error or StateError(f"cannot {verb.value}: {self._phase.value}")
        return after

    def late(self, layer: int) -> GradcompError:
        """For a gradient that comes when no step takes one."""
        name = self.exchanger.pipeline.layers[layer].name
        text = f"layer {name!r} has a gradient after its step closed{self._adapter.words.late_gradient}"
        return self.error or StateError(text)

    # -- beside steps ---------------------------------------------------------------------------------------------

    def rest(self) -> None:
        """Make sure that no step is under way, for the state is about to be read or replaced. Local.

        Raises the error of an exchanger that has failed, and StateError in the midst of a step.
        """
        if self._exchanger is None:
            return
        self.check()
        if not self._adapter.finalise() or self._phase not in BETWEEN_STEPS:
            raise StateError(self._adapter.words.step_is_open)

    def fail(self, error: Exception) -> None:
        """The other ranks wait for what this one cannot bring after ``error``: tell them, unless all have stopped."""
        if self.error is None:
            # The error itself holds the frames that it was raised in, and what the program keeps there.
            text = f"{type(error).__name__}: {error}"
            self._failed = StateError, text
            if isinstance(error, GradcompError):
                self._failed = type(error), str(error)
            self.exchanger.abort(f"rank {self._rank}: {text}")

    def retire(self, why: str) -> None:
        """Another exchange has the layers: every verb raises StateError with ``why``. Local, on all ranks alike."""
        if self.error is None:
            self._failed = StateError, why
        self._end(TRANSITIONS[Verb.RETIRE][self._phase])

    @contextmanager
    def telling(self) -> Iterator[None]:
        """:meth:`fail` with what is raised in here."""
        try:
            yield
        except Exception as error:
            self.fail(error)
            raise
