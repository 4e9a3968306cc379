"""Implements ``join``: a rank that is out of data lets the others continue.

A rank that has joined takes part in every exchange of its optimizers without a gradient, and in every allreduce with
zeros. The other ranks do nothing special and need not know. Before its first such exchange, a rank publishes the number
of the step. After a step in which no rank trained, every rank finds a number from every rank, and none is above the
number of the step. After any other step this holds on no rank. All ranks therefore learn at the end of the same
exchange that all have joined.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from time import monotonic
from typing import Protocol

from gradcomp.core.errors import ConfigError, StateError, TransportError
from gradcomp.exchange.driver import StepDriver
from gradcomp.exchange.request_group import Call
from gradcomp.exchange.watchdog import joined_of
from gradcomp.job.channel import channel_of
from gradcomp.job.collectives import stand_in
from gradcomp.job.launch import Ranks
from gradcomp.job.runtime import current
from gradcomp.job.state import Runtime
from gradcomp.transport.control import StoreSilentError, numbers_of


class Joinable(Protocol):
    """Gives :func:`join` the exchange of one optimizer."""

    @property
    def driver(self) -> StepDriver: ...

    def drain(self) -> None:
        """End a step that has begun, without applying it."""
        ...

    def stand_in(self) -> None:
        """Take part in one exchange without a gradient; gradients and parameters stay as they are."""
        ...


#: The exchanges of this process's optimizers.
_JOINABLE: weakref.WeakSet[Joinable] = weakref.WeakSet()


def register(exchange: Joinable) -> None:
    """Let :func:`join` take part in this exchange after the rank is out of data."""
    _JOINABLE.add(exchange)


def join() -> int:
    """Take part in exchanges until all ranks have joined. Return the rank that joined last.

    The frontends' ``join`` calls it. The last rank is the one whose optimizers, of those that all ranks have, had made
    most steps; of several such ranks the one that had compared most collectives before it joined; of several such ranks
    the highest.

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
    # Steps of optimizers that only some ranks have cannot be compared with other ranks' steps.
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
                "join() works with DistributedOptimizer only, and this process exchanges gradients in another way too"
            )
    return [by_exchanger[exchanger] for exchanger in state.exchangers]


def _keys(state: Runtime, exchanges: list[Joinable]) -> list[str]:
    """Return for each exchange the key under which its ranks publish that they have joined, the same on all of them."""
    counts: Counter[str] = Counter()
    keys = []
    for exchange in exchanges:
        among = state.key(exchange.driver.checkpoint_manager.ranks)
        keys.append(f"{among}-{counts[among]}")
        counts[among] += 1
    return keys


def _together(standing: list[_Standing]) -> None:
    """Run all at once, since optimizers of several process sets, or of a GAN, step in any order. An error ends all."""
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
    """Stands in for this rank in the steps of one optimizer."""

    def __init__(self, state: Runtime, exchange: Joinable, key: str) -> None:
        self._state = state
        self._exchange = exchange
        self._ranks: Ranks = exchange.driver.checkpoint_manager.ranks
        self._scope = f"{key}/{state.joins}"

    def run(self) -> None:
        """Exchange until all ranks of the optimizer have joined."""
        pipeline = self._exchange.driver.exchanger.pipeline
        control = self._state.watchdog.control
        control.publish(joined_of(self._scope, self._state.rank), f"[{pipeline.step}]".encode())
        # This returns once the store has the number, before any rank can look for it.
        self._since(self._state.rank)
        waited_for = [rank for rank in self._ranks if rank != self._state.rank]
        while waited_for:
            step = pipeline.step
            self._exchange.stand_in()
            while waited_for and (since := self._since(waited_for[0])) is not None and since <= step:
                del waited_for[0]

    def fail(self, error: BaseException) -> None:
        """End this exchange on all ranks, since another optimizer's has failed."""
        self._exchange.driver.fail(
            error if isinstance(error, Exception) else StateError("join() was interrupted")
        )

    def _since(self, rank: int) -> int | None:
        """Return a rank's first step after it joined, or None if it has not. Asks again until the store answers."""
        begin = monotonic()
        while True:
            try:
                numbers = numbers_of(self._state.watchdog.control.lookup(joined_of(self._scope, rank)), 1)
                return None if numbers is None else numbers[0]
            except StoreSilentError as error:
                if monotonic() - begin > self._state.config.timeout_seconds:
                    raise TransportError(f"join: {error}") from error
