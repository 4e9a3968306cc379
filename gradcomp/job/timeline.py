"""Recording what all exchangers do, from one call to another."""

from __future__ import annotations

import os

from gradcomp.core.errors import StateError
from gradcomp.job import runtime


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Record the phases of every bucket in a file of Chrome trace JSON, for chrome://tracing or Perfetto.

    Rows are buckets, microseconds from this call on. Phases: ready (until the last gradient came), queue, compress,
    send, reduce, decompress, feedback. Kernels that compress write the next residual too, so feedback is what is beside
    it: the new residuals accepted, and their rounding to bfloat16. The file grows twice a second, and is valid JSON
    after every write.

    Args:
        file_path: rank 0 writes it; the others record nothing. With ``{rank}`` in it every rank writes its own.
        mark_cycles: mark where each step begins. There are no cycles here: a bucket leaves once it is complete.

    Local: ranks need not agree. ``shutdown`` ends it.
    Errors: StateError before ``init`` and where a timeline is being recorded, ConfigError if the file cannot be made.
    """
    state = runtime.current()
    if state.timeline is not None:
        raise StateError("a timeline is being recorded; call stop_timeline() first")
    state.start_timeline(os.fspath(file_path), mark_cycles)


def stop_timeline() -> None:
    """End what :func:`start_timeline` began; nothing where this rank records nothing. StateError before ``init``."""
    state = runtime.current()
    timeline, state.timeline = state.timeline, None
    if timeline is not None:
        timeline.close()
