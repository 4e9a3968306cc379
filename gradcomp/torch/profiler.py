"""Ranges of torch.profiler, with the names that the trace has."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from gradcomp.core import trace


def _begin(name: str) -> Callable[[], object] | None:
    """Begin a range if a profile is being recorded: a range costs ten microseconds, a look at a flag nothing."""
    # No public function says so for all threads; the flag has been there since torch 1.11.
    if not getattr(torch.autograd.profiler, "_is_profiler_enabled", False):
        return None
    entered = torch.profiler.record_function(f"gradcomp: {name}")
    entered.__enter__()  # type: ignore[no-untyped-call]
    return partial(entered.__exit__, None, None, None)


def show_ranges() -> None:
    """Give the phases to torch.profiler: ``wait`` on the training thread, kernels on the engine's."""
    trace.profile_with(_begin)
