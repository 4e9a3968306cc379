"""Train a small convolutional network on scikit-learn's digits by Keras' fit, with compressed gradients.

    mpiexec -n 2 python examples/tf_keras_digits.py --compression quantize:bits=4

or under torchrun, or alone. The lines marked (gradcomp) are all that a script for one process needs to become this one.
"""

from __future__ import annotations

import argparse
import hashlib

import keras
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import gradcomp.tf as gc


def load() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Training and test images, their labels; the same split on all ranks."""
    pixels, labels = load_digits(return_X_y=True)
    images = pixels.reshape(-1, 8, 8, 1).astype(np.float32) / 16
    return train_test_split(images, labels, test_size=0.2, stratify=labels, random_state=0)


def network() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input([8, 8, 1]),
            keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--compression", default="quantize:bits=4", help="e.g. none, bf16, topk:density=0.01")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch", type=int, default=32, help="samples per rank and step")
    parser.add_argument("--lr", type=float, default=0.05)
    options = parser.parse_args()

    gc.init()  # (gradcomp)
    keras.utils.set_random_seed(gc.rank())  # ranks may differ: they begin with rank 0's weights
    images, test_images, labels, test_labels = load()
    count = len(images) // gc.size() * gc.size()  # as many steps on every rank
    own = slice(gc.rank(), count, gc.size())  # (gradcomp) each rank its part of the data

    model = network()
    optimizer = keras.optimizers.SGD(options.lr, momentum=0.9)
    optimizer = gc.DistributedOptimizer(optimizer, compression=options.compression)  # (gradcomp)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    model.fit(
        images[own],
        labels[own],
        batch_size=options.batch,
        epochs=options.epochs,
        callbacks=[
            gc.callbacks.BroadcastGlobalVariables(0),  # (gradcomp)
            gc.callbacks.MetricAverage(),  # (gradcomp)
            gc.callbacks.Progress(),  # (gradcomp)
        ],
        verbose=2 if gc.rank() == 0 else 0,
    )

    accuracy = model.evaluate(test_images, test_labels, verbose=0)[1]
    digest = hashlib.sha256(b"".join(weight.numpy().tobytes() for weight in model.weights)).hexdigest()
    print(f"rank {gc.rank()}: accuracy {accuracy:.4f}, weights {digest[:16]}", flush=True)
    gc.shutdown()


if __name__ == "__main__":
    main()
