"""Streams of a device whose memory is the CPU's, for code that has no GPU to run on.

What torch itself does is done at once, whichever stream is current. Copies to pinned memory are not: they are done when
somebody follows their event, or has asked for it a few times, and read then what the device holds.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from gradcomp.torch.streams import flat

GARBAGE = 0xA7


@dataclass(eq=False)
class Stream:
    """What it holds and has not done."""

    handle: int
    held: list[Callable[[], Any]] = field(default_factory=list)
    begun: int = 0

    def run(self, end: int) -> None:
        while self.begun < end:
            self.begun += 1
            self.held[self.begun - 1]()


@dataclass(eq=False)
class Event:
    stream: Stream
    end: int
    asked: int = 0


class FakeStreams:
    """See :class:`gradcomp.torch.streams.Streams`; ``late``: how often an event is asked for in vain."""

    def __init__(self, late: int = 3) -> None:
        self.late = late
        self.default = Stream(0)
        self.copies: Counter[str] = Counter()
        self.waited: list[tuple[Stream, Stream]] = []  # who followed whom
        self._made: dict[int, Stream] = {}
        self._pinned: set[int] = set()
        self._of_thread = threading.local()

    def refuse_capture(self) -> None:
        pass

    def current(self) -> Stream:
        return getattr(self._of_thread, "stream", self.default)

    def handle(self) -> int:
        return self.current().handle

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self._of_thread.stream = self.current(), stream
        yield
        self._of_thread.stream = before

    def another(self) -> Stream:
        return self.external(100 + len(self._made))

    def external(self, handle: int) -> Stream:
        return self._made.setdefault(handle, Stream(handle))

    def mark(self) -> Event:
        return Event(self.current(), len(self.current().held))

    def reached(self, event: Event) -> bool:
        event.asked += 1
        if event.asked <= self.late and event.stream.begun < event.end:
            return False
        event.stream.run(event.end)
        return True

    def follow(self, event: Event) -> None:
        self.waited.append((self.current(), event.stream))
        event.stream.run(event.end)

    def pinned(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        room = torch.full((elements * dtype.itemsize + 1,), GARBAGE, dtype=torch.uint8)[:-1].view(dtype)
        self._pinned.add(room.data_ptr())
        return room

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        stream = self.current()
        down = target.data_ptr() in self._pinned
        self.copies["down" if down else f"up on {stream.handle}"] += 1
        stream.held.append(lambda: flat(target).copy_(flat(source)))
        if not down:
            stream.run(len(stream.held))
