"""Defines ``StepDriver``, which takes a step through its life, the same under every framework.

A step is opened, gradients are submitted, it is flushed and waited for; then it is accepted or thrown away:
:mod:`gradcomp.job.step_phases` has the table. A frontend translates what its framework calls (hooks, DDP buckets, ops)
into these verbs, and gives an :class:`gradcomp.job.adapter.Adapter` for what only the framework can do.
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

#: A tuple and no set, because hashing an enumeration takes longer than the rest of a submission.
_TAKES_GRADIENTS = tuple(TRANSITIONS[Verb.SUBMIT])


@dataclass(frozen=True)
class Means:
    """Holds the means of a step that is done.

    ``rows`` has those of every sparse layer, None for a layer without a gradient on any rank.
    """

    result: StepResult
    rows: Mapping[int, Rows | None]


class StepDriver:
    """Takes one exchanger through its steps.

    ``exchanger``: None in a world of one, where :meth:`before_step` is all that is called. ``shapes``: those of the
    gradients, by layer. ``divisor``: divides the sums of sparse gradients. ``agrees``: the ranks vote before a step is
    accepted. ``rank``: this rank's number in the job.

    Only one thread at a time may call a verb. Once the exchanger has failed, verbs raise its error.
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
        #: Reads and replaces the compression state.
        self.checkpoint_manager = checkpoint_manager
        checkpoint_manager.finish_step = self.rest
        self._adapter = adapter
        self._shapes = shapes
        self._divisor = divisor
        #: Whether the ranks vote before a step is accepted.
        self.agrees = agrees
        #: Called when a step that is done is about to end, in whatever way. Collective; may raise on all ranks alike.
        #: It is not called when the means come: those of several exchanges may come in another order on each rank.
        self.before_end: Callable[[], None] = lambda: None
        self._rank = rank
        self._phase = Phase.IDLE
        self._means: Means | None = None
        self._rows: dict[int, Callable[[], tuple[Array, Array]]] = {}
        #: This rank's error; the other ranks were told to stop.
        self._failed: tuple[type[GradcompError], str] | None = None

    # -- what a frontend may ask ----------------------------------------------------------------------------------

    @property
    def attached(self) -> bool:
        """Return whether there is an exchanger, which a world of one has not."""
        return self._exchanger is not None

    @property
    def exchanger(self) -> Exchanger:
        assert self._exchanger is not None, "a world of one exchanges nothing"
        return self._exchanger

    @property
    def phase(self) -> Phase:
        return self._phase

    @property
    def under_way(self) -> bool:
        """Return whether a step has begun and nobody has waited for it yet."""
        return self._phase is Phase.OPEN or self._phase is Phase.FLUSHED

    @property
    def means(self) -> Means | None:
        """Return the means of the step that is done and neither accepted nor thrown away, if there is one."""
        return self._means

    @property
    def error(self) -> GradcompError | None:
        """Return the error after which there can be no step any more, if there is one."""
        if self._failed is not None:
            kind, text = self._failed
            return kind(text)
        return None if self._exchanger is None else self._exchanger.error

    def refuse_dense(self, layer: int) -> None:
        """Raise StateError if a layer that is about to have a dense gradient has had sparse ones, on any rank."""
        pipeline = self.exchanger.pipeline
        if layer in pipeline.ordering.sparse:
            name = pipeline.layers[layer].name
            raise StateError(f"layer {name!r} had sparse gradients before and has a dense one now")

    def check(self) -> None:
        """Raise the error after which there can be no step any more, if there is one."""
        if (error := self.error) is not None:
            raise error

    # -- a step ---------------------------------------------------------------------------------------------------

    def before_step(self) -> None:
        """Raise StateError if a checkpoint was loaded without its model. ``open`` calls it; a world of one must."""
        self.checkpoint_manager.before_step()

    def open(
        self,
        scale: Number = 1.0,
        learning_rate: Number = 0.0,
        momenta: npt.NDArray[np.float64] | None = None,
    ) -> None:
        """Begin a step, with the arguments of :meth:`gradcomp.engine.Exchanger.open`."""
        after = self._after(Verb.OPEN)
        self.before_step()
        self.exchanger.open(scale, learning_rate, momenta)
        self._rows = {}
        self._phase = after

    def submit(self, submission: Submission) -> None:
        """Hand in a dense gradient that is ready."""
        if self._phase not in _TAKES_GRADIENTS:
            raise self.late(submission.layer)
        self.exchanger.submit(submission)

    def submit_rows(self, layer: int, rows: Callable[[], tuple[Array, Array]]) -> None:
        """Hand in a sparse gradient; ``rows`` is called for its row numbers and values when the step is waited for."""
        if self._phase not in _TAKES_GRADIENTS:
            raise self.late(layer)
        self.exchanger.submit_absent(layer, sparse=True)
        self._rows[layer] = rows

    def flush(self, *, late: bool = False) -> None:
        """Take no more gradients in this step. ``late``: other ranks ended it, and not this rank's own gradients."""
        after = self._after(Verb.FLUSH)
        self.exchanger.flush(late=late)
        self._phase = after

    def wait(self) -> Means:
        """Block until all means are there, those of sparse layers too.

        A step whose means cannot be used is thrown away: StateError on every rank if a layer has a sparse gradient on
        one and a dense one on another, and whatever the adapter raises.
        """
        after = self._after(Verb.WAIT)
        result = self.exchanger.wait()
        self._phase = Phase.DISCARDED  # until it is found that the means can be used
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
        """Return the means of all layers that some rank has had a sparse gradient of, a set that all ranks know."""
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
        """Accept the step: residuals take their new values. Return False if the ranks agreed to skip it instead.

        ``edited``: the means were changed, while some rank is late.
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
        """End the step while its means stay in place, to be added to; what was sent counts as sent."""
        after = self._ending(Verb.KEEP)
        self._vote_against()
        self.exchanger.commit(KEPT)
        self._end(after)

    def refuse(self) -> None:
        """End a step that cannot be accepted because a value was not finite."""
        after = self._ending(Verb.REFUSE)
        self._vote_against()
        self.exchanger.commit(DISCARDED)
        self._end(after)

    def discard(self) -> None:
        """Throw the means away; the compression state stays as it was."""
        after = self._ending(Verb.DISCARD)
        self._vote_against()
        self.exchanger.discard()
        self._end(after)

    def amend(self, outcome: int) -> None:
        """Change the outcome of the last step, for a frontend that learns it only later; 0: this rank had no step.

        The other ranks are told in the next step.
        """
        self._after(Verb.AMEND)
        if self.exchanger.pipeline.outcome:
            self.exchanger.pipeline.outcome = outcome

    def _ending(self, verb: Verb) -> Phase:
        """Return the phase that ``verb`` leads to; a step whose end ``before_end`` refuses is thrown away."""
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
            self.exchanger.vote(False)  # the other ranks vote once per exchange, so this one must too

    def _end(self, phase: Phase) -> None:
        self._phase, self._means = phase, None

    def _after(self, verb: Verb) -> Phase:
        """Return the phase that ``verb`` leads to; raise if the verb is not allowed now."""
        after = TRANSITIONS[verb].get(self._phase)
        if after is None or self._failed is not None:
            raise self.error or StateError(f"cannot {verb.value}: {self._phase.value}")
        return after

    def late(self, layer: int) -> GradcompError:
        """Return the error for a gradient that comes when no step takes one."""
        name = self.exchanger.pipeline.layers[layer].name
        text = f"layer {name!r} has a gradient after its step closed{self._adapter.words.late_gradient}"
        return self.error or StateError(text)

    # -- beside steps ---------------------------------------------------------------------------------------------

    def rest(self) -> None:
        """Make sure that no step is under way before the state is read or replaced. Local.

        Raises the error of an exchanger that has failed, and StateError in the middle of a step.
        """
        if self._exchanger is None:
            return
        self.check()
        if not self._adapter.finalise() or self._phase not in BETWEEN_STEPS:
            raise StateError(self._adapter.words.step_is_open)

    def fail(self, error: Exception) -> None:
        """Tell the other ranks, unless all have stopped, that this one cannot go on after ``error``."""
        if self.error is None:
            # Only type and text are kept: the error would keep the variables of all its frames alive.
            text = f"{type(error).__name__}: {error}"
            self._failed = StateError, text
            if isinstance(error, GradcompError):
                self._failed = type(error), str(error)
            self.exchanger.abort(f"rank {self._rank}: {text}")

    def retire(self, why: str) -> None:
        """Let every verb raise StateError with ``why``: another exchange has the layers. Local, on all ranks alike."""
        if self.error is None:
            self._failed = StateError, why
        self._end(TRANSITIONS[Verb.RETIRE][self._phase])

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Call :meth:`fail` with what is raised in this context."""
        try:
            yield
        except Exception as error:
            self.fail(error)
            raise
