"""Ops that return ranks and sizes of the job when they run, and not when a function is traced.

Results are int32 scalars. Local, without a gradient. All raise StateError before ``init``. ``name`` is the
op's name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from gradcomp.core.errors import ConfigError
from gradcomp.job import runtime
from gradcomp.job.process_sets import ProcessSet, global_process_set
from gradcomp.tf import bridge
from gradcomp.tf.ordered import plain, refuse_xla


@plain
def size_op(process_set_id: ProcessSet | int = 0, name: str | None = None) -> Any:
    """Return the number of ranks of the job (``process_set_id`` 0), or of a :class:`ProcessSet`."""
    return _ask("size_op", _set_of(process_set_id).size, name)


@plain
def rank_op(name: str | None = None) -> Any:
    """Return this process's rank in the job."""
    return _ask("rank_op", runtime.rank, name)


@plain
def local_rank_op(name: str | None = None) -> Any:
    """Return this process's rank on its host."""
    return _ask("local_rank_op", runtime.local_rank, name)


@plain
def local_size_op(name: str | None = None) -> Any:
    """Return the number of the job's processes on this host."""
    return _ask("local_size_op", runtime.local_size, name)


@plain
def process_set_included_op(process_set_id: ProcessSet | int = 0, name: str | None = None) -> Any:
    """Return 1 if this process is a member of a :class:`ProcessSet`, else 0; always 1 for 0, which means all."""
    return _ask("process_set_included_op", _set_of(process_set_id).included, name)


def _set_of(process_set: Any) -> ProcessSet:
    """Return the process set, of which only that of all ranks has a number, unlike in Horovod."""
    if isinstance(process_set, ProcessSet):
        return process_set
    if process_set in (None, 0):
        return global_process_set
    raise ConfigError(f"process_set_id must be 0 or a ProcessSet, got {process_set!r}")


def _ask(kind: str, question: Callable[[], Any], name: str | None) -> Any:
    if tf.executing_eagerly():
        return tf.constant(int(question()), tf.int32, name=name)
    refuse_xla(kind)
    (answer,) = bridge.op(lambda: [np.asarray(int(question()), np.int32)], [], [tf.int32])
    return tf.ensure_shape(answer, [], name=name)
