"""A group of requests runs between two steps; several are under way together."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

from gradcomp.core.errors import ConfigError, GradcompError, PlanMismatchError, StateError
from gradcomp.pipeline.calls import Call, compare
from gradcomp.pipeline.fingerprint import NOTHING, Fingerprint, Fingerprints, exchange_fingerprints
from gradcomp.pipeline.in_flight import InFlight, Waiting
from gradcomp.pipeline.request_arrays import Array
from gradcomp.pipeline.request_order import RequestOrder
from gradcomp.pipeline.requests import PreparedRequest
from gradcomp.reduce.framing import Framed
from gradcomp.transport.base import AllGather, Transport


@dataclass(frozen=True, eq=False)
class Run:
    """Describes one execution of a request.

    Results go to ``outputs``, or to new arrays if it is None. ``draw`` numbers the random draws, see
    :meth:`PreparedRequest.run`. ``unchanged`` says that the inputs of an all-gather are those of its last run: if
    this holds for all runs of all ranks, only this travels, and the last codes are decoded again. ``outcome`` is
    that of the last step, which the other ranks are told; see :meth:`PreparedRequest.run`. ``fingerprint`` covers
    what all ranks should hold alike.
    """

    request: PreparedRequest
    inputs: Sequence[Array]
    outputs: Sequence[Array] | None = None
    draw: int | None = None
    unchanged: bool = False
    outcome: int = 0
    fingerprint: Fingerprint = NOTHING

    def begin(self, changed: bool | None = None) -> Generator[Framed, None, None]:
        """Return the exchange as a generator; for ``changed`` see :meth:`PreparedRequest.run`."""
        return self.request.run(
            self.inputs, self.outputs, self.draw, changed, self.outcome, self.fingerprint.value
        )


class RequestGroup:
    """Runs requests in an order that all ranks share: while one is on the wire, the next one is encoded.

    The ranks compare the whole group first. ``order`` has the groups so far, and a request that it predicts begins
    at once, without a comparison. A rank that runs something else, or has a problem, then takes part with messages
    of the same sizes that decline; all ranks throw that exchange away, and compare. ``completed(seconds)`` is
    called for every round.

    Wire: 56 bytes per rank, then the runs' own rounds, all issued before the first is waited for. A request that
    was predicted has its own round only; if a rank declines, all that an unpredicted group sends follows.

    Errors: ``verdict`` is the error that all ranks have come to. After ConfigError (a rank has a problem) or
    PlanMismatchError (the ranks do not run the same) nothing was written, and the requests can be run again.
    StateError says that some ranks committed the last run of a request, and others did not; or that the ranks'
    steps had different outcomes, as the run ``parted`` has told. ``fingerprints`` are set if some differ.
    """

    def __init__(
        self,
        runs: Sequence[Run],
        transport: Transport,
        completed: Callable[[float], None],
        order: RequestOrder | None = None,
    ) -> None:
        self.verdict: GradcompError | None = None
        self.parted: Run | None = None
        #: The fingerprints of all ranks, if some differ.
        self.fingerprints: Fingerprints | None = None
        self._runs = list(runs)
        self._transport = transport
        self._completed = completed
        self._order = order or RequestOrder()
        self._decoded_again = False
        self._problem = self._objection()
        self._running = self._run()

    def poll(self) -> Waiting:
        """Do what can be done without blocking; return NOTHING when the group is done."""
        return next(self._running, Waiting.NOTHING)

    @property
    def results(self) -> list[list[Array]]:
        """Return the arrays of every run, or raise the verdict."""
        if self.verdict is not None:
            raise self.verdict
        if self._decoded_again:
            return [list(run.outputs or []) for run in self._runs]
        found = [run.request.result for run in self._runs]
        return [result.arrays for result in found if result is not None]

    def _run(self) -> Generator[Waiting, None, None]:
        predicted = self._order.predicted
        if predicted is not None and self._transport.size > 1 and (yield from self._ahead(predicted)):
            return
        try:
            changed = yield from self._compare()
        except (ConfigError, PlanMismatchError) as error:
            self.verdict = error
            return
        self._order.note([run.request for run in self._runs], changed)
        if not changed:
            self._decoded_again = True
            for run in self._runs:
                assert run.outputs is not None, "compared"
                run.request.decode_again(run.outputs)
            return
        in_flight = [self._begun(number, run.begin()) for number, run in enumerate(self._runs)]
        for one in in_flight:
            yield from _prepared(one)
            one.issue(self._transport)
        for one in in_flight:
            yield from _prepared(one)
        yield from self._judge()

    def _judge(self) -> Generator[Waiting, None, None]:
        """Check that the ranks did the same with what came before, and hold alike what they should."""
        for run in self._runs:
            result, request = run.request.result, run.request
            if result is not None and result.parted:
                self.parted = run if run.outcome else None
                self.verdict = StateError(
                    f"{request.request.kind} {request.request.name!r}: some ranks committed run {request.number - 2} "
                    "and others discarded it; all ranks must do the same"
                )
            elif result is not None and result.different:
                own = run.fingerprint
                self.fingerprints = yield from exchange_fingerprints(self._transport, len(own.layers), own)
                return

    def _ahead(self, predicted: PreparedRequest) -> Generator[Waiting, None, bool]:
        """Run the request that all ranks expect, or decline it; return whether no rank has declined."""
        takes_part = self._problem is None and [run.request for run in self._runs] == [predicted]
        if takes_part:
            run = self._runs[0]
            program = run.begin(changed=not run.unchanged)
        else:
            program = predicted.decline()
        one = self._begun(0, program)
        yield from _prepared(one)
        one.issue(self._transport)
        yield from _prepared(one)
        if not takes_part or predicted.result is None:
            return False
        self._order.note([predicted], predicted.result.changed)
        yield from self._judge()
        return True

    def _objection(self) -> str | None:
        """Return why these runs cannot form a group, or None if they can."""
        if len({id(run.request) for run in self._runs}) < len(self._runs):
            return "a request occurs twice in one group: run it in two groups"
        if any(run.unchanged and run.outputs is None for run in self._runs):
            return "a run with unchanged inputs may be left out, and needs outputs: pass the arrays of the last one"
        return next(
            filter(None, (run.request.objection(run.inputs, run.outputs) for run in self._runs)), None
        )

    def _begun(self, number: int, program: Generator[Framed, None, None]) -> InFlight:
        return InFlight(number, program, lambda _, begin, end: self._completed(end - begin))

    def _compare(self) -> Generator[Waiting, None, bool]:
        """Compare the group with the other ranks; return whether some rank has new inputs, or no codes of the last."""
        changed = not all(run.unchanged and run.request.has_codes for run in self._runs)
        problem = self._problem
        call = Call("requests", [run.request.call for run in self._runs], changed, problem)
        if self._transport.size == 1:
            if problem is not None:
                raise ConfigError(f"{call.name}: {problem}")
            return changed
        numbers = yield from _waiting(
            compare(call, self._transport.rank, self._transport.size), self._transport
        )
        return any(numbers)


def _waiting(
    calls: Generator[AllGather, None, list[int]], transport: Transport
) -> Generator[Waiting, None, list[int]]:
    """Issue and wait for what ``calls`` yields; return what it returns."""
    while True:
        try:
            handle = next(calls).issue(transport)
        except StopIteration as stop:
            numbers: list[int] = stop.value
            return numbers
        while not handle.poll():
            yield Waiting.WIRE


def _prepared(one: InFlight) -> Generator[Waiting, None, None]:
    """Wait until the bucket's next round is due, or the bucket is complete."""
    while (waiting := one.prepare()) is not Waiting.NOTHING:
        yield waiting
