"""Train on scikit-learn's digits where ranks have unequal numbers of samples, so that some run out of batches first.

    torchrun --nproc-per-node=2 examples/uneven.py --compression topk:density=0.05

The last rank has three times as many samples as the first one. Nothing is dropped or repeated: ranks that are out of
data stand in for the others' steps, and all ranks end with the same model, optimizer and scheduler.
"""

from __future__ import annotations

import argparse
import hashlib

import torch
from sklearn.datasets import load_digits
from torch.nn import functional

import gradcomp.torch as gc


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--compression", default="quantize:bits=4", help="e.g. none, bf16, topk:density=0.05")
    parser.add_argument(
        "--divide", default="active", choices=["all", "active"], help="means over which ranks"
    )
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch", type=int, default=32, help="samples per rank and step")
    options = parser.parse_args()

    gc.init()
    torch.manual_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    images, targets = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels)
    shares = torch.linspace(1, 3, gc.size()).cumsum(0) / torch.linspace(1, 3, gc.size()).sum()
    ends = [0, *(shares * len(images)).round().long().tolist()]
    own = torch.arange(ends[gc.rank()], ends[gc.rank() + 1])

    model = torch.nn.Sequential(
        torch.nn.Linear(64, 128), torch.nn.BatchNorm1d(128), torch.nn.ReLU(), torch.nn.Linear(128, 10)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    optimizer = gc.DistributedOptimizer(optimizer, model.named_parameters(), options.compression)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.99)
    for epoch in range(options.epochs):
        order = own[torch.randperm(len(own), generator=torch.Generator().manual_seed(epoch))]
        with gc.join(optimizer, scheduler, model=model, divide=options.divide):
            for part in order.tensor_split(-(-len(order) // options.batch)):
                optimizer.zero_grad()
                functional.cross_entropy(model(images[part]), targets[part]).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()

    model.eval()
    accuracy = (model(images).argmax(1) == targets).float().mean()
    digest = hashlib.sha256(b"".join(v.numpy().tobytes() for v in model.state_dict().values())).hexdigest()
    print(f"rank {gc.rank()}: accuracy {accuracy:.4f}, weights {digest[:16]}", flush=True)
    gc.shutdown()


if __name__ == "__main__":
    main()
