"""Measure how many images per second a ResNet trains on, with compressed gradients, on random images.

    torchrun --nproc-per-node=2 examples/synthetic_resnet.py --compression quantize:bits=4
    torchrun --nproc-per-node=2 examples/synthetic_resnet.py --fp16-allreduce

The images are the same in every step, so no time goes into loading data. If no rank waited for
another, N ranks would see N times as many images per second as one.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch import Tensor, nn
from torch.nn import functional

import gradcomp.torch as gc


class Block(nn.Module):
    """Two convolutions, and what goes past them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.convolution1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.convolution2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.past: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.past = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.norm1(self.convolution1(x)))
        return functional.relu(self.norm2(self.convolution2(y)) + self.past(x))


def resnet(width: int, blocks: int, classes: int) -> nn.Module:
    """Four stages of ``blocks`` blocks, each of twice the channels of the one before; 64 and 2 are ResNet-18's."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
    ]
    channels = width
    for stage in range(4):
        for block in range(blocks):
            layers.append(Block(channels, width << stage, 2 if stage > 0 and block == 0 else 1))
            channels = width << stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--compression", default="none", help="e.g. none, bf16, quantize:bits=4, auto")
    parser.add_argument("--fp16-allreduce", action="store_true", help="the same as --compression fp16")
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step")
    parser.add_argument("--image-size", type=int, default=32, help="height and width")
    parser.add_argument("--width", type=int, default=64, help="channels of the first stage")
    parser.add_argument("--blocks", type=int, default=2, help="residual blocks per stage")
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--num-warmup-batches", type=int, default=10, help="batches that do not count")
    parser.add_argument("--num-batches-per-iter", type=int, default=10, help="batches of one measurement")
    parser.add_argument("--num-iters", type=int, default=10, help="measurements")
    parser.add_argument("--no-cuda", action="store_true", help="train on the CPU even if there is a GPU")
    options = parser.parse_args()
    if options.fp16_allreduce:
        options.compression = "fp16"
    return options


def main() -> None:
    options = parse()
    gc.init()
    device = torch.device("cpu")
    if torch.cuda.is_available() and not options.no_cuda:
        torch.cuda.set_device(gc.local_rank())
        device = torch.device("cuda")

    model = resnet(options.width, options.blocks, options.classes).to(device)
    gc.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = gc.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=options.compression
    )
    size = options.image_size
    images = torch.randn(options.batch_size, 3, size, size, device=device)
    targets = torch.randint(options.classes, (options.batch_size,), device=device)

    def train(batches: int) -> float:
        """Seconds that so many steps take."""
        began = time.perf_counter()
        for _ in range(batches):
            optimizer.zero_grad()
            functional.cross_entropy(model(images), targets).backward()
            optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    say = print if gc.rank() == 0 else lambda *_, **__: None
    parameters = sum(parameter.numel() for parameter in model.parameters())
    say(f"ResNet of {parameters:,} parameters on {gc.size()} ranks, {device.type}", flush=True)
    say(f"compression {options.compression}, {options.batch_size} images per rank and step", flush=True)
    train(options.num_warmup_batches)
    rates = []
    for iteration in range(options.num_iters):
        rates.append(options.batch_size * options.num_batches_per_iter / train(options.num_batches_per_iter))
        say(f"iteration {iteration}: {rates[-1]:.1f} images/s on rank 0", flush=True)

    together = gc.allreduce(torch.tensor(rates, dtype=torch.float64), op=gc.Sum).tolist()
    mean, deviation = statistics.mean(together), statistics.pstdev(together)
    say(f"per rank: {mean / gc.size():.1f} +- {deviation / gc.size():.1f} images/s")
    say(f"total of {gc.size()} ranks: {mean:.1f} +- {deviation:.1f} images/s")
    sent = optimizer.statistics()
    say(f"sent: {sent.wire_bytes / max(sent.steps, 1):,.0f} bytes per rank and step, ratio {sent.ratio:.2f}")
    gc.shutdown()


if __name__ == "__main__":
    main()
