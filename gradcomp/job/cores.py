"""Decides how many threads share the work of a rank's kernels on the host."""

from __future__ import annotations

import logging
import os

logger = logging.getLogger("gradcomp")


def available_cores() -> int:
    """Return the number of cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # systems without affinity


def kernel_threads(asked: int, cores: int, local_ranks: int, training_threads: int) -> int:
    """Return the number of threads, the caller's included, that share the work of a kernel of this rank.

    The ranks of a host share its cores equally. A rank's share is the most that it uses, whatever is asked. Nothing
    asked (0), it leaves the framework a core for each of its threads, because an exchange overlaps with backward: a
    backward whose threads wait for each other is as slow as the one that has lost its core. A framework that has a
    thread for every core of the share leaves none, and the thread that exchanges then works alone.
    """
    share = max(cores // local_ranks, 1)
    return min(asked, share) if asked else max(share - training_threads, 1)


def warn_of_threads(asked: int, cores: int, local_ranks: int, used: int) -> None:
    """Log that fewer threads than asked are used, if that is so."""
    if asked > used:
        logger.warning(
            "threads=%d: %d core%s for %d rank%s of this host, so each uses %d thread%s for its kernels",
            asked,
            cores,
            "s" * (cores > 1),
            local_ranks,
            "s" * (local_ranks > 1),
            used,
            "s" * (used > 1),
        )
