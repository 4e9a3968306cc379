"""Train on scikit-learn's digits by Keras' fit where ranks have unequal numbers of samples.

    mpiexec -n 2 python examples/tf_uneven.py --compression topk:density=0.05

or under torchrun. The last rank has three times as many samples as the first one. Nothing is dropped or repeated: in
every epoch a rank that is out of batches stands in for the others' steps, and all end it with the same weights.
"""

from __future__ import annotations

import argparse
import hashlib

import keras
import numpy as np
from sklearn.datasets import load_digits

import gradcomp.tf as gc


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--compression", default="quantize:bits=4", help="e.g. none, bf16, topk:density=0.05")
    parser.add_argument(
        "--divide", default="active", choices=["all", "active"], help="means over which ranks"
    )
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch", type=int, default=32, help="samples per rank and step")
    options = parser.parse_args()

    gc.init()
    keras.utils.set_random_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    images = pixels.astype(np.float32) / 16
    weights = np.linspace(1, 3, gc.size())
    ends = [0, *(np.cumsum(weights) / weights.sum() * len(images)).astype(int)]
    own = slice(ends[gc.rank()], ends[gc.rank() + 1])

    layers = [keras.layers.Dense(128, "relu"), keras.layers.BatchNormalization(), keras.layers.Dense(10)]
    model = keras.Sequential([keras.Input([64]), *layers])
    optimizer = gc.DistributedOptimizer(keras.optimizers.AdamW(5e-3), compression=options.compression)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    model.fit(
        images[own],
        labels[own],
        batch_size=options.batch,
        epochs=options.epochs,
        callbacks=[gc.callbacks.Join(options.divide), gc.callbacks.MetricAverage()],
        verbose=2 if gc.rank() == 0 else 0,
    )

    accuracy = model.evaluate(images, labels, verbose=0)[1]
    digest = hashlib.sha256(b"".join(weight.numpy().tobytes() for weight in model.weights)).hexdigest()
    print(f"rank {gc.rank()}: accuracy {accuracy:.4f}, weights {digest[:16]}", flush=True)
    gc.shutdown()


if __name__ == "__main__":
    main()
