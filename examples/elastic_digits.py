"""Train on scikit-learn's digits while ranks die and come.

python -m gradcomp store &
export GRADCOMP_STORE=127.0.0.1:29400 GRADCOMP_MIN_RANKS=2
python examples/elastic_digits.py & python examples/elastic_digits.py & python examples/elastic_digits.py &
"""

from __future__ import annotations

import argparse
import time

import torch
from sklearn.datasets import load_digits

import gradcomp.torch as gc


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument(
        "--pause", type=float, default=0.0, help="seconds between steps, to watch what happens"
    )
    given = parser.parse_args()

    # Load data and build the model first: a newcomer makes the others wait from init() on.
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))

    gc.init()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * gc.size(), momentum=0.9)
    optimizer = gc.DistributedOptimizer(optimizer, model.named_parameters(), compression="topk:density=0.05")
    sampler = gc.elastic.ElasticSampler(images)
    state = gc.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0, batch=0)

    def scale_rate() -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * gc.size()

    state.register_reset_callbacks([scale_rate])

    @gc.elastic.run
    def train(state: gc.elastic.TorchState) -> None:
        print(
            f"rank {gc.rank()} of {gc.size()} trains from epoch {state.epoch}, batch {state.batch}",
            flush=True,
        )
        while state.epoch < given.epochs:
            for batch in torch.utils.data.BatchSampler(sampler, 32, drop_last=False):
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
                optimizer.step()
                sampler.record_batch(state.batch, len(batch))
                state.batch += 1
                if state.batch % 5 == 0:
                    state.commit()
                time.sleep(given.pause)
            state.epoch += 1
            state.batch = 0
            sampler.set_epoch(state.epoch)
            state.commit()

    train(state)
    accuracy = (model(images).argmax(1) == labels).float().mean().item()
    print(f"rank {gc.rank()} of {gc.size()}: accuracy {accuracy:.3f}", flush=True)


if __name__ == "__main__":
    main()
