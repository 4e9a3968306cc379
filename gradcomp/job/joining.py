"""``join``: a rank that is out of data lets the others go on.

A rank that has joined takes part in every exchange of its optimizers without a gradient, and in every allreduce with
zeros. Nobody else needs to know: who has not joined does nothing for it. That all have joined is known at the end of an
exchange: each rank publishes the step from which it stands in, before that step. After a step that no rank took as a
trainer, every rank finds all of these numbers, and none above the step's; after any other step none does.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from time import monotonic
from typing import Protocol

from gradcomp.core.errors import ConfigError, StateError, TransportError
from gradcomp.engine.keys import joined_of
from gradcomp.job.channel import channel_of
from gradcomp.job.collectives import stand_in
from gradcomp.job.network import Ranks
from gradcomp.job.runtime import current
from gradcomp.job.state import Runtime
from gradcomp.job.step_driver import StepDriver
from gradcomp.pipeline.calls import Call
from gradcomp.transport.control import StoreSilentError, numbers_of


class Joinable(Protocol):
    """What :func:`join` asks of the exchange of an optimizer."""

    @property
    def driver(self) -> StepDriver:
        """What takes its steps."""
        ...

    def drain(self) -> None:
        """End what is under way, and let it not count."""
        ...

    def stand_in(self) -> None:
        """Take part in one exchange without a gradient; gradients and parameters stay as they are."""
        ...


#: Of this process's optimizers.
_JOINABLE: weakref.WeakSet[Joinable] = weakref.WeakSet()


def register(exchange: Joinable) -> None:
    """Let :func:`join` stand in for this exchange."""
    _JOINABLE.add(exchange)


def join() -> int:
    """What every frontend's ``join`` does: stand in until all ranks have joined; the rank that joined last.

    That is the one whose optimizers, of those that all ranks have, had made most steps; of several the one before whose
    call most collectives were made; of several the highest.

    ConfigError where this process exchanges gradients in a way that was not registered.
    """
    state = current()
    channel = channel_of(state.everyone)
    if channel is None:
        return 0
    exchanges = _exchanges(state)
    state.joins += 1
    for exchange in exchanges:
        exchange.drain()
    # The numbers of optimizers that only some ranks have say nothing of others.
    shared = [one for one in exchanges if one.driver.checkpoint_manager.ranks == state.everyone] or exchanges
    steps = sum(one.driver.exchanger.pipeline.step for one in shared)
    reached = steps << 32 | channel.rounds
    call = Call("join", ["join()"], reached, key="\0join", stand_in=lambda zeros: stand_in(channel, zeros))
    reply = channel.submit(call, lambda numbers: numbers)
    keys = _keys(state, exchanges)
    _together([_Standing(state, exchange, key) for exchange, key in zip(exchanges, keys, strict=True)])
    numbers = reply.result()
    return max(range(state.size), key=lambda rank: (numbers[rank], rank))


def _exchanges(state: Runtime) -> list[Joinable]:
    by_exchanger = {each.driver.exchanger: each for each in _JOINABLE if each.driver.attached}
    for exchanger in state.exchangers:
        if exchanger not in by_exchanger:
            raise ConfigError(
                "join() is for DistributedOptimizer, and this process exchanges gradients otherwise too"
            )
    return [by_exchanger[exchanger] for exchanger in state.exchangers]


def _keys(state: Runtime, exchanges: list[Joinable]) -> list[str]:
    """Where the ranks of each optimizer say that they have joined: the same on all of them."""
    counts: Counter[str] = Counter()
    keys = []
    for exchange in exchanges:
        among = state.key(exchange.driver.checkpoint_manager.ranks)
        keys.append(f"{among}-{counts[among]}")
        counts[among] += 1
    return keys


def _together(standing: list[_Standing]) -> None:
    """Run all at once: optimizers of several sets of ranks, or of a GAN, step in any order. An error ends them all."""
    errors: list[BaseException] = []

    def run(one: _Standing) -> None:
        try:
            one.run()
        except BaseException as error:  # noqa: BLE001 - raised below, on the caller's thread
            errors.append(error)
            for other in standing:
                other.fail(errors[0])

    threads = [threading.Thread(target=run, args=(one,), name="gradcomp-join") for one in standing[1:]]
    for thread in threads:
        thread.start()
    for one in standing[:1]:
        run(one)
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


class _Standing:
    """This rank's part in one optimizer's steps since it joined."""

    def __init__(self, state: Runtime, exchange: Joinable, key: str) -> None:
        self._state = state
        self._exchange = exchange
        self._ranks: Ranks = exchange.driver.checkpoint_manager.ranks
        self._scope = f"{key}/{state.joins}"

    def run(self) -> None:
        """Exchange until all ranks of the optimizer have joined."""
        pipeline = self._exchange.driver.exchanger.pipeline
        control = self._state.watchdog.control
        control.publish(self._key(self._state.rank), f"[{pipeline.step}]".encode())
        self._since(self._state.rank)  # the store has it before any rank can look for it
        waited_for = [rank for rank in self._ranks if rank != self._state.rank]
        while waited_for:
            step = pipeline.step
            self._exchange.stand_in()
            while waited_for and (since := self._since(waited_for[0])) is not None and since <= step:
                del waited_for[0]

    def fail(self, error: BaseException) -> None:
        """Another optimizer's exchange has failed: end this one, on all ranks."""
        self._exchange.driver.fail(
            error if isinstance(error, Exception) else StateError("join() was interrupted")
        )

    def _since(self, rank: int) -> int | None:
        """The step from which a rank stands in; None if it does not. Asks until the store answers."""
        begin = monotonic()
        while True:
            try:
                numbers = numbers_of(self._state.watchdog.control.lookup(self._key(rank)), 1)
                return None if numbers is None else numbers[0]
            except StoreSilentError as error:
                if monotonic() - begin > self._state.config.timeout_seconds:
                    raise TransportError(f"join: {error}") from error

    def _key(self, rank: int) -> str:
        return joined_of(self._scope, rank)
