"""Horovod's ``join`` for TensorFlow."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from gradcomp.job import joining, runtime
from gradcomp.tf.ordered import plain, run
from gradcomp.tf.tensors import Array


@plain
def join() -> Any:
    """Say that this rank is out of data, and wait until all ranks have; the rank that has made most steps by then.

    Until then the others' steps and allreduces go on: this rank adds no gradient and zeros, and means are still divided
    by N. Its variables stay what they are, so broadcast from the rank that is returned: an integer, inside a
    tf.function an int32 scalar. Any other collective of the others is a ConfigError there. StateError before ``init``,
    TransportError if a rank fails. Wire: as the others' exchanges, and for each exchange a small value in the job's
    store.
    """
    if tf.executing_eagerly() or runtime.size() == 1:
        return joining.join()

    def wait() -> list[Array]:
        return [np.asarray(joining.join(), np.int32)]

    return run("join", wait, [], [tf.int32])[0]
