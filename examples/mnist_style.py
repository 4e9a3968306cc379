"""Train a classifier of digits, data-parallel, as the MNIST scripts of most frameworks do.

    torchrun --nproc-per-node=2 examples/mnist_style.py --compression quantize:bits=4

The images are scikit-learn's digits, of 8 x 8 pixels, so nothing is downloaded. The learning rate grows with the number
of ranks. Every rank tests its share of the test images, and the figures that rank 0 prints are those of all of them.
"""

from __future__ import annotations

import argparse
import hashlib

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import gradcomp.torch as gc


class Net(nn.Module):
    """Two convolutions and two linear layers, with dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution1 = nn.Conv2d(1, 16, 3, padding=1)
        self.convolution2 = nn.Conv2d(16, 32, 3, padding=1)
        self.hidden = nn.Linear(32 * 2 * 2, 64)
        self.output = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = functional.relu(functional.max_pool2d(self.convolution1(images), 2))
        x = functional.relu(functional.max_pool2d(self.convolution2(x), 2))
        x = functional.dropout(functional.relu(self.hidden(x.flatten(1))), 0.25, self.training)
        return self.output(x)


def load() -> tuple[TensorDataset, TensorDataset]:
    """Training and test images with their labels; the same split on all ranks."""
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    train, test = train_test_split(range(len(labels)), test_size=0.2, stratify=labels, random_state=0)
    targets = torch.tensor(labels)
    return TensorDataset(images[train], targets[train]), TensorDataset(images[test], targets[test])


def train(
    epoch: int, model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader, log_interval: int
) -> None:
    """One pass over this rank's share of the training images."""
    model.train()
    for number, (images, targets) in enumerate(loader):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(images), targets)
        loss.backward()
        optimizer.step()
        if number % log_interval == 0 and gc.rank() == 0:
            print(f"epoch {epoch}, batch {number} of {len(loader)}: loss {loss.item():.4f}", flush=True)


def test(model: nn.Module, data: TensorDataset) -> tuple[float, float]:
    """Mean loss and accuracy over all test images, of which this rank takes every N-th; the same on all ranks."""
    images, targets = (tensor[gc.rank() :: gc.size()] for tensor in data.tensors)
    model.eval()
    with torch.no_grad():
        scores = model(images)
    loss = functional.cross_entropy(scores, targets, reduction="sum").item()
    correct = (scores.argmax(1) == targets).sum().item()
    sums = torch.tensor([loss, correct, len(targets)], dtype=torch.float64)
    loss, correct, count = gc.allreduce(sums, op=gc.Sum, name="test").tolist()
    return loss / count, correct / count


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--compression", default="none", help="e.g. none, fp16, quantize:bits=4")
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.05, help="of one rank; that of N ranks is N times it")
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--log-interval", type=int, default=10, help="batches between two lines")
    parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)
    options = parser.parse_args()

    gc.init()
    torch.manual_seed(options.seed + gc.rank())  # ranks draw other dropouts; they begin with rank 0's weights
    train_data, test_data = load()
    sampler = DistributedSampler(train_data, num_replicas=gc.size(), rank=gc.rank(), seed=options.seed)
    loader = DataLoader(train_data, batch_size=options.batch_size, sampler=sampler)

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr * gc.size(), momentum=options.momentum)
    gc.broadcast_parameters(model.state_dict(), root_rank=0)
    gc.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = gc.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=options.compression,
        gradient_predivide_factor=options.gradient_predivide_factor,
    )
    loss = accuracy = 0.0
    for epoch in range(1, options.epochs + 1):
        sampler.set_epoch(epoch)  # another order in every epoch
        train(epoch, model, optimizer, loader, options.log_interval)
        loss, accuracy = test(model, test_data)
        if gc.rank() == 0:
            print(f"epoch {epoch}: test loss {loss:.4f}, accuracy {accuracy:.4f}", flush=True)

    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    digest = hashlib.sha256(weights).hexdigest()[:16]
    print(f"rank {gc.rank()}: accuracy {accuracy:.4f}, weights {digest}", flush=True)
    gc.shutdown()


if __name__ == "__main__":
    main()
