"""Train an LSTM to continue Python source, by characters, at levels that L-GreCo chooses.

    mpiexec -n 2 python examples/tf_text.py

or under torchrun, or alone. The text is that of the standard library. Gradients travel at 4 bits; every ``--every``
steps the controller gives each layer the bits that it needs.
"""

from __future__ import annotations

import argparse
import hashlib
import sysconfig
from pathlib import Path

import keras
import numpy as np

import gradcomp.tf as gc

LENGTH = 32
CHARACTERS = 128


def load() -> np.ndarray:
    """The modules of the standard library that lie side by side, as character codes."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = "".join(path.read_text(encoding="utf-8", errors="ignore") for path in paths)
    return np.frombuffer(text.encode("ascii", errors="ignore"), np.uint8).astype(np.int32)


def windows(text: np.ndarray, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Pieces of the text, and the same one character further."""
    starts = np.random.default_rng(seed).integers(len(text) - LENGTH, size=(count, 1))
    pieces = text[starts + np.arange(LENGTH + 1)]
    return pieces[:, :-1], pieces[:, 1:]


def network() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input([LENGTH], dtype="int32"),
            keras.layers.Embedding(CHARACTERS, 32),
            keras.layers.LSTM(96, return_sequences=True),
            keras.layers.Dense(CHARACTERS),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--compression", default="quantize:bits=4,bucket_size=128")
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--batch", type=int, default=32, help="pieces per rank and step")
    parser.add_argument("--every", type=int, default=40, help="steps between two decisions")
    options = parser.parse_args()

    gc.init()
    keras.utils.set_random_seed(0)
    text = load()
    border = len(text) * 9 // 10
    inputs, targets = windows(text[:border], options.steps * options.batch, seed=1 + gc.rank())
    test_inputs, test_targets = windows(text[border:], 256, seed=0)

    model = network()
    optimizer = gc.DistributedOptimizer(
        keras.optimizers.Adam(0.01, clipnorm=1.0),
        compression=options.compression,
        sparse_as_dense=True,  # the embedding's gradient has few rows, but it is small
        controller=gc.LGreCo(every_steps=options.every),
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss)
    model.fit(
        inputs,
        targets,
        batch_size=options.batch,
        callbacks=[
            gc.callbacks.BroadcastGlobalVariables(0),
            gc.callbacks.Progress(every_steps=options.every),
        ],
        verbose=0,
    )

    bits = model.evaluate(test_inputs, test_targets, verbose=0) / np.log(2)
    digest = hashlib.sha256(b"".join(weight.numpy().tobytes() for weight in model.weights)).hexdigest()
    print(f"rank {gc.rank()}: {bits:.3f} bits a character, weights {digest[:16]}", flush=True)
    gc.shutdown()


if __name__ == "__main__":
    main()
