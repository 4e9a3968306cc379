"""One thread per process looks at the control channel for all that this rank may wait for."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic, sleep
from typing import Any

from gradcomp.core.config import Config
from gradcomp.core.errors import GradcompError, TransportError
from gradcomp.core.strings import printable
from gradcomp.exchange import deadlock
from gradcomp.exchange.deadlock import Begun, Callers, Need, Snapshot
from gradcomp.transport.base import Handle
from gradcomp.transport.control import ControlChannel, StoreSilentError, count_of

#: The step, bucket and round that a rank waits for. Round -1 stands for the bucket's gradients. Bucket -1 stands for
#: a wait between steps; the round is then the number of collectives begun since the last step. In the scope of the
#: user's collectives the position is (calls so far, -1, 0).
Position = tuple[int, int, int]
#: The position of a rank in a scope that it has not entered yet.
NOWHERE: Position = (0, -1, 0)

#: Stands in an answer for what a rank waits for, once it has called ``shutdown()``.
LEFT = "shutdown()"

#: Has the reason why a rank ended before its work was done. The first message stays, here and in every scope.
ABORT = "abort"
QUESTION = "question"
#: Is there once a rank has left, so that one look tells whether it is worth looking for the departure of each.
DEPARTED = "departed"
DEADLOCK = "deadlock"

_MOST_ANSWER_BYTES = 1 << 16

logger = logging.getLogger("gradcomp")
#: Seconds between two checks while something waits, or no step is in progress.
LOOK_SECONDS = 0.5
#: Seconds between two checks while steps progress: a check is a round trip, which waits for the link's queue.
LONGEST_LOOK_SECONDS = 1.0
#: A rank whose process lives answers within this time, whatever its training thread does.
ANSWER_SECONDS = 2.0
#: A rank that waits for one that has left gives up after this time: its last message may still be on the way.
LEFT_GRACE_SECONDS = 2.0
#: Seconds between looks at the verdict in a wait that does not poll.
_LONGEST_BLOCK_SECONDS = 0.1


def calls_among(ranks: str) -> str:
    """Return the scope of the user's collectives among some ranks, given what tells these from others."""
    return f"user/{ranks}"


def answer_of(rank: int) -> str:
    """Return the key of a rank's :class:`Answer`."""
    return f"at/{rank}"


def joined_of(scope: str, rank: int) -> str:
    """Return the key of the step from which on a rank stands in, since it has joined."""
    return f"joined/{scope}/{rank}"


def arrival_of(meeting: str, rank: int) -> str:
    """Return the key by which a rank reports that it has reached a meeting."""
    return f"meeting/{meeting}/{rank}"


def all_arrived_of(meeting: str) -> str:
    """Return the key by which the first rank of a meeting reports that all ranks have reached it."""
    return f"meeting/{meeting}/all"


@dataclass(frozen=True)
class Answer:
    """The position of a rank when it received question number ``question``.

    ``positions`` has the position that it had reached in each scope. ``snapshot`` helps to prove that ranks wait for
    each other; it is None if it would have been too large.
    """

    question: int
    waits_for: str
    positions: Mapping[str, Position]
    snapshot: Snapshot | None = None

    @property
    def left(self) -> bool:
        """Return whether this is the last answer of a rank that has left."""
        return self.waits_for == LEFT

    def encode(self) -> bytes:
        """Return the bytes that are published, without the snapshot if it is too long."""
        told = [self.question, self.waits_for, self.positions]
        whole = json.dumps([*told, self.snapshot and self.snapshot.as_json()]).encode()
        return whole if len(whole) <= _MOST_ANSWER_BYTES else json.dumps([*told, None]).encode()

    @staticmethod
    def parse(value: bytes | None) -> Answer | None:
        """Return the answer, or None for anything that is not one."""
        if value is None or len(value) > _MOST_ANSWER_BYTES:
            return None
        try:
            question, waits_for, positions, snapshot = json.loads(value)
            found = {str(scope): _position(at) for scope, at in positions.items()}
            account = None if snapshot is None else Snapshot.of_json(snapshot)
            number = deadlock.whole_number(question)
        except (ValueError, TypeError, AttributeError, RecursionError):
            return None
        return Answer(number, printable(waits_for), found, account) if isinstance(waits_for, str) else None


def _position(at: Any) -> Position:
    step, bucket, round_number = at
    if not all(type(number) is int and abs(number) < deadlock.MOST for number in at):
        raise ValueError(f"{at!r:.80} is not a position")
    return step, bucket, round_number


class Wait:
    """Stands for something that may have to wait for other ranks, watched from :meth:`Watchdog.add` to ``remove``.

    Whoever waits sets ``since``, None while it does not wait, and looks at ``verdict``. The watchdog's thread sets
    that once, to what ends the wait: the deadline, another rank's failure or departure, or whatever was raised
    while it looked. After ``stall_warning_seconds`` it logs a warning.
    """

    def __init__(self, watchdog: Watchdog, config: Config) -> None:
        self.watchdog = watchdog
        self.config = config
        self.since: float | None = None
        self.verdict: BaseException | None = None
        self._warned = False
        self.told = False  # whether all ranks have the verdict already
        self.endless = False  # whether there is no deadline, since the others may take as long as they like

    # Other ranks that ask are told the following.

    #: The communicator in which others may wait for this rank; empty if there is none.
    scope = ""

    @property
    def position(self) -> Position:
        """Return the position that this rank has reached in the scope."""
        return NOWHERE

    @property
    def where(self) -> str:
        """Return a text that says what this rank waits for."""
        return ""

    @property
    def advances(self) -> int:
        """Return a number that changes whenever something is complete."""
        return 0

    @property
    def begun(self) -> Begun:
        """Return the collectives of the scope that this rank has begun."""
        return Begun(0)

    @property
    def goes_on(self) -> bool:
        """Return whether this rank may begin something in the scope although its calling thread waits."""
        return False

    def need(self, what: object) -> Need | None:
        """Return the need of a thread that passed ``what`` to :meth:`Callers.begin`, or None if it is unknown here."""
        return None

    # Subclasses override the following, which the watchdog's thread calls.

    def look(self, waited: float) -> GradcompError | None:
        """Return an error that ends the wait after ``waited`` seconds, or would end the next wait; otherwise None.

        It raises TransportError if the control channel cannot be used.
        """
        return None

    def stalled(self, waited: float) -> str:
        """Return the warning about a wait that takes long."""
        raise NotImplementedError

    def overdue(self, waited: float) -> str:
        """Return the error message of a wait that has taken too long."""
        raise NotImplementedError

    def heard(self) -> None:
        """Take note that there is a verdict."""

    @property
    def waited(self) -> float:
        """Return the seconds since it began to wait, or last advanced."""
        since = self.since
        return 0.0 if since is None else monotonic() - since

    def check(self) -> None:
        """Check once, on the watchdog's thread. A store that does not answer ends no wait; the deadline does."""
        if self.verdict is not None:
            return
        waited, since = self.waited, self.since
        found: BaseException | None = None
        try:
            try:
                found = self.look(waited)
            except StoreSilentError as error:
                logger.debug("%s", error)
            except TransportError as error:
                # A rank that does not wait sees the same when the others end in good order.
                if waited > LOOK_SECONDS:
                    found = TransportError(f"{self.where}: {error}" if self.where else str(error))
            found = found or self._late(waited, since)
        except BaseException as error:  # noqa: BLE001 - it ends this wait, and the others are watched on
            found = error
        if found is not None:
            # A rank that heard of a deadlock first may have ended by now. Its end is not the cause then.
            self.end(self.watchdog.deadlocked() or found)

    def end(self, verdict: BaseException) -> None:
        """End the wait with a verdict."""
        self.verdict = verdict
        self.heard()

    def _late(self, waited: float, since: float | None) -> TransportError | None:
        if self.endless:
            return None
        if waited >= self.config.timeout_seconds:
            error = TransportError(self.overdue(waited))
            return error if self.since == since else None  # it may have ended while the others were asked
        if waited < self.config.stall_warning_seconds:
            self._warned = False
        elif not self._warned:
            self._warned = True
            logger.warning("%s", self.stalled(waited))
        return None

    def hold(
        self, done: Callable[[], bool], longest_pause: float, block: Callable[[float], None] | None = None
    ) -> None:
        """Poll from now on until ``done()``; raise the verdict if there is one.

        ``block`` is called instead of short sleeps. It returns when ``done()`` is true, or after the given seconds.
        """
        self.since = monotonic()
        pause = 20e-6
        try:
            while not done():
                if self.verdict is not None:
                    raise self.verdict
                if block is not None:
                    block(_LONGEST_BLOCK_SECONDS)
                    continue
                sleep(pause)
                pause = min(2 * pause, longest_pause)
        finally:
            self.since = None


class _Hold(Wait):
    """Waits until a deadline that ends it without an error."""

    def __init__(
        self,
        watchdog: Watchdog,
        config: Config,
        say: Callable[[], str],
        look: Callable[[float], GradcompError | None],
        need: Need | None = None,
    ) -> None:
        super().__init__(watchdog, config)
        self._say, self._look, self._need = say, look, need
        self.over = False

    def look(self, waited: float) -> GradcompError | None:
        return self._look(waited)

    def need(self, what: object) -> Need | None:
        return self._need if what is self else None

    def stalled(self, waited: float) -> str:
        return self._say()

    def overdue(self, waited: float) -> str:
        self.over = True
        return "the deadline"


class Watchdog:
    """Checks twice a second for questions of other ranks, and for causes to end a wait of this rank.

    Of all users of the control channel only the watchdog looks repeatedly; a rank that fails or leaves publishes
    that from any thread. On rank 0, if that has waited long, it asks all ``size`` ranks whether they wait for each
    other, and tells all of them if they do. ``names`` puts ranks into words.
    """

    def __init__(
        self, control: ControlChannel, rank: int, size: int = 0, names: Callable[[list[int]], str] = str
    ) -> None:
        self.control = control
        #: The threads that make calls, and what they wait for.
        self.callers = Callers()
        #: The number of meetings that this rank has reached, by scope.
        self.met: dict[str, int] = {}
        self._rank = rank
        self._size = size
        self._names = names
        self._account: tuple[float, dict[int, Snapshot]] | None = None
        self._waits: tuple[Wait, ...] = ()
        self._answered = 0
        self._left = False
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        #: Called at every look; an error that it returns ends all waits, and those to come.
        self.beside: Callable[[], GradcompError | None] = lambda: None
        self._lost: GradcompError | None = None

    def start(self) -> None:
        """Begin to answer questions; further calls do nothing."""
        with self._lock:
            if (self._thread is None or not self._thread.is_alive()) and not self._stopping.is_set():
                self._thread = threading.Thread(target=self._loop, name="gradcomp-watch", daemon=True)
                self._thread.start()

    def add(self, wait: Wait) -> None:
        with self._lock:
            self._waits = (*self._waits, wait)
        if self._lost is not None:
            wait.end(self._lost)
        self.start()

    def remove(self, wait: Wait) -> None:
        with self._lock:
            self._waits = tuple(one for one in self._waits if one is not wait)

    def stop(self) -> None:
        """End the thread; further calls do nothing, and no wait may begin after this."""
        self._stopping.set()
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()

    # -- waits of their own ----------------------------------------------------------------------------------------

    def hold(
        self,
        done: Callable[[], bool],
        config: Config,
        say: Callable[[], str],
        look: Callable[[float], GradcompError | None] = lambda waited: None,
        need: Need | None = None,
    ) -> bool:
        """Wait until ``done()``; return False after ``timeout_seconds``.

        After ``stall_warning_seconds`` what ``say`` returns is logged, once. ``look`` is called twice a second with
        the seconds so far; what it returns or raises is raised. ``need`` is what the calling thread waits for, if
        other ranks' calling threads must come to it.
        """
        if done():
            return True
        wait = _Hold(self, config, say, look, need)
        self.add(wait)
        try:
            with self.callers.waiting(wait):
                wait.hold(done, 2e-3)
        except TransportError:
            if not wait.over:
                raise
            return False
        finally:
            self.remove(wait)
        return True

    def patient(self, config: Config, what: str) -> Callable[[Handle], None]:
        """Return a function that waits for a handle, and raises TransportError at the deadline; ``what`` names it."""

        def wait_for(handle: Handle) -> None:
            if not self.hold(handle.poll, config, lambda: f"this rank waits for {what}"):
                raise TransportError(f"this rank waited {config.timeout_seconds:.0f} s for {what}")

        return wait_for

    # -- where the ranks are ---------------------------------------------------------------------------------------

    def ask(self, ranks: Sequence[int], enough: Callable[[], bool] = lambda: False) -> dict[int, Answer]:
        """Return where these ranks of the job are; ranks that are silent for two seconds are left out."""
        number = max(count_of(self.control.lookup(QUESTION)), self._answered) + 1
        self._answer(number)
        self.control.publish(QUESTION, str(number).encode())
        answers: dict[int, Answer] = {}
        deadline = monotonic() + ANSWER_SECONDS
        while len(answers) < len(ranks) and monotonic() < deadline and not enough():
            sleep(0.05)
            self.answer()  # others may be asking too
            for rank in ranks:
                if rank not in answers:
                    answer = Answer.parse(self.control.lookup(answer_of(rank)))
                    if answer is not None and (answer.question >= number or answer.left):
                        answers[rank] = answer
        return answers

    def has_left(self, rank: int) -> bool:
        """Return whether a rank of the job has said that it called ``shutdown()``."""
        try:
            answer = Answer.parse(self.control.lookup(answer_of(rank)))
        except TransportError:
            return False
        return answer is not None and answer.left

    def some_rank_left(self) -> bool:
        """Return whether any rank of the job has said that it called ``shutdown()``."""
        try:
            return self.control.lookup(DEPARTED) is not None
        except TransportError:
            return False

    def leave(self) -> None:
        """Publish that this rank takes part in nothing any more."""
        self._left = True
        try:
            self._answer(self._answered)
            if self.control.lookup(DEPARTED) is None:
                self.control.publish(DEPARTED, str(self._rank).encode())
        except TransportError as error:
            logger.debug("that this rank leaves could not be published: %s", error)

    def answer(self) -> None:
        """Answer a question if there is a new one. Raises TransportError."""
        question = count_of(self.control.lookup(QUESTION))
        if question > self._answered:
            self._answer(question)

    def _answer(self, question: int) -> None:
        waits = self._waits
        said = [wait for wait in waits if wait.waited > LOOK_SECONDS / 2 and wait.where]
        where = max(said, key=lambda wait: wait.waited).where if said else ""
        positions = {wait.scope: wait.position for wait in waits if wait.scope}
        answer = Answer(question, LEFT if self._left else where, positions, self._snapshot())
        self.control.publish(answer_of(self._rank), answer.encode())
        self._answered = question

    # -- whether they wait for each other --------------------------------------------------------------------------

    def _snapshot(self) -> Snapshot:
        waits, calls, need = self._waits, self.callers.calls, None
        if (what := self.callers.only()) is not None and not any(wait.goes_on for wait in waits):
            need = next((found for wait in waits if (found := wait.need(what)) is not None), None)
        begun = {scope: Begun(count) for scope, count in self.met.items()}
        begun.update((wait.scope, wait.begun) for wait in waits if wait.scope)
        return Snapshot(calls, need, begun, self._left)

    def _prove(self) -> None:
        """Ask all ranks repeatedly for their positions, and publish a deadlock if one is proved; rank 0 only."""
        before, now = self._account, monotonic()
        if before is not None and now - before[0] < deadlock.PROOF_SECONDS:
            return
        answers = self.ask([rank for rank in range(self._size) if rank != self._rank])
        snapshots = {rank: answer.snapshot for rank, answer in answers.items() if answer.snapshot is not None}
        snapshots[self._rank] = self._snapshot()
        self._account = monotonic(), snapshots
        if before is not None and before[1] == snapshots and len(snapshots) == self._size:
            found = deadlock.deadlock(snapshots, self._names)
            if found is not None and self.control.lookup(DEADLOCK) is None:
                self.control.publish(DEADLOCK, found.encode())

    def _look_for_deadlock(self) -> None:
        """End all waits of this rank if it is proved that none will end."""
        if self._rank == 0 and self._size:
            self._prove()
        if (found := self.deadlocked()) is not None:
            for wait in self._waits:
                if wait.verdict is None:
                    wait.told = True
                    wait.end(found)

    def deadlocked(self) -> TransportError | None:
        """Return the error of a deadlock that rank 0 has published; None too if the control channel fails."""
        try:
            found = self.control.lookup(DEADLOCK)
        except TransportError as error:
            logger.debug("whether the ranks wait for each other could not be read: %s", error)
            return None
        return None if found is None else TransportError(printable(found))

    # -- the thread ------------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        try:
            self._serve()
        except BaseException as error:  # noqa: BLE001 - nothing else would end the waits
            for wait in self._waits:
                wait.end(error)

    def _serve(self) -> None:
        seen, looked_at = 0, monotonic()
        while not self._stopping.wait(self._pause()):
            if self._lost is None and (lost := self.beside()) is not None:
                self._lost = lost
                for wait in self._waits:
                    if wait.verdict is None:
                        wait.end(lost)
            waits, now = self._waits, monotonic()
            before, seen = seen, sum(wait.advances for wait in waits)
            goes_on = seen != before and all(wait.waited < LOOK_SECONDS for wait in waits)
            if goes_on and now - looked_at < LONGEST_LOOK_SECONDS:
                continue
            looked_at = now
            try:
                self.answer()
            except TransportError as error:
                logger.debug("no question can be answered: %s", error)
            try:  # before the waits are checked, since ranks that have heard of a deadlock publish aborts
                if self.callers.waited >= deadlock.FIRST_SHARE * deadlock.PROOF_SECONDS:
                    self._look_for_deadlock()
                else:
                    self._account = None
            except TransportError as error:
                logger.debug("the ranks cannot be asked whether they wait for each other: %s", error)
            for wait in waits:
                wait.check()

    def _pause(self) -> float:
        """Return the seconds until the next look, or the first deadline."""
        left = [
            wait.config.timeout_seconds - wait.waited
            for wait in self._waits
            if wait.since is not None and wait.verdict is None and not wait.endless
        ]
        return min(LOOK_SECONDS, max(0.01, min(left, default=LOOK_SECONDS)))
