"""Handles of asynchronous collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gradcomp.job.reply import Reply


class Handle:
    """An asynchronous operation; give it to :func:`poll` and :func:`synchronize`, or call it."""

    def __init__(self, reply: Reply[Any], finish: Callable[[Any], Any]) -> None:
        self._reply = reply
        self._finish: Callable[[Any], Any] | None = finish
        self._result: Any = None

    def poll(self) -> bool:
        """Return True once :meth:`wait` returns, or raises, without waiting."""
        return self._reply.done()

    def wait(self) -> Any:
        """Wait for the operation and return its result; further calls return the same object."""
        received = self._reply.result()
        if self._finish is not None:
            with torch.no_grad():
                self._result = self._finish(received)
            self._finish = None
        return self._result

    __call__ = wait

    def one(self) -> Handle:
        """Return a handle of the only member of this group, to be used in its place."""
        finish = self._finish
        assert finish is not None, "one() comes before wait()"
        return Handle(self._reply, lambda received: finish(received)[0])


def poll(handle: Handle) -> bool:
    """Return True if :func:`synchronize` would return at once. Local."""
    return handle.poll()


def synchronize(handle: Handle) -> Any:
    """Wait for an operation of any kind and return its result.

    That is a tensor, a list of them for a group, or a tensor and splits for an all-to-all. A second call
    returns the same object. Raises what the operation raised.
    """
    return handle.wait()
