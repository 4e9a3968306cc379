"""A bounded trace of the time that one exchanger's buckets spend in each phase."""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: The phases of an exchange bucket, in order. ``ready``: until its last gradient arrives. ``queue``: until the engine's
#: thread takes it. ``compress``, ``reduce`` and ``decompress``: kernels. ``send``: a round of messages. ``feedback``:
#: residuals are rounded, or get their new values.
PHASES = ("ready", "queue", "compress", "send", "reduce", "decompress", "feedback")

#: The bucket number of spans of a whole step.
WHOLE_STEP = -1

#: Called with (phase, step, bucket, begin, end) for every span.
Listener = Callable[[str, int, int, float, float], None]

#: Begins a named range of a profiler and returns a function that ends it; None if no profiler runs.
Ranges = Callable[[str], Callable[[], object] | None]

_ranges: Ranges | None = None


def profile_with(ranges: Ranges) -> None:
    """Shows the phases that this process computes in a frontend's profiler, from now on."""
    global _ranges
    _ranges = ranges


def begin_range(name: str) -> Callable[[], object] | None:
    """Begins a profiler's range; returns a function that ends it, to be called on the same thread."""
    return None if _ranges is None else _ranges(name)


@dataclass(frozen=True)
class Span:
    """One interval of an exchange bucket. Times in seconds of ``time.perf_counter``."""

    name: str
    step: int
    bucket: int
    begin: float
    end: float


class Trace:
    """Keeps the last ``capacity`` spans; appending is cheap and thread-safe. ``listener`` is called with each."""

    def __init__(self, capacity: int, rank: int = 0) -> None:
        self._spans: deque[tuple[str, int, int, float, float]] = deque(maxlen=capacity)
        self._rank = rank
        self._epoch = time.perf_counter()
        self.listener: Listener | None = None

    def add(self, name: str, step: int, bucket: int, begin: float, end: float) -> None:
        self._spans.append((name, step, bucket, begin, end))
        listener = self.listener
        if listener is not None:
            listener(name, step, bucket, begin, end)

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


def title(bucket: int) -> str:
    """Returns the name of an exchange bucket's row."""
    return "step" if bucket == WHOLE_STEP else f"bucket {bucket}"


def row_of(bucket: int) -> int:
    """Returns the number of an exchange bucket's row, which is not negative, as it stands for a thread's."""
    return bucket - WHOLE_STEP


def row_event(rank: int, row: int, name: str) -> dict[str, Any]:
    """Returns the event that names a row."""
    return {"ph": "M", "pid": rank, "tid": row, "name": "thread_name", "args": {"name": name}}


def span_event(rank: int, row: int, name: str, begin: float, seconds: float, **args: Any) -> dict[str, Any]:
    """Returns the event of one interval, ``begin`` seconds after the first; ``args`` are shown with it."""
    times = {"ts": begin * 1e6, "dur": seconds * 1e6}
    return {"ph": "X", "pid": rank, "tid": row, "name": name, **times, "args": args}
