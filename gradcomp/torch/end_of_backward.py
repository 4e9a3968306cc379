"""Calls back at the end of a backward pass, as the caller of ``backward()`` sees it."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Variable

from gradcomp.torch.modules import opaque

Callback = Callable[[], None]


class _Running(threading.local):
    """The callbacks of the compiled backward pass that a thread runs; ``ended`` is set once autograd has returned."""

    def __init__(self) -> None:
        self.callbacks: list[Callback] = []
        self.ended = False


_running = _Running()


def at_end(callback: Callback) -> None:
    """Call ``callback`` when the running backward pass ends; a callback may add further ones.

    Autograd's engine does that, but drops the callbacks of hooks that compiled autograd calls. Those are called
    when the engine returns: see :func:`watch_backward`.
    """
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    if _running.ended or getattr(compiled, "in_compiled_autograd_region", False):
        _running.callbacks.append(callback)
    else:
        Variable._execution_engine.queue_callback(callback)


def watch_backward() -> None:
    """Patch the function by which Python runs autograd's engine, once, to call what compiled autograd drops."""
    run: Any = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
    if hasattr(run, "of_gradcomp"):
        return

    @functools.wraps(run)
    def run_and_call_back(*arguments: Any, **named: Any) -> Any:
        outer, _running.callbacks = _running.callbacks, []
        try:
            found = run(*arguments, **named)
            _running.ended = bool(_running.callbacks)
            for callback in _running.callbacks:  # which grows meanwhile
                callback()
            return found
        finally:
            _running.callbacks, _running.ended = outer, False

    wrapped: Any = opaque(run_and_call_back, calls_own=True)
    wrapped.of_gradcomp = True
    torch.autograd._engine_run_backward = wrapped  # type: ignore[attr-defined]


class EndOfBackward:
    """Calls back at the end of the running backward pass.

    Reentrant checkpoints run backward passes inside the outer one, and autograd calls back at the end of
    each. At the end of an inner pass this object asks again, from the nodes that follow in the outer pass.
    """

    def __init__(self, call: Callback) -> None:
        self._call = call
        self._hooks: list[Any] = []
        # torch.compile cannot trace what autograd calls. The wrappers are made once, because one takes 0.1 ms.
        self._ended, self._goes_on = opaque(self._one_has_ended), opaque(self._outer_one_goes_on)

    def wait(self) -> None:
        """Queue the callback; called when the backward pass has begun."""
        at_end(self._ended)

    def _one_has_ended(self) -> None:
        # Its annotation wrongly excludes None.
        around: torch.autograd.graph.Node | None = torch._C._current_autograd_node()
        if around is None:
            self._call()
            return
        self._hooks += [
            node.register_prehook(self._goes_on) for node, _ in around.next_functions if node is not None
        ]

    def _outer_one_goes_on(self, _: Any) -> None:
        while self._hooks:
            self._hooks.pop().remove()
        self.wait()
