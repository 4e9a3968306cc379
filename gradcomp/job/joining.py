"""Implements ``join``: a rank that is out of data lets the others continue.

A rank that has joined takes part in every exchange of its optimizers without a gradient, and in every allreduce with
zeros. The other ranks do nothing special and need not know. Before its first such exchange, a rank publishes the number
of the step. After a step in which no rank trained, every rank finds a number from every rank, and none is above the
number of the step. After any other step this holds on no rank. All ranks therefore learn at the end of the same
exchange that all have joined.

:class:`Context` is what the frontends' ``with join(...):`` share. Means over the ranks that still train
(``divide="active"``) are counted by the exchange itself, see :meth:`gradcomp.exchange.pipeline.Pipeline.count_active`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from time import monotonic
from typing import Literal, Protocol

from gradcomp.core.errors import ConfigError, StateError, TransportError
from gradcomp.exchange.driver import StepDriver
from gradcomp.exchange.exchanger import Exchanger
from gradcomp.exchange.pipeline import Pipeline
from gradcomp.exchange.request_group import Call
from gradcomp.exchange.watchdog import joined_of
from gradcomp.job.call_matching import Reply
from gradcomp.job.channel import Channel, alone, channel_of
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
_STRANGERS = (
    "join() works with DistributedOptimizer only, and this process exchanges gradients in another way too; for a "
    "DistributedDataParallel with ddp_comm_hook there is `with join(optimizer, model=ddp)`"
)
#: Mean over all ranks, or over those that still train.
Divide = Literal["all", "active"]


def register(exchange: Joinable) -> None:
    """Let :func:`join` take part in this exchange after the rank is out of data."""
    _JOINABLE.add(exchange)
    for context in current().contexts if exchange.driver.attached else ():
        context.count(exchange.driver.exchanger)


def join() -> int:
    """Take part in exchanges until all ranks have joined. Return the rank that joined last. Collective.

    The last rank is the one whose optimizers, of those that all ranks have, had made most steps; of several such ranks
    the one that had compared most collectives before it joined; of several such ranks the highest.

    ConfigError where this process exchanges gradients in a way that was not registered.
    """
    ranks = current().everyone
    exchanges, strangers = _exchanges_among(ranks)
    if strangers:
        raise ConfigError(_STRANGERS)
    return _join(ranks, exchanges)


def _join(ranks: Ranks, exchanges: Sequence[Joinable]) -> int:
    state, channel = current(), channel_of(ranks)
    if channel is None:
        return ranks[0]
    state.joins[ranks] += 1
    for exchange in exchanges:
        exchange.drain()
    # Steps of optimizers that only some ranks have cannot be compared with other ranks' steps.
    shared = [one for one in exchanges if one.driver.checkpoint_manager.ranks == ranks] or exchanges
    steps = sum(one.driver.exchanger.pipeline.step for one in shared)
    reply = announce(channel, steps << 32 | channel.rounds)
    scope = f"{state.key(ranks)}/{state.joins[ranks]}"
    _together([_Standing(state, exchange, scope) for exchange in exchanges])
    numbers = reply.result()
    return ranks[max(range(len(ranks)), key=lambda place: (numbers[place], place))]


def announce(channel: Channel, number: int = 0) -> Reply[list[int]]:
    """Stand in for this rank in allreduces from now on; the reply has all ranks' numbers once all have joined."""
    call = Call("join", ["join()"], number, key="\0join", stand_in=lambda zeros: stand_in(channel, zeros))
    return channel.submit(call, lambda numbers: numbers)


def _exchanges_among(ranks: Ranks) -> tuple[list[Joinable], list[Exchanger]]:
    """Return this process's exchanges among these ranks or some of them, and the exchangers that cannot join."""
    members = set(ranks)
    by_exchanger = {each.driver.exchanger: each for each in _JOINABLE if each.driver.attached}
    found = [each for each in current().exchangers if members.issuperset(each.ranks)]
    strangers = [each for each in found if each not in by_exchanger]
    return [by_exchanger[each] for each in found if each in by_exchanger], strangers


class Context:
    """One use of ``with join(...)``: from :meth:`begin` to :meth:`end`, both collective over ``ranks``.

    ``divide``: ``"all"``, or ``"active"`` for means over the ranks that still train.
    """

    def __init__(self, ranks: Ranks, divide: Divide) -> None:
        self.ranks = ranks
        self._divide = divide
        self._counted: list[Pipeline] = []
        self._among: list[Context] = []
        #: Exchangers that cannot join, and their rounds so far: they may exist, but not be used within the context.
        self._strangers: list[tuple[Exchanger, int]] = []

    def begin(
        self,
        lines: Sequence[str],
        problem: str | None,
        given: Sequence[Exchanger] | None,
        within: Exchanger | None = None,
    ) -> None:
        """Compare the arguments, and let exchanges count the ranks that train if means need that.

        ``given``: the exchangers of the optimizers; None: they are not known, so all are checked. ``within``: an
        exchange that takes part through another context, and not in :meth:`join`. ConfigError on every rank if one has
        a ``problem``, PlanMismatchError if ``lines`` differ. Wire: one comparison.
        """
        if self._divide not in ("all", "active"):
            problem = problem or f'divide must be "all" or "active", got {self._divide!r}'
        exchanges, strangers = _exchanges_among(self.ranks) if len(self.ranks) > 1 else ([], [])
        exchangers = [one.driver.exchanger for one in exchanges] if within is None else [within]
        for exchanger in exchangers if given is None else given:
            problem = problem or self._problem(exchanger.pipeline)
        channel = channel_of(self.ranks)
        call = Call("join", [f"join(divide={self._divide})", *lines], problem=problem)
        (alone(call) if channel is None else channel.submit(call, lambda _: None)).result()
        self._among = current().contexts
        # An error ends torch's Join without a call.
        for earlier in [
            each for each in self._among if within is not None and within.pipeline in each._counted
        ]:
            earlier.end()
        self._among.append(self)
        self._strangers = [(each, each.pipeline.advances) for each in strangers if each is not within]
        for exchanger in exchangers:
            self.count(exchanger)

    def _problem(self, pipeline: Pipeline) -> str | None:
        if self._divide == "active" and not pipeline.average:
            return 'divide="active" is for means, and an optimizer has op=Sum'
        groups = (group for program in pipeline.laid_out.programs for group in program.bucket.groups)
        if following := next((group for group in groups if group.follows_rate), None):
            name = following.compressor.to_string()
            return f"{name} follows the learning rate, which a rank that has joined does not know"
        return None

    def count(self, exchanger: Exchanger) -> None:
        """Let an exchange divide by the number of ranks that train, if it is among ranks of this context."""
        among, pipeline = set(self.ranks).issuperset(exchanger.ranks), exchanger.pipeline
        if self._divide == "active" and among and pipeline.trains is None:
            pipeline.trains = True
            self._counted.append(pipeline)

    def join(self) -> int:
        """Take part in exchanges until all ranks have joined; return the one that joined last. Collective.

        ConfigError if this process has exchanged something in the context in which a rank that has joined has no part.
        """
        exchanges, _ = _exchanges_among(self.ranks) if len(self.ranks) > 1 else ([], [])
        for stranger, advances in self._strangers:
            if stranger.pipeline.advances != advances:
                error = ConfigError(_STRANGERS)
                for each in (stranger, *(exchange.driver.exchanger for exchange in exchanges)):
                    each.abort(f"rank {current().rank}: {error}")
                raise error
        return _join(self.ranks, exchanges)

    def end(self) -> None:
        """Divide by the number of all ranks again. Local."""
        self._among.remove(self)
        for pipeline in self._counted:
            pipeline.trains = None
        self._counted = []


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

    def __init__(self, state: Runtime, exchange: Joinable, scope: str) -> None:
        self._state = state
        self._exchange = exchange
        self.exchanger = exchange.driver.exchanger
        self._scope = f"{self.exchanger.name}/{scope}"

    def run(self) -> None:
        """Exchange until all ranks of the optimizer have joined."""
        pipeline = self.exchanger.pipeline
        control, rank = self._state.watchdog.control, self._state.rank
        control.publish(joined_of(self._scope, rank), f"[{pipeline.step}]".encode())
        # This returns once the store has the number, before any rank can look for it.
        self._since(rank)
        waited_for = [each for each in self.exchanger.ranks if each != rank]
        counts = pipeline.trains is not None
        if counts:
            pipeline.trains = False
        while waited_for:
            step = pipeline.step
            self._exchange.stand_in()
            while waited_for and (since := self._since(waited_for[0])) is not None and since <= step:
                del waited_for[0]
        if counts:
            pipeline.trains = True

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
