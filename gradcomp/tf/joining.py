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
    """Tell the ranks that this one is out of data, wait until all are, and return the rank with most steps.

    Until then the others' steps and allreduces go on: to a step this rank adds no gradient, to an allreduce
    it adds zeros, and means are still divided by N. Its variables do not change, so broadcast from the rank
    that is returned, an integer; inside a tf.function an int32 scalar. Any other collective of the others
    raises a ConfigError there. Raises StateError before ``init``,
    TransportError if a rank fails. Wire: as the others' exchanges, and for each exchange a small value in the
    job's store.
    """
    if tf.executing_eagerly() or runtime.size() == 1:
        return joining.join()

    def wait() -> list[Array]:
        return [np.asarray(joining.join(), np.int32)]

    return run("join", wait, [], [tf.int32])[0]
