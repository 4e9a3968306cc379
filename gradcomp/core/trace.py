"""Times and counts of an exchanger: a profiler's ranges, a bounded trace, a timeline file, and statistics."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import numpy.typing as npt

from gradcomp.core.errors import ConfigError

#: The phases of an exchange bucket, in order. ``ready``: until its last gradient arrives. ``queue``: until the engine's
#: thread takes it. ``compress``, ``reduce`` and ``decompress``: kernels. ``send``: a round of messages. Two are of a
#: whole step: ``wait``, in which the training thread waits, and ``feedback``, in which residuals get their new values.
PHASES = ("ready", "queue", "compress", "send", "reduce", "decompress", "wait", "feedback")

#: The bucket number of spans of a whole step.
WHOLE_STEP = -1

#: A span as phase, step, bucket, begin and end; those of a round of messages have its number and their senders too.
Row = tuple[str, int, int, float, float] | tuple[str, int, int, float, float, int, tuple[int, ...]]

#: Begins a named range of a profiler; returns a function that ends it, to be called on the same thread.
Ranges = Callable[[str], Callable[[], object]]

logger = logging.getLogger("gradcomp")
_HEAD = b'{"displayTimeUnit":"ms","traceEvents":[\n'
_TAIL = b"\n]}\n"
_WRITE_SECONDS = 0.5
_MOST_ROWS = 1 << 16  # of one exchanger
_FIRST_CHANNEL_ROW = 1 << 30  # after the rows of all exchangers


class Profiler:
    """Shows the phases that this process computes as ranges of a frontend's profiler, while ``records()`` is true."""

    records: Callable[[], bool] = bool
    begin: Ranges


profiler = Profiler()


@dataclass(frozen=True)
class Span:
    """One interval of an exchange bucket. Times in seconds of ``time.perf_counter``.

    A round of messages has a number in its bucket, and the members of the exchange whose messages it waited for.
    """

    name: str
    step: int
    bucket: int
    begin: float
    end: float
    round: int = -1
    senders: tuple[int, ...] = ()


class Trace:
    """Keeps the last ``capacity`` spans; appending is cheap and thread-safe."""

    def __init__(self, capacity: int, rank: int = 0) -> None:
        self._spans: deque[Row] = deque(maxlen=capacity)
        #: Records a span. It is called in every phase of a step, so without a listener it is the queue's own method.
        self.add: Callable[[Row], None] = self._spans.append
        self._rank = rank
        self._epoch = time.perf_counter()

    def listen(self, listener: Callable[..., None] | None) -> None:
        """Pass the parts of every further span to ``listener``; None ends this."""
        self.add = self._spans.append
        if listener is not None:

            def add(row: Row) -> None:
                self._spans.append(row)
                listener(*row)

            self.add = add

    def spans(self) -> tuple[Span, ...]:
        """Returns the recorded spans, oldest first."""
        return tuple(Span(*each) for each in tuple(self._spans))

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes the spans as Chrome trace JSON (chrome://tracing, Perfetto), atomically.

        It has a row for each exchange bucket, one process per rank, and times in microseconds.
        """
        spans = self.spans()  # other threads may add more
        events = [row_event(self._rank, row_of(b), title(b)) for b in sorted({span.bucket for span in spans})]
        events += [
            span_event(
                self._rank, row_of(s.bucket), s.name, s.begin - self._epoch, s.end - s.begin, step=s.step
            )
            for s in spans
        ]
        target = Path(path)
        partial = target.with_name(target.name + ".partial")
        partial.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")
        partial.replace(target)


def range_name(phase: str) -> str:
    """Returns the name of a phase's range in a frontend's profiler and in a trace of all ranks."""
    return f"gradcomp: {phase}"


def title(bucket: int) -> str:
    """Returns the name of an exchange bucket's row."""
    return "step" if bucket == WHOLE_STEP else f"bucket {bucket}"


def row_of(bucket: int) -> int:
    """Returns the number of an exchange bucket's row, which is not negative, as it stands for a thread's."""
    return bucket - WHOLE_STEP


def row_event(rank: int, row: int, name: str, **about: Any) -> dict[str, Any]:
    """Returns the event that names a row; ``about`` is for programs that read the file."""
    args = {"name": name, **about}
    return {"ph": "M", "pid": rank, "tid": row, "name": "thread_name", "args": args}


def span_event(rank: int, row: int, name: str, begin: float, seconds: float, **args: Any) -> dict[str, Any]:
    """Returns the event of one interval, ``begin`` seconds after the first; ``args`` are shown with it."""
    times = {"ts": begin * 1e6, "dur": seconds * 1e6}
    return {"ph": "X", "pid": rank, "tid": row, "name": name, **times, "args": args}


def clock() -> str:
    """Returns the name of the clock behind ``perf_counter``: processes with the same name read the same clock.

    It is empty where the system does not tell, and then no other process is known to have this clock.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/time').readlink()}"
    except OSError:
        return ""


@dataclass(frozen=True)
class ExchangeId:
    """Identifies an exchange in the files of all ranks: the job, the exchange's name in it, and its ranks."""

    job: str = ""
    name: str = ""
    ranks: tuple[int, ...] = ()


_UNNAMED = ExchangeId()


class Timeline:
    """Writes the spans of traces twice a second, on its own thread, so that no step waits for a disk.

    New events overwrite the end of the file, which is written again after them in the same call. If a write fails (a
    full disk), a warning is logged and the timeline ends, but not the training. ``mark_steps`` adds an event at the
    beginning of each step. The first event names the clock, and its reading at the timeline's zero;
    :mod:`gradcomp.core.alignment` compares those of all ranks. Raises ConfigError if the file cannot be created.
    """

    def __init__(self, path: str | os.PathLike[str], rank: int, mark_steps: bool = False) -> None:
        self._path, self._rank, self._mark_steps = os.fspath(path), rank, mark_steps
        began, self._epoch = time.time(), time.perf_counter()
        self._events: SimpleQueue[dict[str, Any]] = SimpleQueue()
        self._traces: list[Trace] = []
        self._rows: set[int] = set()
        self._channels: dict[str, int] = {}
        self._marked: dict[int, int] = {}  # by exchanger, the last marked step
        self._end = 0
        self._stopping = threading.Event()
        try:
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot write the timeline {self._path!r}: {error}") from error
        about = {"name": f"rank {rank}", "began": began, "clock": clock(), "zero": self._epoch}
        self._write(_HEAD, [{"ph": "M", "pid": rank, "tid": 0, "name": "process_name", "args": about}])
        self._thread = threading.Thread(target=self._run, name="gradcomp-timeline", daemon=True)
        self._thread.start()

    def listen(self, trace: Trace, exchange: ExchangeId = _UNNAMED) -> None:
        """Records all further spans of this trace, in separate rows."""
        number = len(self._traces)
        self._traces.append(trace)
        first = number * _MOST_ROWS
        about = {"job": exchange.job, "exchange": exchange.name, "ranks": exchange.ranks}

        def add(
            name: str,
            step: int,
            bucket: int,
            begin: float,
            end: float,
            number_of_round: int = -1,
            senders: tuple[int, ...] = (),
        ) -> None:
            row = first + row_of(bucket)
            if row not in self._rows:
                self._rows.add(row)
                named = title(bucket) if number == 0 else f"{title(bucket)}, exchange {number}"
                self._events.put(row_event(self._rank, row, named, bucket=bucket, **about))
            if self._mark_steps and self._marked.get(number, -1) < step:
                self._marked[number] = step
                mark = {"ph": "i", "s": "p", "pid": self._rank, "tid": first, "name": f"step {step}"}
                self._events.put({**mark, "ts": (begin - self._epoch) * 1e6})
            args: dict[str, Any] = {"step": step}
            if number_of_round >= 0:
                args["round"] = number_of_round
                args["from"] = [exchange.ranks[member] for member in senders] if exchange.ranks else senders
            self._events.put(span_event(self._rank, row, name, begin - self._epoch, end - begin, **args))

        trace.listen(add)

    def add_call(self, channel: str, name: str, called: float, begin: float, end: float) -> None:
        """Records one of the user's collectives in its channel's row: the wait for all ranks, and its work."""
        row = self._channels.get(channel)
        if row is None:
            row = self._channels[channel] = _FIRST_CHANNEL_ROW + len(self._channels)
            self._events.put(row_event(self._rank, row, channel))
        called = max(called, self._epoch)  # it may have been called before this timeline began
        for span, since, until in (("negotiate", called, begin), (name, begin, end)):
            self._events.put(span_event(self._rank, row, span, since - self._epoch, until - since, call=name))

    def close(self) -> None:
        """Writes the remaining events, and closes the file. May be called again."""
        for trace in self._traces:
            trace.listen(None)
        self._stopping.set()
        self._thread.join()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _run(self) -> None:
        while not self._stopping.wait(_WRITE_SECONDS):
            self._flush()
        self._flush()

    def _flush(self) -> None:
        events = []
        try:
            while True:
                events.append(self._events.get_nowait())
        except Empty:
            pass
        if events and self._file >= 0:
            self._write(b",\n", events)

    def _write(self, before: bytes, events: list[dict[str, Any]]) -> None:
        lines = before + b",\n".join(json.dumps(each, allow_nan=False).encode() for each in events)
        try:
            written = os.pwrite(self._file, lines + _TAIL, self._end)
            if written < len(lines) + len(_TAIL):
                raise OSError("the disk is full")
        except OSError as error:
            logger.warning("the timeline %s ends here: %s", self._path, error.strerror or error)
            self._cut()
            return
        self._end += len(lines)

    def _cut(self) -> None:
        """Truncates the file to its last valid end."""
        try:
            os.ftruncate(self._file, self._end)
            os.pwrite(self._file, _TAIL, self._end)
        except OSError:
            pass
        os.close(self._file)
        self._file = -1


@dataclass
class Statistics:
    """Counters of one rank since the start: bytes that it sent, and seconds of wall time.

    ``dense_bytes`` is what an uncompressed exchange of the same gradients in their own dtype would have sent by the
    same reduction, 2 d (N-1) / N. ``exposed_seconds`` is the time the training thread waited for the exchange,
    ``vote_seconds`` the time ranks took to agree on steps (``on_skip="agree"``). ``step_seconds`` is the time from the
    end of a step's exchange to the end of the next; that of the first step counts from its beginning.
    """

    steps: int = 0
    skipped_steps: int = 0
    wire_bytes: int = 0
    dense_bytes: int = 0
    codec_seconds: float = 0.0
    wire_seconds: float = 0.0
    exposed_seconds: float = 0.0
    vote_seconds: float = 0.0
    step_seconds: float = 0.0

    FIELDS = ("steps", "skipped_steps", "wire_bytes", "dense_bytes", "codec_seconds", "wire_seconds",
              "exposed_seconds", "vote_seconds", "step_seconds")  # fmt: skip

    def vector(self) -> npt.NDArray[np.float64]:
        """Returns the fields in order, for reduction."""
        return np.array([getattr(self, name) for name in self.FIELDS], dtype=np.float64)

    @classmethod
    def mean(cls, vector: npt.NDArray[np.float64], ranks: int) -> Statistics:
        """Returns the mean over ranks, from the sum of their vectors; counts are rounded down."""
        values = dict(zip(cls.FIELDS, (vector / ranks).tolist(), strict=True))
        counts = {name: int(values[name]) for name in cls.FIELDS if not name.endswith("_seconds")}
        return cls(**{**values, **counts})

    @property
    def ratio(self) -> float:
        """Returns dense bytes over sent bytes; 1.0 before the first step."""
        return self.dense_bytes / self.wire_bytes if self.wire_bytes else 1.0
