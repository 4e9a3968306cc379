"""Counters of one exchanger and the bounded ring of spans behind the trace."""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Span:
    """One interval of a bucket's life. Times in seconds of ``time.perf_counter``."""

    name: str
    step: int
    bucket: int
    begin: float
    end: float


class Trace:
    """The last ``capacity`` spans; appending is cheap and thread-safe."""

    def __init__(self, capacity: int, rank: int = 0) -> None:
        self._spans: deque[tuple[str, int, int, float, float]] = deque(maxlen=capacity)
        self._rank = rank
        self._epoch = time.perf_counter()

    @contextmanager
    def span(self, name: str, step: int, bucket: int) -> Iterator[None]:
        """Record the time spent in the block."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, step, bucket, begin, time.perf_counter())

    def add(self, name: str, step: int, bucket: int, begin: float, end: float) -> None:
        """Record an interval."""
        self._spans.append((name, step, bucket, begin, end))

    def spans(self) -> tuple[Span, ...]:
        """The recorded spans, oldest first."""
        return tuple(Span(*each) for each in tuple(self._spans))

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the spans as Chrome trace JSON (chrome://tracing, Perfetto), atomically.

        One row (thread) per span name, one process per rank, microseconds.
        """
        spans = self.spans()  # others may go on adding
        names = sorted({span.name for span in spans})
        events: list[dict[str, object]] = [
            {"ph": "M", "pid": self._rank, "tid": tid, "name": "thread_name", "args": {"name": name}}
            for tid, name in enumerate(names)
        ]
        events += [
            {
                "ph": "X",
                "pid": self._rank,
                "tid": names.index(span.name),
                "name": f"{span.name} {span.bucket}",
                "ts": (span.begin - self._epoch) * 1e6,
                "dur": (span.end - span.begin) * 1e6,
                "args": {"step": span.step, "bucket": span.bucket},
            }
            for span in spans
        ]
        target = Path(path)
        partial = target.with_name(target.name + ".partial")
        partial.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")
        partial.replace(target)


@dataclass
class Statistics:
    """What one rank did since the start. Bytes are those this rank sent; seconds are wall time.

    ``dense_bytes`` is what an uncompressed exchange of the same gradients in their own dtype would have sent by the
    same reduction, 2 d (N-1) / N. ``exposed_seconds`` is the time the training thread waited for the exchange,
    ``vote_seconds`` for ranks to agree on steps (``on_skip="agree"``).
    """

    steps: int = 0
    skipped_steps: int = 0
    wire_bytes: int = 0
    dense_bytes: int = 0
    codec_seconds: float = 0.0
    wire_seconds: float = 0.0
    exposed_seconds: float = 0.0
    vote_seconds: float = 0.0

    FIELDS = ("steps", "skipped_steps", "wire_bytes", "dense_bytes", "codec_seconds", "wire_seconds",
              "exposed_seconds", "vote_seconds")  # fmt: skip

    def vector(self) -> npt.NDArray[np.float64]:
        """The fields in order, for reduction."""
        return np.array([getattr(self, name) for name in self.FIELDS], dtype=np.float64)

    @classmethod
    def mean(cls, vector: npt.NDArray[np.float64], ranks: int) -> Statistics:
        """The mean over ranks, from the sum of their vectors; counts are rounded down."""
        values = dict(zip(cls.FIELDS, (vector / ranks).tolist(), strict=True))
        counts = {name: int(values[name]) for name in cls.FIELDS if not name.endswith("_seconds")}
        return cls(**{**values, **counts})

    @property
    def ratio(self) -> float:
        """Dense bytes over sent bytes; 1.0 before the first step."""
        return self.dense_bytes / self.wire_bytes if self.wire_bytes else 1.0
