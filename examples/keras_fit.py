"""Train a classifier of digits by Keras' fit, with the callbacks of a larger job: warm-up, schedule, best model.

    mpiexec -n 2 python examples/keras_fit.py --compression quantize:bits=4

``tf_keras_digits.py`` is the shortest such script. This one has what longer ones need: a pipeline of data with a share
for each rank, a learning rate that follows the number of ranks, metrics that are means over ranks, and a model that
rank 0 saves.
"""

from __future__ import annotations

import argparse
import hashlib
import tempfile
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import gradcomp.tf as gc


def load(batch: int, seed: int) -> tuple[tf.data.Dataset, tf.data.Dataset]:
    """This rank's share of the training and of the test images, of which every rank has as many."""
    pixels, labels = load_digits(return_X_y=True)
    images = pixels.reshape(-1, 8, 8, 1).astype(np.float32) / 16
    train, test = train_test_split(range(len(labels)), test_size=0.2, stratify=labels, random_state=0)

    def share(chosen: list[int]) -> tf.data.Dataset:
        even = chosen[: len(chosen) // gc.size() * gc.size()]
        return tf.data.Dataset.from_tensor_slices((images[even], labels[even])).shard(gc.size(), gc.rank())

    shuffled = share(train).shuffle(len(train), seed=seed, reshuffle_each_iteration=True)
    return shuffled.batch(batch, drop_remainder=True), share(test).batch(batch)


def network() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input([8, 8, 1]),
            keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dropout(0.25),
            keras.layers.Dense(10),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--compression", default="none", help="e.g. none, fp16, quantize:bits=4")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step")
    parser.add_argument("--lr", type=float, default=0.03, help="of one rank; that of N ranks is N times it")
    parser.add_argument("--warmup-epochs", type=int, default=2)
    parser.add_argument(
        "--decay-epoch", type=int, default=5, help="from here on a tenth of the learning rate"
    )
    parser.add_argument("--save", type=Path, help="rank 0 writes the best model here, as a .keras file")
    options = parser.parse_args()

    gc.init()
    keras.utils.set_random_seed(gc.rank())  # ranks draw other dropouts; they begin with rank 0's weights
    train, test = load(options.batch_size, seed=gc.rank())
    rate = options.lr * gc.size()

    model = network()
    optimizer = keras.optimizers.SGD(rate, momentum=0.9)
    optimizer = gc.DistributedOptimizer(optimizer, compression=options.compression)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])

    with tempfile.TemporaryDirectory() as directory:
        best = options.save or Path(directory) / "best.keras"
        callbacks = [
            gc.callbacks.BroadcastGlobalVariables(0),
            gc.callbacks.MetricAverage(),  # before all that look at metrics
            gc.callbacks.LearningRateWarmup(rate, warmup_epochs=options.warmup_epochs),
            gc.callbacks.LearningRateSchedule(rate, 0.1, start_epoch=options.decay_epoch),
        ]
        if gc.rank() == 0:
            callbacks.append(
                keras.callbacks.ModelCheckpoint(best, monitor="val_accuracy", save_best_only=True)
            )
        history = model.fit(
            train,
            validation_data=test,
            epochs=options.epochs,
            shuffle=False,  # the pipeline does it
            callbacks=callbacks,
            verbose=2 if gc.rank() == 0 else 0,
        ).history
        if gc.rank() == 0:
            again = keras.models.load_model(best)  # what was saved needs gradcomp no more
            accuracy = again.evaluate(test, verbose=0)[1]
            print("rates", *(f"{rate:.4f}" for rate in history["learning_rate"]))
            print(f"best model: accuracy {accuracy:.4f} on rank 0's share", flush=True)

    weights = b"".join(weight.numpy().tobytes() for weight in model.trainable_variables)
    digest = hashlib.sha256(weights).hexdigest()[:16]
    print(f"rank {gc.rank()}: accuracy {history['val_accuracy'][-1]:.4f}, weights {digest}", flush=True)
    gc.shutdown()


if __name__ == "__main__":
    main()
