"""Writes a file of Chrome trace JSON that grows during a run and is valid after every write."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from queue import Empty, SimpleQueue
from typing import Any

from gradcomp.core.errors import ConfigError
from gradcomp.core.trace import Trace, row_event, row_of, span_event, title

logger = logging.getLogger("gradcomp")

_HEAD = b'{"displayTimeUnit":"ms","traceEvents":[\n'
_TAIL = b"\n]}\n"
_WRITE_SECONDS = 0.5
_MOST_ROWS = 1 << 16  # of one exchanger
_FIRST_CHANNEL_ROW = 1 << 30  # after the rows of all exchangers


class Timeline:
    """Writes the spans of traces twice a second, on its own thread, so that no step waits for a disk.

    New events overwrite the end of the file, which is written again after them in the same call. If a write fails (a
    full disk), a warning is logged and the timeline ends, but not the training. ``mark_steps`` adds an event at the
    beginning of each step. Raises ConfigError if the file cannot be created.
    """

    def __init__(self, path: str | os.PathLike[str], rank: int, mark_steps: bool = False) -> None:
        self._path, self._rank, self._mark_steps = os.fspath(path), rank, mark_steps
        self._epoch = time.perf_counter()
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
        about = {"name": f"rank {rank}", "began": time.time()}
        self._write(_HEAD, [{"ph": "M", "pid": rank, "tid": 0, "name": "process_name", "args": about}])
        self._thread = threading.Thread(target=self._run, name="gradcomp-timeline", daemon=True)
        self._thread.start()

    def listen(self, trace: Trace) -> None:
        """Records all further spans of this trace, in separate rows."""
        number = len(self._traces)
        self._traces.append(trace)
        first = number * _MOST_ROWS

        def add(name: str, step: int, bucket: int, begin: float, end: float) -> None:
            row = first + row_of(bucket)
            if row not in self._rows:
                self._rows.add(row)
                named = title(bucket) if number == 0 else f"{title(bucket)}, exchange {number}"
                self._events.put(row_event(self._rank, row, named))
            if self._mark_steps and self._marked.get(number, -1) < step:
                self._marked[number] = step
                mark = {"ph": "i", "s": "p", "pid": self._rank, "tid": first, "name": f"step {step}"}
                self._events.put({**mark, "ts": (begin - self._epoch) * 1e6})
            self._events.put(span_event(self._rank, row, name, begin - self._epoch, end - begin, step=step))

        trace.listener = add

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
            trace.listener = None
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
