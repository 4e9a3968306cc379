"""Records what all exchangers do, from one call to another."""

from __future__ import annotations

import os

from gradcomp.core.errors import StateError
from gradcomp.job import runtime


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Record the phases of every exchange bucket in a file of Chrome trace JSON, for chrome://tracing or Perfetto.

    Rows are exchange buckets, and times are microseconds from this call on. Phases: ready (until the last gradient
    came), queue, compress, send, reduce, decompress, feedback. Kernels that compress write the next residual too, so
    feedback is what is beside it: the new residuals accepted, and their rounding to bfloat16. The file grows twice a
    second, and is valid JSON after every write.

    Local: ranks need not agree. ``shutdown`` ends the recording.

    Args:
        file_path: the file that rank 0 writes; other ranks record nothing. With ``{rank}`` in it every rank writes its
            own.
        mark_cycles: whether to mark where each step begins. There are no cycles here: an exchange bucket leaves once it
            is complete.

    Raises:
        ConfigError: if the file cannot be made.
        StateError: before ``init``, and while a timeline is being recorded.
    """
    state = runtime.current()
    if state.timeline is not None:
        raise StateError("a timeline is being recorded; call stop_timeline() first")
    state.start_timeline(os.fspath(file_path), mark_cycles)


def stop_timeline() -> None:
    """End what :func:`start_timeline` began; do nothing where this rank records nothing.

    Raises:
        StateError: before ``init``.
    """
    state = runtime.current()
    timeline, state.timeline = state.timeline, None
    if timeline is not None:
        timeline.close()
