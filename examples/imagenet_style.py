"""Train a small ResNet, data-parallel, as ImageNet scripts do: warm-up, steps of the rate, accumulation, resume.

    torchrun --nproc-per-node=2 examples/imagenet_style.py --data cifar10.npz --checkpoint checkpoint

The file has ``x_train``, ``y_train``, ``x_test`` and ``y_test``: images as uint8 (count, height, width, 3), and labels.
Without one, images are drawn: noise over a pattern for each class. A second run of the command goes on after the last
epoch that was saved. It ends with the weights, bit for bit on CPUs, of a run that nothing has stopped.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import gradcomp.torch as gc

Data = tuple[Tensor, Tensor]  # images as uint8 (count, 3, height, width), and labels
Norm = Callable[[int], nn.Module]


class Block(nn.Module):
    """Two convolutions, and what goes past them."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.convolution1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = norm(outputs)
        self.convolution2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = norm(outputs)
        self.past: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.past = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), norm(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.norm1(self.convolution1(x)))
        return functional.relu(self.norm2(self.convolution2(y)) + self.past(x))


def resnet(width: int, blocks: int, classes: int, norm: Norm) -> nn.Module:
    """Three stages of ``blocks`` blocks, each of twice the channels of the one before."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1, bias=False), norm(width), nn.ReLU()]
    channels = width
    for stage in range(3):
        for block in range(blocks):
            stride = 2 if stage > 0 and block == 0 else 1
            layers.append(Block(channels, width << stage, stride, norm))
            channels = width << stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


# --- data ---------------------------------------------------------------------------------------------------


def load(path: Path | None) -> tuple[Data, Data]:
    """Training and test images; the same on all ranks."""
    if path is None:
        return synthetic()
    with np.load(path) as file:
        arrays = {name: torch.from_numpy(file[name]) for name in ("x_train", "y_train", "x_test", "y_test")}
    train = arrays["x_train"].permute(0, 3, 1, 2), arrays["y_train"].long()
    return train, (arrays["x_test"].permute(0, 3, 1, 2), arrays["y_test"].long())


def synthetic(count: int = 1024, tests: int = 256, classes: int = 10, size: int = 16) -> tuple[Data, Data]:
    """Noise over one pattern for each class."""
    draw = torch.Generator().manual_seed(0)
    patterns = torch.randn(classes, 3, size, size, generator=draw)
    labels = torch.randint(classes, (count + tests,), generator=draw)
    noise = torch.randn(count + tests, 3, size, size, generator=draw)
    images = (128 + 32 * (patterns[labels] + 1.5 * noise)).clamp(0, 255).byte()
    return (images[:count], labels[:count]), (images[count:], labels[count:])


def scaled(images: Tensor) -> Tensor:
    """uint8 to about -2 to 2."""
    return (images.float() - 128) / 64


def batches(data: Data, batch: int, epoch: int, seed: int) -> Iterator[Data]:
    """This rank's share of an epoch, half of the images mirrored; it depends on the epoch and the rank alone."""
    images, labels = data
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1000 * seed + epoch))
    own = order[: len(order) // gc.size() * gc.size()][gc.rank() :: gc.size()]
    draw = torch.Generator().manual_seed((1000 * seed + epoch) * gc.size() + gc.rank())
    for part in own[: len(own) // batch * batch].split(batch):
        mirrored = torch.rand(len(part), 1, 1, 1, generator=draw) < 0.5
        yield torch.where(mirrored, images[part].flip(3), images[part]), labels[part]


# --- training -----------------------------------------------------------------------------------------------


class Metrics:
    """Mean loss and accuracy over the images of all ranks."""

    def __init__(self) -> None:
        self.sums = torch.zeros(3, dtype=torch.float64)

    def add(self, scores: Tensor, labels: Tensor) -> None:
        loss = functional.cross_entropy(scores, labels, reduction="sum")
        correct = (scores.argmax(1) == labels).sum()
        self.sums += torch.tensor([loss.item(), correct.item(), len(labels)], dtype=torch.float64)

    def mean(self) -> tuple[float, float]:
        """Collective: all ranks call it, and all get the same."""
        loss, correct, count = gc.allreduce(self.sums, op=gc.Sum).tolist()
        return loss / count, correct / count


def rate(options: argparse.Namespace, epoch: float) -> float:
    """The learning rate at an epoch with a fraction.

    That of one rank and one batch, times the batches of a step; reached from below during the warm-up, and divided by
    10 at every epoch of ``--decay-epochs``.
    """
    together = gc.size() * options.batches_per_allreduce
    if epoch < options.warmup_epochs:
        return options.base_lr * (1 + (together - 1) * epoch / options.warmup_epochs)
    return options.base_lr * together * 0.1 ** sum(epoch >= start for start in options.decay_epochs)


def train(
    options: argparse.Namespace,
    epoch: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Data,
    device: torch.device,
) -> tuple[float, float]:
    """One epoch, whose gradients are exchanged once for every ``--batches-per-allreduce`` batches."""
    model.train()
    metrics = Metrics()
    accumulated = options.batches_per_allreduce
    step_images = options.batch_size * accumulated
    steps = len(data[1]) // gc.size() // step_images
    for step, (images, labels) in enumerate(batches(data, step_images, epoch, options.seed)):
        for group in optimizer.param_groups:
            group["lr"] = rate(options, epoch + step / steps)
        optimizer.zero_grad()
        inputs, targets = scaled(images.to(device)), labels.to(device)
        for part in range(0, step_images, options.batch_size):
            some = slice(part, part + options.batch_size)
            scores = model(inputs[some])
            (functional.cross_entropy(scores, targets[some]) / accumulated).backward()
            metrics.add(scores.detach(), targets[some])
        optimizer.step()
    return metrics.mean()


def validate(model: nn.Module, data: Data, batch: int, device: torch.device) -> tuple[float, float]:
    """Loss and accuracy over all test images, of which this rank takes every N-th."""
    model.eval()
    metrics = Metrics()
    images, labels = (tensor[gc.rank() :: gc.size()] for tensor in data)
    with torch.no_grad():
        for part in range(0, len(labels), batch):
            inputs, targets = images[part : part + batch].to(device), labels[part : part + batch].to(device)
            metrics.add(model(scaled(inputs)), targets)
    return metrics.mean()


def average_buffers(model: nn.Module) -> None:
    """Give all ranks the same running statistics: those of BatchNorm are of a rank's own batches."""
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point():
            gc.allreduce_(buffer, name=name)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="an .npz file; without it, images are drawn")
    parser.add_argument("--checkpoint", type=Path, help="directory to save to, and to resume from")
    parser.add_argument("--compression", default="quantize:bits=4", help="e.g. none, fp16, topk:density=0.01")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and backward pass")
    parser.add_argument("--batches-per-allreduce", type=int, default=1, help="backward passes of a step")
    parser.add_argument("--base-lr", type=float, default=0.02, help="of one rank and one batch in a step")
    parser.add_argument("--warmup-epochs", type=float, default=2)
    parser.add_argument("--decay-epochs", type=float, nargs="*", default=[6, 10])
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--weight-decay", type=float, default=1e-4)
    parser.add_argument(
        "--sync-batch-norm", action="store_true", help="normalise over the batches of all ranks"
    )
    parser.add_argument("--width", type=int, default=16, help="channels of the first stage")
    parser.add_argument("--blocks", type=int, default=1, help="residual blocks per stage")
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args()


def main() -> None:
    options = parse()
    gc.init()
    torch.manual_seed(options.seed)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        torch.cuda.set_device(gc.local_rank())
        device = torch.device("cuda")

    train_data, test_data = load(options.data)
    classes = int(train_data[1].max()) + 1
    norm: Norm = gc.SyncBatchNorm if options.sync_batch_norm else nn.BatchNorm2d
    model = resnet(options.width, options.blocks, classes, norm).to(device)
    gc.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=options.base_lr, momentum=options.momentum, weight_decay=options.weight_decay
    )
    optimizer = gc.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=options.compression,
        backward_passes_per_step=options.batches_per_allreduce,
    )
    start, accuracy = 0, 0.0
    if options.checkpoint is not None:
        saved = gc.load(options.checkpoint, optimizer, model=model, missing_ok=True)
        if saved is not None:
            start, accuracy = saved["epochs"], saved["accuracy"]
    for epoch in range(start, options.epochs):
        loss, seen = train(options, epoch, model, optimizer, train_data, device)
        average_buffers(model)
        test_loss, accuracy = validate(model, test_data, options.batch_size, device)
        if gc.rank() == 0:
            print(
                f"epoch {epoch + 1}: rate {optimizer.param_groups[0]['lr']:.4f}, loss {loss:.4f}, "
                f"accuracy {seen:.4f}, test loss {test_loss:.4f}, test accuracy {accuracy:.4f}",
                flush=True,
            )
        if options.checkpoint is not None:
            extra = {"epochs": epoch + 1, "accuracy": accuracy}
            gc.save(options.checkpoint, optimizer, model=model, extra=extra)

    state = b"".join(tensor.cpu().numpy().tobytes() for tensor in model.state_dict().values())
    digest = hashlib.sha256(state).hexdigest()[:16]
    print(f"rank {gc.rank()}: accuracy {accuracy:.4f}, weights {digest}", flush=True)
    gc.shutdown()


if __name__ == "__main__":
    main()
