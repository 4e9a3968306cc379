"""Operations under way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gradcomp.job.reply import Reply


class Handle:
    """An operation under way; give it to :func:`poll` and :func:`synchronize`, or call it."""

    def __init__(self, reply: Reply[Any], finish: Callable[[Any], Any]) -> None:
        self._reply = reply
        self._finish: Callable[[Any], Any] | None = finish
        self._result: Any = None

    def poll(self) -> bool:
        """True once :meth:`wait` returns, or raises, at once."""
        return self._reply.done()

    def wait(self) -> Any:
        """The result, the same each time."""
        received = self._reply.result()
        if self._finish is not None:
            with torch.no_grad():
                self._result = self._finish(received)
            self._finish = None
        return self._result

    __call__ = wait

    def one(self) -> Handle:
        """The handle of the only member of this group, to be used instead of it."""
        finish = self._finish
        assert finish is not None, "nobody has waited for it"
        return Handle(self._reply, lambda received: finish(received)[0])


def poll(handle: Handle) -> bool:
    """Whether :func:`synchronize` would return at once. Local."""
    return handle.poll()


def synchronize(handle: Handle) -> Any:
    """Wait for an operation of any kind; its result: a tensor, a list of them for a group, or a tensor and splits.

    A second call returns the same. Raises what the operation raised.
    """
    return handle.wait()
