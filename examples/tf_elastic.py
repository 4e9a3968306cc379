"""Train on scikit-learn's digits by Keras' fit while ranks die and come.

python -m gradcomp store &
export GRADCOMP_STORE=127.0.0.1:29400 GRADCOMP_MIN_RANKS=2
python examples/tf_elastic.py & python examples/tf_elastic.py & python examples/tf_elastic.py &
"""

from __future__ import annotations

import argparse
import time

import keras
import numpy as np
from sklearn.datasets import load_digits

import gradcomp.tf as gc

BATCH = 32


class Record(keras.callbacks.Callback):
    """Tells the sampler which samples are processed."""

    def __init__(self, sampler: gc.elastic.ElasticSampler, pause: float) -> None:
        super().__init__()
        self.sampler, self.pause = sampler, pause

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        self.sampler.record_batch(batch, BATCH)
        time.sleep(self.pause)

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        self.sampler.set_epoch(epoch + 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument(
        "--pause", type=float, default=0.0, help="seconds between steps, to watch what happens"
    )
    given = parser.parse_args()

    # Load data and build the model first: a newcomer makes the others wait from init() on.
    pixels, labels = load_digits(return_X_y=True)
    images = pixels.astype(np.float32) / 16
    model = keras.Sequential([keras.Input([64]), keras.layers.Dense(128, "relu"), keras.layers.Dense(10)])

    gc.init()
    optimizer = gc.DistributedOptimizer(
        keras.optimizers.SGD(0.05 * gc.size(), momentum=0.9), compression="topk:density=0.05"
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    sampler = gc.elastic.ElasticSampler(images)
    state = gc.elastic.KerasState(model, sampler=sampler, epoch=0)

    def scale_rate() -> None:
        optimizer.learning_rate = 0.05 * gc.size()

    state.register_reset_callbacks([scale_rate])

    @gc.elastic.run
    def train(state: gc.elastic.KerasState) -> None:
        print(
            f"rank {gc.rank()} of {gc.size()} trains from epoch {state.epoch}, "
            f"sample {sampler.processed_num}",
            flush=True,
        )
        while state.epoch < given.epochs:
            own = list(sampler)
            model.fit(
                images[own],
                labels[own],
                batch_size=BATCH,
                shuffle=False,  # the sampler has shuffled
                initial_epoch=state.epoch,
                epochs=state.epoch + 1,
                callbacks=[
                    Record(sampler, given.pause),
                    gc.elastic.UpdateEpochStateCallback(state),
                    gc.elastic.CommitStateCallback(state, batches_per_commit=5),
                ],
                verbose=0,
            )

    train(state)
    accuracy = model.evaluate(images, labels, verbose=0)[1]
    print(f"rank {gc.rank()} of {gc.size()}: accuracy {accuracy:.3f}", flush=True)


if __name__ == "__main__":
    main()
