"""The engine's thread polls what an exchanger has under way, the watchdog watches it, the training thread waits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from time import monotonic

from gradcomp.core.config import Config
from gradcomp.core.errors import GradcompError, StateError, TransportError
from gradcomp.engine.deadlock import Begun, Need
from gradcomp.engine.divergence import (
    different_fingerprints,
    different_means,
    different_outcomes,
    different_parameters,
)
from gradcomp.engine.engine import Engine
from gradcomp.engine.keys import Position
from gradcomp.engine.terms import Terms
from gradcomp.engine.watch import Roster, StepWatch, place
from gradcomp.engine.watchdog import Watchdog
from gradcomp.kernels.devices import Device
from gradcomp.pipeline import Pipeline, Waiting
from gradcomp.pipeline.fingerprint import Fingerprints
from gradcomp.reduce.header import EDITED
from gradcomp.transport.base import Handle

#: A wait checks this often whether the engine's thread is alive.
_LIFE_SECONDS = 1.0


class Progress(StepWatch):
    """Drives a step, or collectives between steps, until it is done or fails; one at a time.

    ``is_open`` says that a step has begun that nobody has waited for.
    ``collectives`` counts those that began since the last step. ``error`` says why there will be no further step.
    From :meth:`begin` until the wait ends the engine's thread alone touches the pipeline and the communicator.
    """

    def __init__(
        self, engine: Engine, watchdog: Watchdog, config: Config, pipeline: Pipeline, terms: Terms
    ) -> None:
        transport = pipeline.transport
        roster = terms.roster or Roster.of_size(transport.size)
        super().__init__(watchdog, config, f"exchanger/{terms.name}", transport.rank, roster)
        self.is_open = False
        self.collectives = 0
        self.error: GradcompError | None = None
        self._engine = engine
        self._pipeline = pipeline
        self._transport = transport
        self._listener = terms.listener
        self._advice = terms.advice
        self._work: Callable[[], Waiting] | None = None
        self._begun = 0
        self._done = threading.Event()
        self._seen_advances = 0
        engine.add(self)
        watchdog.add(self)

    def end_service(self) -> None:
        self._engine.remove(self)
        self.watchdog.remove(self)

    # -- the training thread ------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Make the next wait last until the engine's thread is done with what begins now."""
        self._begun += 1
        self.watchdog.callers.came()
        self._done.clear()
        if self.error is not None:  # it came in between, and will not be set again
            self._done.set()

    def wait(self) -> None:
        """Wait until the engine's thread says that it is done, or has ended."""
        with self.watchdog.callers.waiting(self):
            while not self._done.wait(_LIFE_SECONDS):
                if not self._engine.alive and not self._done.is_set():
                    self.stop_with(
                        StateError("the engine's thread has ended: gradcomp was shut down meanwhile")
                    )

    def wait_for(self, handle: Handle) -> None:
        """Wait for a collective between steps; the engine polls it as it does a step."""
        self.start(lambda: _poll(handle))
        self.finish()

    @property
    def busy(self) -> bool:
        """Return whether something was started between steps that nobody has waited for."""
        return self._work is not None

    def start(self, work: Callable[[], Waiting]) -> None:
        """Begin something between steps; the engine polls it as it does a step."""
        self.collectives += 1
        self.begin()
        self._work = work
        self._engine.wake()

    def finish(self) -> None:
        """Wait for what :meth:`start` began; raise the error if there is one."""
        self.wait()
        self._work = None
        if self.error is not None:
            raise self.error

    # -- the watchdog's thread, too -----------------------------------------------------------------------------

    @property
    def position(self) -> Position:
        return self._pipeline.position if self.is_open else (self._pipeline.step, -1, self.collectives)

    @property
    def where(self) -> str:
        """Return the position in words, with the names of layers."""
        position = self.position
        buckets = self._pipeline.layout.buckets
        if not 0 <= position[1] < len(buckets):
            return place(position)
        layers = buckets[position[1]].layers
        names = [self._pipeline.layers[layer].name for layer in layers[:3].tolist()]
        more = ", ..." if len(layers) > 3 else ""
        return f"{place(position)} ({', '.join(names)}{more})"

    @property
    def begun(self) -> Begun:
        """Return what has begun, without a step whose gradients have not all come."""
        return Begun(self._begun - (self.is_open and not self._pipeline.registry.complete))

    def need(self, what: object) -> Need | None:
        if what is not self:
            return None
        where = (
            self.where if self.is_open else f"a collective of an optimizer after step {self._pipeline.step}"
        )
        return Need(self.scope, self.roster.ranks, self._begun, where=where)

    @property
    def advances(self) -> int:
        return self._pipeline.advances

    def heard(self) -> None:
        """Wake the engine's thread, which stops what is under way."""
        self._engine.wake()

    # -- the engine's thread ------------------------------------------------------------------------------------

    @property
    def device(self) -> Device:
        """Return the device of the gradients."""
        return self._pipeline.device

    def poll(self) -> Waiting:
        if self.error is not None:
            return Waiting.NOTHING
        if self.verdict is not None:
            self._heed(self.verdict)
            return Waiting.NOTHING
        work = self._work
        if self._done.is_set() or (not self.is_open and work is None):
            return Waiting.NOTHING
        # From here on the training thread waits, or is about to: its arrays stay until ``_done`` is set.
        try:
            waiting = self._pipeline.poll() if work is None else work()
        except GradcompError as error:
            self._fail(error)
            return Waiting.NOTHING
        if waiting is not Waiting.WIRE:
            self.since = None
        elif self.since is None or self._pipeline.advances != self._seen_advances:
            self._seen_advances = self._pipeline.advances
            self.since = monotonic()
        if waiting is Waiting.NOTHING:
            if work is None and (divergence := self._divergence()) is not None:
                # All ranks have found it in the same step, so none has to be told.
                self.end_with(divergence)
            self._done.set()
        return waiting

    def _heed(self, verdict: BaseException) -> None:
        """Stop, since the watchdog has ended this wait, or the next one."""
        if not isinstance(verdict, GradcompError):
            raise verdict
        if not self.told:
            self._publish(verdict)
        self.stop_with(verdict)

    def crash(self, error: BaseException) -> None:
        """Stop here and on all ranks after an unforeseen exception on the engine's thread. Raises nothing."""
        problem = StateError(f"the engine's thread failed: {type(error).__name__}")
        with suppress(BaseException):  # its text may be what raises
            problem = StateError(
                f"the engine's thread failed at {self.where}: {type(error).__name__}: {error}"
            )
        problem.__cause__ = error
        with suppress(BaseException):
            self.publish_abort(f"{self.own_rank}: {problem}")
        with suppress(BaseException):
            self.stop_with(problem)

    def _fail(self, error: GradcompError) -> None:
        """Find out why something broke here, tell every rank, and raise in the training thread."""
        if isinstance(error, TransportError):
            error = TransportError(f"{self.where}: {error}; {self.culprits()}")
        self._publish(error)
        self.stop_with(error)

    def _publish(self, error: GradcompError) -> None:
        self.publish_abort(f"{self.own_rank}: {type(error).__name__}: {error}")

    def _divergence(self) -> StateError | None:
        """Return the error of a finished step in which ranks diverged, which all ranks find alike, or None."""
        result = self._pipeline.result
        assert result is not None, "a step that is done has a result"
        if result.parted:
            return self.parted(result.step, self._pipeline.outcome, f"after step {result.step}")
        ranks = self.roster.ranks
        if result.notices & EDITED:
            asked = self.watchdog.control, self.scope, self._member, ranks, result.step
            return different_means(*asked, self._pipeline.notices)
        names = [layer.name for layer in self._pipeline.layers]
        table, self._pipeline.digest_table = self._pipeline.digest_table, None
        if self._pipeline.fingerprints is not None:
            return different_fingerprints(
                self._pipeline.fingerprints, names, ranks, f"after step {result.step}"
            )
        return None if table is None else different_parameters(table, names, ranks, result.step)

    def parted(self, number: int, outcome: int, when: str) -> StateError:
        """Return the error for ranks that did not do the same; ``number`` of the exchange is equal on all."""
        control, ranks = self.watchdog.control, self.roster.ranks
        error = different_outcomes(control, self.scope, self._member, ranks, number, outcome, when)
        return StateError(f"{error}{self._advice}")

    def drifted(self, found: Fingerprints) -> StateError:
        """Return the error for fingerprints that differ between steps."""
        return different_fingerprints(found, [], self.roster.ranks, f"in collective {self.collectives}")

    def stop_with(self, error: GradcompError) -> None:
        """Give up what is under way and the communicator; every later call raises ``error``."""
        try:
            self._transport.abandon()
            self._pipeline.abandon()  # who hears of the error may take its gradients back
        finally:
            try:
                self.end_with(error)
            finally:
                self._done.set()

    def end_with(self, error: GradcompError) -> None:
        """Let every later call raise ``error``; the communicator is in order."""
        self.error, self.since = error, None
        if self._listener is not None:
            self._listener.failed(error)


def _poll(handle: Handle) -> Waiting:
    return Waiting.NOTHING if handle.poll() else Waiting.WIRE
