"""Groups of requests run between steps; ranks compare what they call, unless all predict it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradcomp.core.errors import ConfigError, GradcompError, PlanMismatchError, StateError, WireFormatError
from gradcomp.core.strings import printable
from gradcomp.exchange.fingerprint import NOTHING, Fingerprint, Fingerprints, exchange_fingerprints
from gradcomp.exchange.requests import Array, Inputs, PreparedRequest
from gradcomp.exchange.step import InFlight
from gradcomp.exchange.waiting import Waiting
from gradcomp.reduce.base import Framed
from gradcomp.transport.base import AllGather, Bytes, Transport

_MOST_DESCRIPTION_BYTES = 1 << 26

#: A prediction is used once this many before it were right.
TRUSTED = 3
#: The length of the history in groups. A step of up to a quarter of it is predicted without a break.
_MOST = 16384
#: The texts of a group's requests, and whether some rank had new inputs.
_Key = tuple[tuple[str, ...], bool]


@dataclass(frozen=True)
class Inline:
    """Holds arrays so small that they travel with the comparison of a call instead of in their own collective.

    ``finish`` takes the bytes of every rank's arrays, in rank order; the arrays of a rank are concatenated.
    """

    arrays: Sequence[Bytes]
    finish: Callable[[Sequence[Bytes]], None]


@dataclass(frozen=True)
class Call:
    """Describes what this rank calls; ``lines`` must be equal on all ranks, ``number`` is shared with them.

    ``problem`` says why this rank cannot take part: it still meets the others, so that all of them raise
    ConfigError. ``key`` names a user's call, so that it is found on other ranks whatever else they call before it.
    """

    name: str
    lines: Sequence[str]
    number: int = 0
    problem: str | None = None
    key: str | None = None
    #: Returns, as JSON values, what a rank in ``join()`` must know to take part with zeros; None if it cannot.
    zeros: Callable[[], Any] | None = None
    #: For ``join()``: a function that takes part in a call of the other ranks, given the result of their :attr:`zeros`.
    stand_in: Callable[[Any], None] | None = None
    #: At most :func:`gradcomp.job.call_matching.inline_bytes` bytes; the lines determine whether there are any.
    inline: Inline | None = None


def compare(call: Call, rank: int, size: int) -> Generator[AllGather, None, list[int]]:
    """Return every rank's number if all make the same call and none has a problem.

    The generator yields operations that are to be issued and waited for. It raises ConfigError on every rank if one
    has a problem, and PlanMismatchError on every rank if they call different things. Wire: 56 bytes per rank; the
    descriptions themselves travel only if something is wrong.
    """
    description = "\n".join(call.lines).encode()
    text = description if call.problem is None else call.problem.encode()
    header = np.zeros(7, dtype=np.int64)
    header[:3] = call.problem is not None, call.number, len(text)
    header[3:] = np.frombuffer(hashlib.sha256(description).digest(), dtype=np.int64)
    headers = np.zeros((size, len(header)), dtype=np.int64)
    headers[rank] = header
    yield AllGather(headers.reshape(-1).view(np.uint8), [header.nbytes] * size)
    troubled = np.flatnonzero(headers[:, 0])
    if len(troubled) == 0 and (headers[:, 3:] == headers[0, 3:]).all():
        return [int(number) for number in headers[:, 1]]
    lengths = [int(length) for length in headers[:, 2]]
    if not all(0 <= length <= _MOST_DESCRIPTION_BYTES for length in lengths):
        raise WireFormatError(
            f"the ranks announced descriptions of their calls of {lengths} bytes, which is impossible"
        )
    ends = np.cumsum(lengths)
    whole = np.zeros(sum(lengths), dtype=np.uint8)
    whole[ends[rank] - len(text) : ends[rank]] = np.frombuffer(text, dtype=np.uint8)
    yield AllGather(whole, lengths)
    texts = [
        whole[end - length : end].tobytes().decode(errors="replace")
        for end, length in zip(ends, lengths, strict=True)
    ]
    if len(troubled) > 0:
        raise ConfigError(f"{call.name}: rank {troubled[0]}: {printable(texts[troubled[0]])}")
    raise PlanMismatchError(
        f"{call.name}: the ranks do not call the same: {difference(texts, range(len(texts)))}"
    )


def difference(texts: Sequence[str], ranks: Sequence[int]) -> str:
    """Return, in words, the first line in which the text of one of the ranks differs from that of the first."""
    for rank, text in zip(ranks, texts, strict=True):
        ours, theirs = texts[0].split("\n"), text.split("\n")
        for i in range(max(len(ours), len(theirs))):
            pair = [lines[i] if i < len(lines) else "nothing more" for lines in (ours, theirs)]
            if pair[0] != pair[1]:
                return f"rank {ranks[0]} has {printable(pair[0])}, rank {rank} has {printable(pair[1])}"
    raise WireFormatError("the digests of the ranks' calls differ, but their descriptions do not")


class RequestOrder:
    """Predicts the next group from those that all ranks have run.

    If the last p groups are equal to the p groups before them, the next one is the one that ran p groups ago; p is
    the largest for which this holds. So an exception amid equal steps, such as an evaluation, is not expected a
    second time; two steps after it suffice to predict again. All ranks record the same groups, so they predict the
    same. Memory: 128 KiB; a request stays referenced while it is in the history.
    """

    def __init__(self) -> None:
        self._numbers: dict[_Key, int] = {}
        self._keys: list[_Key] = []
        #: By text, the request that the ranks ran last; all ranks agree on the number of its runs.
        self._requests: dict[str, PreparedRequest] = {}
        self._history = np.zeros(_MOST, dtype=np.int32)
        #: For each group, the number of groups up to it that equal the last groups of the history.
        self._equal = np.zeros(_MOST, dtype=np.int32)
        self._count = 0
        self._next = -1
        self._right = 0

    @property
    def predicted(self) -> PreparedRequest | None:
        """Return the request that runs next, alone and on new inputs; None if the ranks have to compare."""
        if self._right < TRUSTED or self._next < 0:
            return None
        texts, changed = self._keys[self._next]
        request = self._requests[texts[0]] if changed and len(texts) == 1 else None
        return None if request is None or request.keeps_state else request

    def note(self, requests: Sequence[PreparedRequest], changed: bool) -> None:
        """Record what all ranks have agreed to run; ``changed`` says that some rank had new inputs."""
        if self._count == _MOST:
            self._drop_half()
        key = tuple(request.text for request in requests), changed
        number = self._numbers.setdefault(key, len(self._keys))
        if number == len(self._keys):
            self._keys.append(key)
        self._requests.update((request.text, request) for request in requests)
        self._right = self._right + 1 if number == self._next else 0
        count = self._count
        self._history[count] = number
        longer = self._equal[: count - 1] + 1 if count > 1 else self._equal[:0]
        self._equal[:count] = self._history[:count] == number
        self._equal[1:count] *= longer
        self._count = count + 1
        self._next = self._predict()

    def _predict(self) -> int:
        """Return the group after the longest repetition that is as long as its distance, or -1 if there is none."""
        last = self._count - 1
        repeats = self._equal[:last] >= np.arange(last, 0, -1)
        first = int(repeats.argmax()) if last > 0 else 0
        return int(self._history[first + 1]) if last > 0 and repeats[first] else -1

    def _drop_half(self) -> None:
        """Delete the older half of the history, and the requests that occur only in it."""
        half = _MOST // 2
        kept, numbers = np.unique(self._history[half:], return_inverse=True)
        self._history[:half] = numbers
        self._equal[:half] = self._equal[half:]
        self._next = int(np.flatnonzero(kept == self._next)[0]) if self._next in kept else -1
        self._count = half
        self._keys = [self._keys[number] for number in kept.tolist()]
        self._numbers = {key: number for number, key in enumerate(self._keys)}
        texts = {text for texts, _ in self._keys for text in texts}
        self._requests = {text: request for text, request in self._requests.items() if text in texts}


@dataclass(frozen=True, eq=False)
class Run:
    """Describes one execution of a request.

    Results go to ``outputs``, or to new arrays if it is None. ``draw`` numbers the random draws, see
    :meth:`PreparedRequest.run`. ``unchanged`` says that the inputs of an all-gather are those of its last run: if
    this holds for all runs of all ranks, only this travels, and the last codes are decoded again; but a run that was
    predicted is exchanged in any case. ``outcome`` is
    that of the last step, which is sent to the other ranks; see :meth:`PreparedRequest.run`. ``fingerprint`` covers
    the values that should be equal on all ranks.
    """

    request: PreparedRequest
    inputs: Inputs
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

    Wire: 56 bytes per rank, then the runs' own rounds, the first ones all issued before one is waited for. A request
    that was predicted has its own rounds only; if a rank declines, all that an unpredicted group sends follows.

    Errors: ``verdict`` is the error that all ranks have come to. After ConfigError (a rank has a problem) or
    PlanMismatchError (the ranks' requests differ) nothing was written, and the requests can be run again.
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
            yield from self._finished(one)
        yield from self._judge()

    def _finished(self, one: InFlight) -> Generator[Waiting, None, None]:
        """Run the rounds that are left."""
        yield from _prepared(one)
        while one.issue(self._transport):
            yield from _prepared(one)

    def _judge(self) -> Generator[Waiting, None, None]:
        """Check that the ranks' last outcomes and their fingerprints are equal."""
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
        yield from self._finished(self._begun(0, program))
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
        return InFlight(number, program, lambda one, end: self._completed(end - one.issued))

    def _compare(self) -> Generator[Waiting, None, bool]:
        """Compare the group with the other ranks; return whether some rank has new inputs, or no codes of the last."""
        changed = not all(run.unchanged and run.request.codes is not None for run in self._runs)
        lines = [f"{run.request.text}\nrun {run.request.number}" for run in self._runs]
        call = Call("requests", lines, changed, self._problem)
        transport = self._transport
        if transport.size == 1:
            if call.problem is not None:
                raise ConfigError(f"{call.name}: {call.problem}")
            return changed
        return any((yield from _waiting(compare(call, transport.rank, transport.size), transport)))


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
