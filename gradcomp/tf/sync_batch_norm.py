"""Batch normalisation over the batches of all ranks."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from gradcomp.core.errors import ConfigError
from gradcomp.job.process_sets import Members, members
from gradcomp.job.reduce_op import Sum
from gradcomp.tf.bridge import plain
from gradcomp.tf.collectives import allreduce


@keras.saving.register_keras_serializable(package="gradcomp")
class SyncBatchNormalization(keras.layers.BatchNormalization):
    """Batch normalisation whose mean and variance, in training, are those of all ranks' batches together.

        n = sum of n_k;  mean = sum of s_k / n;  variance = sum over ranks of the squares of (x - mean) / n

    with n_k values per channel on rank k and s_k their sum. It replaces ``keras.layers.BatchNormalization``, and takes
    its other arguments. Batches may differ in size between ranks, and be empty on some; masked values do not count.
    Gradients flow through the statistics: they are those of the sum of all ranks' losses. In evaluation, and in a world
    of one, nothing is exchanged.

    Args:
        fused: Horovod's argument, which must be False.
        process_set: the ranks that normalise together, if not all.

    Wire: two allreduces in forward, of 2 C and C numbers, and two in backward, for C channels. All ranks must run it
    the same number of times, in the same order. Raises ConfigError for ``fused=True``, TensorFlow's
    InvalidArgumentError if no rank has a value, and the errors of the collectives.
    Source: Ioffe and Szegedy 2015. Horovod subtracts the square of the mean from the mean of squares, which loses
    digits, and assumes that all batches are equally large.
    """

    def __init__(self, fused: bool | None = False, process_set: Members = None, **kwargs: Any) -> None:
        if fused in (True, None):
            raise ConfigError(
                "SyncBatchNormalization: there is no fused kernel that communicates; leave fused out"
            )
        super().__init__(**kwargs)
        self.process_set = process_set

    @plain
    def _moments(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
        """Compute mean and variance by channel over all ranks, where Keras asks for those of the batch."""
        if len(members(self.process_set)) == 1:
            return super()._moments(inputs, mask)  # type: ignore[no-any-return]
        axes = self._reduction_axes
        if mask is None:
            weights = tf.ones_like(inputs)
        else:
            weights = tf.broadcast_to(tf.cast(mask, inputs.dtype)[..., tf.newaxis], tf.shape(inputs))
        own = tf.stack([tf.reduce_sum(inputs * weights, axes), tf.reduce_sum(weights, axes)])
        total, count = tf.unstack(self._sum(own))
        tf.debugging.assert_positive(count, "SyncBatchNormalization: no rank has a value")
        mean = total / count
        shape = [1] * len(inputs.shape)
        shape[self.axis] = tf.shape(inputs)[self.axis]
        squares = tf.square(inputs - tf.reshape(mean, shape)) * weights
        return mean, self._sum(tf.reduce_sum(squares, axes)) / count

    def _sum(self, own: Any) -> Any:
        return allreduce(own, op=Sum, process_set=self.process_set)
