"""Elastic training: states that are committed, restored and sent to newcomers, and the loop that goes on after a loss.

A *commit* is a copy of the state in memory. Ranks confirm it together. A rank that has confirmed commit c knows that
all have taken it; one that could not still has commit c - 1. So the newest commit that all survivors hold is the least
of their newest ones, and two copies suffice.
"""

from __future__ import annotations

import functools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from gradcomp.core.errors import ConfigError, HostsUpdatedInterrupt, StateError, TransportError
from gradcomp.exchange.request_group import Call
from gradcomp.job import runtime
from gradcomp.job.channel import channel_of

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S", bound="State")

logger = logging.getLogger("gradcomp")


@dataclass(frozen=True)
class Commit:
    """A copy of the state. ``elements`` and ``norm`` are those of this rank's residuals."""

    values: Any
    elements: int = 0
    norm: float = 0.0


class State(ABC):
    """Base of the states that :func:`run` keeps through deaths and arrivals of ranks."""

    def __init__(self) -> None:
        self._callbacks: list[Callable[[], None]] = []
        self._commits: dict[int, Commit] = {}
        #: The norms of all ranks' residuals at the last commit that they confirmed.
        self._norms: list[float] = []
        self._number = 0
        #: The members of the generation in which the last commit was made.
        self._trained_with: tuple[str, ...] = ()

    # -- what users call -------------------------------------------------------------------------------------------

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Call these, in order, on every survivor whenever the ranks have changed and the state is restored.

        They may read the new ``size()``, as to change the learning rate; newcomers get the result.
        """
        self._callbacks.extend(callbacks)

    def commit(self) -> None:
        """Copy the state, and learn whether ranks have come. Collective, between two steps.

        After a rank's death training goes on from here. Memory: a copy of the state, and a second one during the call.
        Wire: 56 bytes per rank.

        Raises:
            HostsUpdatedInterrupt: on every rank, if newcomers wait; :func:`run` catches it.
            TransportError: if a rank is dead; :func:`run` catches it too.
            StateError: while a step is open.
        """
        self.save()
        self._check(saved=True)

    def save(self) -> None:
        """Copy the state, without a word to the other ranks. Local, between two steps; all ranks call it."""
        self._number += 1
        self._commits[self._number] = self._take()
        for number in sorted(self._commits)[:-2]:
            del self._commits[number]

    def restore(self) -> None:
        """Return to the last commit. Local; all ranks call it."""
        if not self._commits:
            raise StateError("nothing was committed: call commit() or save() before restore()")
        self._put(self._commits[max(self._commits)].values)

    def check_host_updates(self) -> None:
        """Learn whether ranks have come, as :meth:`commit` does, with a copy of the state only if so. Collective."""
        self._check(saved=False)

    def on_reset(self) -> None:
        """Call the callbacks that were registered."""
        for callback in self._callbacks:
            callback()

    @abstractmethod
    def sync(self, root_rank: int = 0) -> None:
        """Give every rank the values of ``root_rank``. Collective."""

    # -- what a frontend implements --------------------------------------------------------------------------------

    @abstractmethod
    def _take(self) -> Commit:
        """Return a copy of the values, between two steps."""

    @abstractmethod
    def _put(self, values: Any) -> None:
        """Replace the values by those of a copy, which stays as it is."""

    def _attach(self) -> None:  # noqa: B027 - only frontends with optimizers have some to attach
        """Let everything that communicates use the generation that was formed. Collective."""

    def _adopt(self, root: int, own: Any | None, *, newcomers: bool) -> None:  # noqa: B027 - as above
        """Take over what belongs to a number of ranks, from the copy ``own``, or on newcomers from ``root``.

        Collective.
        """

    def _restoring_errors(self) -> AbstractContextManager[None]:
        """Return a context that raises the package's errors where a framework made others of them."""
        return nullcontext()

    def _begin(self) -> None:  # noqa: B027 - only states with a directory load
        """Begin, since no rank has a commit: load what a directory holds. Collective."""

    # -- what the loop calls ---------------------------------------------------------------------------------------

    def _check(self, *, saved: bool) -> None:
        member = runtime.current().network.member
        last = self._commits.get(self._number)
        norm = 0.0 if last is None else last.norm
        told = int(np.float32(norm).view(np.uint32)) | (member is not None and member.newcomers > 0) << 32
        driver = None if member is None else member.driver
        if driver is not None:
            if driver.removed:
                raise StateError("horovodrun has no place for this process any more")
            told |= driver.hosts_changed << 33
        numbers = _gather_numbers(f"state.commit() number {self._number}", told)
        if saved:
            bits = np.array([number & 0xFFFFFFFF for number in numbers], np.uint32)
            self._norms = bits.view(np.float32).tolist()
            self._commits = {self._number: self._commits[self._number]}
        if driver is not None and any(number >> 33 for number in numbers):
            driver.ask()
        if any(number >> 32 & 1 for number in numbers):
            if not saved:
                self.save()
            raise HostsUpdatedInterrupt("processes wait to join the job")

    def _renew(self) -> None:
        """Go on with the ranks of this generation: survivors from the newest commit that all of them hold.

        Newcomers get its values. Collective.
        """
        state = runtime.current()
        members = state.network.member.members if state.network.member is not None else ()
        newest = _gather_numbers("elastic.run() begins a generation", max(self._commits, default=0))
        holders = [rank for rank, number in enumerate(newest) if number]
        last = max((members[rank].generation for rank in holders), default=0) if members else 0
        survivors = [rank for rank in holders if not members or members[rank].generation == last]
        self._attach()
        if survivors:
            common = min(newest[rank] for rank in survivors)
            if state.rank == survivors[0]:
                self._say_who_is_gone({one.name for one in members}, len(survivors), state.size)
            own = self._commits[common].values if state.rank in survivors else None
            self._commits = {number: one for number, one in self._commits.items() if own and number == common}
            self._number = common
            if own is not None:
                self._put(own)
                self.on_reset()
            self._adopt(survivors[0], own, newcomers=len(survivors) < state.size)
        else:
            self._begin()
        if len(survivors) < state.size:
            self.sync(survivors[0] if survivors else 0)
        else:
            self.save()
        self._trained_with = tuple(one.name for one in members)

    def _say_who_is_gone(self, present: set[str], survivors: int, size: int) -> None:
        """Log, on one survivor, the ranks that died and the residuals that they took with them."""
        gone = [rank for rank, name in enumerate(self._trained_with) if name not in present]
        elements = max((commit.elements for commit in self._commits.values()), default=0)
        for rank in gone:
            norm = self._norms[rank] if rank < len(self._norms) else 0.0
            logger.warning(
                "rank %d of %d is gone: its residuals, %d elements with the norm %.4g at the last commit, are lost",
                rank,
                len(self._trained_with),
                elements,
                norm,
            )
        logger.info("%d survivors and %d newcomers go on", survivors, size - survivors)


def run(function: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Decorate a training function so that it goes on when ranks die or come.

    ``function(state, ...)`` is called after the state is the same on all ranks. If a rank dies, the others form a new
    generation, return to their last commit and call it again; newcomers call it with what a survivor has committed. So
    it begins where ``state`` says, and not at the first epoch. It returns once it has returned on all ranks.

    In a job without :attr:`Config.store`, whose launcher restarts all processes, the TransportError is raised.

    Raises:
        ConfigError: if the first argument is not a state of this module.
        TransportError: if fewer ranks than ``min_ranks`` come together within ``timeout_seconds``, or the store is
            gone.
        StateError: if another process has finished the job's work.
    """

    @functools.wraps(function)
    def trained(state: S, *args: P.args, **kwargs: P.kwargs) -> T:
        if not isinstance(state, State):
            raise ConfigError(
                f"elastic.run: the first argument must be a TorchState or the like, got {state!r:.80}"
            )
        member = runtime.current().network.member
        results: list[T] = []
        while True:
            results.clear()
            reason: str | None = None
            try:
                state._renew()
                with state._restoring_errors():
                    results.append(function(state, *args, **kwargs))
                _gather_numbers("elastic.run() returns", 0)
            except HostsUpdatedInterrupt:
                logger.info("processes wait to join: the ranks form another generation")
            except TransportError as error:
                if member is None:
                    raise
                reason = str(error)
                if member.driver is not None:
                    member.driver.ask()
                logger.warning("the ranks form another generation: %s", reason)
            else:
                if member is not None:
                    member.finish()
                return results[0]
            try:
                runtime.next_generation(reason)
            except StateError:  # the others were done
                if not results:
                    raise
                return results[0]

    return trained  # type: ignore[return-value]


def _gather_numbers(what: str, number: int) -> list[int]:
    """Return every rank's number, in rank order. Collective: PlanMismatchError if the ranks call different things."""
    channel = channel_of(runtime.current().everyone)
    if channel is None:
        return [number]
    return channel.submit(Call("elastic", [what], number), lambda numbers: numbers).result()
