"""Train on scikit-learn's digits in a loop of one's own, with TensorFlow's tape and variables.

    mpiexec -n 2 python examples/tf_tape.py --compression quantize:bits=4

or under torchrun, or alone. The lines marked (gradcomp) are all that a script for one process needs to become this one.
"""

from __future__ import annotations

import argparse
import hashlib

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import gradcomp.tf as gc


class Network(tf.Module):
    """Two layers, and nothing of Keras."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = tf.Variable(tf.random.normal([64, 256], stddev=0.15), name="hidden")
        self.bias = tf.Variable(tf.zeros([256]), name="bias")
        self.output = tf.Variable(tf.random.normal([256, 10], stddev=0.05), name="output")

    def __call__(self, images: tf.Tensor) -> tf.Tensor:
        return tf.nn.relu(images @ self.hidden + self.bias) @ self.output


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--compression", default="quantize:bits=4", help="e.g. none, bf16, topk:density=0.01")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=32, help="samples per rank and step")
    parser.add_argument("--lr", type=float, default=0.2)
    options = parser.parse_args()

    gc.init()  # (gradcomp)
    tf.random.set_seed(gc.rank())
    pixels, labels = load_digits(return_X_y=True)
    pixels = pixels.astype(np.float32) / 16
    images, test_images, labels, test_labels = train_test_split(
        pixels, labels.astype(np.int32), test_size=0.2, stratify=labels, random_state=0
    )
    data = tf.data.Dataset.from_tensor_slices((images, labels))
    data = data.shard(gc.size(), gc.rank())  # (gradcomp)
    data = data.shuffle(len(images), seed=0).repeat().batch(options.batch).take(options.steps)

    network = Network()
    variables = network.trainable_variables
    gc.broadcast_variables(variables, root_rank=0)  # (gradcomp)

    @tf.function
    def step(batch: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(targets, network(batch))
            loss = tf.reduce_mean(losses)
        tape = gc.DistributedGradientTape(tape, compression=options.compression)  # (gradcomp)
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(options.lr * gradient)
        return gc.allreduce(loss, name="loss")  # (gradcomp) the mean over ranks

    for number, (batch, targets) in enumerate(data):
        loss = step(batch, targets)
        if gc.rank() == 0 and (number + 1) % 50 == 0:
            print(f"step {number + 1}: loss {float(loss):.4f}", flush=True)

    hits = tf.argmax(network(test_images), axis=1, output_type=tf.int32) == test_labels
    accuracy = float(tf.reduce_mean(tf.cast(hits, tf.float32)))
    digest = hashlib.sha256(b"".join(variable.numpy().tobytes() for variable in variables)).hexdigest()
    print(f"rank {gc.rank()}: accuracy {accuracy:.4f}, weights {digest[:16]}", flush=True)
    gc.shutdown()


if __name__ == "__main__":
    main()
