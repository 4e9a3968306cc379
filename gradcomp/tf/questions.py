"""Ops that answer what a process knows of its job when they run, and not when a function is traced.

int32 scalars, local, without a gradient. StateError before ``init``.
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
    """The number of ranks, of all or of a :class:`ProcessSet`; 0 means all. ``name``: the op's."""
    return _ask("size_op", _set_of(process_set_id).size, name)


@plain
def rank_op(name: str | None = None) -> Any:
    """This process's number. ``name``: the op's."""
    return _ask("rank_op", runtime.rank, name)


@plain
def local_rank_op(name: str | None = None) -> Any:
    """This process's number on its host. ``name``: the op's."""
    return _ask("local_rank_op", runtime.local_rank, name)


@plain
def local_size_op(name: str | None = None) -> Any:
    """Number of the job's processes on this host. ``name``: the op's."""
    return _ask("local_size_op", runtime.local_size, name)


@plain
def process_set_included_op(process_set_id: ProcessSet | int = 0, name: str | None = None) -> Any:
    """1 if this process is a member of a :class:`ProcessSet`, else 0; 0 as an argument means all ranks."""
    return _ask("process_set_included_op", _set_of(process_set_id).included, name)


def _set_of(process_set: Any) -> ProcessSet:
    """Horovod numbers its sets; here only the set of all ranks has one."""
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
