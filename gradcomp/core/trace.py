"""The bounded ring of spans: what one exchanger's buckets spent their time on."""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: The phases of a bucket, in their order. ``ready``: until its last gradient came. ``queue``: until the engine's thread
#: took it up. ``compress``, ``reduce`` and ``decompress``: kernels. ``send``: a round of messages. ``feedback``:
#: residuals that are rounded, or take their new values.
PHASES = ("ready", "queue", "compress", "send", "reduce", "decompress", "feedback")

#: The bucket of spans that are a whole step's.
WHOLE_STEP = -1

#: Called with (phase, step, bucket, begin, end) for every span.
Listener = Callable[[str, int, int, float, float], None]

#: Begins a profiler's range of a name and returns what ends it; None where nobody profiles.
Ranges = Callable[[str], Callable[[], object] | None]

_ranges: Ranges | None = None


def profile_with(ranges: Ranges) -> None:
    """A frontend's profiler shows the phases that this process computes, from now on."""
    global _ranges
    _ranges = ranges


def begin_range(name: str) -> Callable[[], object] | None:
    """Begin a profiler's range; what ends it, on the same thread."""
    return None if _ranges is None else _ranges(name)


@dataclass(frozen=True)
class Span:
    """One interval of a bucket's life. Times in seconds of ``time.perf_counter``."""

    name: str
    step: int
    bucket: int
    begin: float
    end: float


class Trace:
    """The last ``capacity`` spans; appending is cheap and thread-safe. ``listener`` is told of each, too."""

    def __init__(self, capacity: int, rank: int = 0) -> None:
        self._spans: deque[tuple[str, int, int, float, float]] = deque(maxlen=capacity)
        self._rank = rank
        self._epoch = time.perf_counter()
        self.listener: Listener | None = None

    def add(self, name: str, step: int, bucket: int, begin: float, end: float) -> None:
        """Record an interval."""
        self._spans.append((name, step, bucket, begin, end))
        listener = self.listener
        if listener is not None:
            listener(name, step, bucket, begin, end)

    def spans(self) -> tuple[Span, ...]:
        """The recorded spans, oldest first."""
        return tuple(Span(*each) for each in tuple(self._spans))

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the spans as Chrome trace JSON (chrome://tracing, Perfetto), atomically.

        A row for each bucket, one process per rank, microseconds.
        """
        spans = self.spans()  # others may go on adding
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
    """The name of a bucket's row."""
    return "step" if bucket == WHOLE_STEP else f"bucket {bucket}"


def row_of(bucket: int) -> int:
    """The number of a bucket's row: numbers of threads are not negative."""
    return bucket - WHOLE_STEP


def row_event(rank: int, row: int, name: str) -> dict[str, Any]:
    """The event that names a row."""
    return {"ph": "M", "pid": rank, "tid": row, "name": "thread_name", "args": {"name": name}}


def span_event(rank: int, row: int, name: str, begin: float, seconds: float, **args: Any) -> dict[str, Any]:
    """The event of one interval, ``begin`` seconds after the first; ``args`` are shown with it."""
    times = {"ts": begin * 1e6, "dur": seconds * 1e6}
    return {"ph": "X", "pid": rank, "tid": row, "name": name, **times, "args": args}
