"""Train, be killed, and go on from the last epoch as if nothing had happened: with BackupAndRestore.

    mpiexec -n 2 python examples/tf_resume.py backup --kill-in-epoch 3     # ends by itself, with an error
    mpiexec -n 2 python examples/tf_resume.py backup                       # goes on with epoch 3

The weights at the end are, bit for bit, those of a run that nobody killed: what compression has not sent yet is backed
up too.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import gradcomp.tf as gc


class Kill(keras.callbacks.Callback):
    """The power fails in the middle of an epoch."""

    def __init__(self, epoch: int) -> None:
        super().__init__()
        self.epoch = epoch
        self.now = False

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        if gc.rank() == 0:
            print(f"epoch {epoch + 1}", flush=True)
        self.now = epoch + 1 == self.epoch

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        if self.now and batch == 4:
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("backup", help="directory for the backup; all ranks see it")
    parser.add_argument("--kill-in-epoch", type=int, default=0)
    parser.add_argument("--compression", default="topk:density=0.05")
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()

    gc.init()
    keras.utils.set_random_seed(0)
    tf.config.experimental.enable_op_determinism()  # else TensorFlow itself may add in another order
    pixels, labels = load_digits(return_X_y=True)
    pixels = pixels.astype(np.float32) / 16
    count = len(pixels) // gc.size() * gc.size()
    own = slice(gc.rank(), count, gc.size())

    model = keras.Sequential(
        [keras.Input([64]), keras.layers.Dense(256, activation="relu"), keras.layers.Dense(10)]
    )
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    optimizer = gc.DistributedOptimizer(optimizer, compression=options.compression)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    model.fit(
        pixels[own],
        labels[own],
        batch_size=32,
        epochs=options.epochs,
        shuffle=False,  # every epoch the same data in the same order, also after a restart
        callbacks=[
            gc.callbacks.BroadcastGlobalVariables(0),
            # Behind the broadcast: each rank has its own state.
            gc.callbacks.BackupAndRestore(options.backup),
            Kill(options.kill_in_epoch),
        ],
        verbose=0,
    )

    accuracy = model.evaluate(pixels, labels, verbose=0)[1]
    digest = hashlib.sha256(b"".join(weight.numpy().tobytes() for weight in model.weights)).hexdigest()
    print(f"rank {gc.rank()}: accuracy {accuracy:.4f}, weights {digest[:16]}", flush=True)
    gc.shutdown()


if __name__ == "__main__":
    main()
