"""What the convergence benchmark trains, seen by one rank."""

from __future__ import annotations

import hashlib
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import languages
import models
from convergence_rows import DIGITS, GPT, LSTM, PAIRS

from gradcomp import Compressor, Filter, Flat, Policy
from gradcomp.compress import at_level
from gradcomp.control.candidates import layer_bytes
from gradcomp.core.scheme import Scheme
from gradcomp.core.topology import Topology

#: Smaller than the LSTM of step.py, so that all runs take minutes.
LSTM_VOCABULARY, LSTM_WIDTH, LSTM_TEST_WORDS = 4_000, 128, 60_000
#: 2.9 M parameters in 12 blocks.
GPT_SHAPE = {"vocabulary": LSTM_VOCABULARY, "width": 128, "layers": 12, "heads": 4, "length": 32}
SMALL = languages.LANGUAGES["small"]
#: gradcomp measures the wire once, after this many steps: those bytes are no step's.
PROBE_STEPS = 50
#: Parts of a run whose bytes are told apart, where it has as many steps.
CURVE = 50


@dataclass(frozen=True)
class Settings:
    """What the runs of a task have in common, but for the compression."""

    digits_epochs: int
    lstm_steps: int  # and the GPTs'
    resnet_epochs: int
    data: str | None
    cifar: str | None
    test_words: int = LSTM_TEST_WORDS  # of the held-out text that language models are tested on


@dataclass
class Job:
    """A model with the batches of one rank, and how its final metric is found."""

    model: Any
    optimizer: Any
    batches: Iterator[tuple[Any, Any]]
    loss: Callable[[Any, Any, Any], Any]
    steps: int
    clip: float | None
    metric: Callable[[], float]


class Watch(Protocol):
    """What sees a run while it trains."""

    def step(self, loss: float, seconds: float, sent: Any) -> None:
        """After a step: this rank's loss before it, how long it took, and the optimizer's statistics."""

    def found(self) -> dict[str, Any]:
        """After the last step: what is added to the run."""


def load(task: str, settings: Settings) -> Any:
    """The task's data."""
    if task == DIGITS:
        return models.load_digits()
    path = Path(settings.data) if settings.data else None
    if task in (LSTM, GPT):
        return models.load_text(path, LSTM_VOCABULARY)
    if task == PAIRS:
        return SMALL.text(path)
    assert settings.cifar is not None, "the task is not chosen without"
    return models.load_cifar(Path(settings.cifar))


def make_job(task: str, settings: Settings, data: Any, seed: int, rank: int, size: int) -> Job:
    """A run's beginning: all parameters and batches follow from seed and rank."""
    import torch

    torch.manual_seed(seed)
    if task in (LSTM, GPT, PAIRS):
        return _text_job(task, settings, seed, rank, data)
    if task == DIGITS:
        return _image_job(models.DigitsCNN(), settings.digits_epochs, 32, seed, rank, size, data)
    model = models.ResNet((3, 3, 3), 16).to(memory_format=torch.channels_last)
    return _image_job(model, settings.resnet_epochs, 64, seed, rank, size, data)


def _image_job(
    model: Any, epochs: int, batch: int, seed: int, rank: int, size: int, data: models.Images
) -> Job:
    import torch
    from torch.nn import functional

    share = len(data.images) // size

    def batches() -> Iterator[tuple[Any, Any]]:
        generator = torch.Generator().manual_seed(seed)
        own = torch.Generator().manual_seed(seed * 1_000_003 + rank)
        while True:
            order = torch.randperm(len(data.images), generator=generator)[: share * size][rank::size]
            for part in order[: share // batch * batch].split(batch):
                yield data.augmented(part, own), data.labels[part]

    def accuracy() -> float:
        model.eval()
        with torch.no_grad():
            found = torch.cat([model(part).argmax(1) for part in data.test_images.split(256)])
        return (found == data.test_labels).float().mean().item()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    steps = epochs * (share // batch)
    return Job(
        model, optimizer, batches(), lambda m, x, y: functional.cross_entropy(m(x), y), steps, None, accuracy
    )


def _text_job(task: str, settings: Settings, seed: int, rank: int, data: models.Text) -> Job:
    import torch

    model: Any
    if task == LSTM:
        model, batch, length, clip = models.WordLSTM(LSTM_VOCABULARY, LSTM_WIDTH), 16, 20, 0.25
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=4.0, momentum=0.9)
    elif task == GPT:
        model, batch, length, clip = models.WordGPT(**GPT_SHAPE), 8, GPT_SHAPE["length"], 1.0
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    else:
        model, batch, length, clip = languages.GPT(SMALL), SMALL.batch, SMALL.length, 1.0
        optimizer = torch.optim.AdamW(model.parameters(), **SMALL.adamw)

    def perplexity() -> float:
        model.eval()
        total, words = 0.0, 0
        with torch.no_grad():
            for tokens, targets in data.test_batches(64, 48 if task == LSTM else length, settings.test_words):
                total += model(tokens, targets).item() * targets.numel()
                words += targets.numel()
        return math.exp(total / words)

    batches = data.batches(rank, batch, length, seed)
    return Job(model, optimizer, batches, lambda m, x, y: m(x, y), settings.lstm_steps, clip, perplexity)


def share_work(job: Job, compressor: Compressor, rate: float) -> None:
    """What the compression does itself, momentum and clipping, is not done once more."""
    for group in job.optimizer.param_groups:
        group["lr"] *= rate
        if compressor.traits.momentum:
            group["momentum"] = 0.0
    if compressor.traits.clip_norm is not None:
        job.clip = None


def held_loss(job: Job) -> Any:
    """The loss of this rank's first batch, which is not trained on."""
    import gradcomp.torch as gc

    inputs, targets = next(job.batches)
    return gc.Sensitivity(job.model, lambda model: job.loss(model, inputs, targets))


def wrap(job: Job, compression: str, rate: float, controller: str, exact: str) -> tuple[Any, Policy]:
    """The job's optimizer, wrapped, and the policy that tells the layers it excludes. Ranks start as rank 0 does."""
    import gradcomp.torch as gc
    from gradcomp.compress.registry import from_string

    compressor = from_string(compression)
    share_work(job, compressor, rate)
    gc.broadcast_parameters(job.model.state_dict(), root_rank=0)
    flat = isinstance(compressor, Flat)
    policy = Policy(compressor, exact=exact, filter=Filter((), 0, 0) if flat else Filter())
    optimizer = gc.DistributedOptimizer(
        job.optimizer,
        named_parameters=job.model.named_parameters(),
        compression=compressor if flat else policy,
        controller=controller or None,
        sensitivity=held_loss(job) if "metric=loss" in controller else None,
        layers=not flat,
    )
    return optimizer, policy


@dataclass
class Steps:
    """What was noted after each step; ``plans``: the step in which each began."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    wire_bytes: list[int] = field(default_factory=list)
    dense_bytes: list[int] = field(default_factory=list)
    plans: list[tuple[int, Any]] = field(default_factory=list)

    def note(self, loss: float, seconds: float, optimizer: Any) -> None:
        plan = optimizer.plan()
        if plan is not None and (not self.plans or self.plans[-1][1] is not plan):
            self.plans.append((len(self.losses) + 1, plan))
        sent = optimizer.statistics()
        self.losses.append(loss)
        self.seconds.append(seconds)
        self.wire_bytes.append(sent.wire_bytes)
        self.dense_bytes.append(sent.dense_bytes)

    def found(self) -> dict[str, Any]:
        """Curves of the whole run; bytes and seconds of a step of the second half, when warm-ups are over."""
        steps = len(self.losses)
        half = steps // 2 if steps <= PROBE_STEPS else max(steps // 2, PROBE_STEPS + 1)
        half = min(half, steps - 1)
        wire, dense = [0, *self.wire_bytes], [0, *self.dense_bytes]
        parts = min(CURVE, steps)
        ends = [(steps * part // parts, steps * (part + 1) // parts) for part in range(parts)]
        return {
            "steps": steps,
            "run_bytes_per_step": wire[-1] / steps,
            "bytes_over_time": [(wire[b] - wire[a]) / (b - a) for a, b in ends],
            "loss_over_time": [statistics.fmean(self.losses[a:b]) for a, b in ends],
            "seconds_over_time": [sum(self.seconds[a:b]) for a, b in ends],
            "bytes_per_step": (wire[-1] - wire[half]) / (steps - half),
            "ratio": (dense[-1] - dense[half]) / (wire[-1] - wire[half]),
            "step_seconds": statistics.median(self.seconds[half:]),
        }


def train(
    job: Job,
    compression: str,
    rate: float = 1.0,
    controller: str = "",
    exact: str = "float32",
    watch: Watch | None = None,
) -> dict[str, Any]:
    """Train to the end.

    ``exact``: how excluded layers travel. A ``flat[...]`` trains under ``layers=False``, which excludes none.
    ``watch`` sees every step; what it found is in the result.
    """
    import torch

    optimizer, policy = wrap(job, compression, rate, controller, exact)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=job.optimizer.param_groups[0]["lr"], total_steps=job.steps, pct_start=0.1,
        cycle_momentum=False,
    )  # fmt: skip
    steps = Steps()
    began = time.perf_counter()
    job.model.train()
    for _, (inputs, targets) in zip(range(job.steps), job.batches, strict=False):
        step_began = time.perf_counter()
        optimizer.zero_grad()
        loss = job.loss(job.model, inputs, targets)
        loss.backward()
        if job.clip is not None:
            torch.nn.utils.clip_grad_norm_(job.model.parameters(), job.clip)
        optimizer.step()
        schedule.step()
        steps.note(loss.item(), time.perf_counter() - step_began, optimizer)
        if watch is not None:
            watch.step(steps.losses[-1], steps.seconds[-1], optimizer.statistics())
    seconds = time.perf_counter() - began
    digest = hashlib.sha256()
    for parameter in job.model.parameters():
        digest.update(parameter.detach().contiguous().numpy().tobytes())
    return {
        **steps.found(),
        **_controlled(optimizer, policy, steps.plans, job.steps, bool(controller)),
        **({} if watch is None else watch.found()),
        "metric": job.metric(),
        "digest": digest.hexdigest(),
        "seconds": seconds,
    }


def _controlled(
    optimizer: Any, policy: Policy, plans: list[tuple[int, Any]], steps: int, chosen: bool
) -> dict[str, Any]:
    """Bytes that one rank sent of layers that are not excluded, by formula; of a controller its plans and its cost."""
    from gradcomp.control.gravac import GraVACRun

    exchanger = optimizer._exchanger_or_none()
    if exchanger is None:
        return {}
    found: dict[str, Any] = {}
    pipeline, running = exchanger.pipeline, exchanger.pipeline.controller
    if not isinstance(running, GraVACRun):
        excluded = policy.excluded(pipeline.layers)
        open_to_choice = [layer for layer in pipeline.layers if layer.name not in excluded]
        found["compressible_bytes_per_step"] = _compressible(
            open_to_choice, plans, steps, pipeline.transport.size
        )
    if not chosen or running is None:
        return found
    found["spent_seconds"] = dict(getattr(running, "spent", {}))
    if isinstance(running, GraVACRun):
        found["factors"] = {f"{factor:g}": count for factor, count in running.steps_by_factor.items()}
        found["fewer_floats"] = running.dense_floats / max(running.floats_sent, 1)
        search = running.search
        for name, values in (("gains", search.gains[0]), ("throughputs", search.throughput[0])):
            by_factor = zip(search.factors, values.tolist(), strict=True)
            found[name] = {f"{factor:g}": value for factor, value in by_factor if not math.isnan(value)}
        plans = plans[-1:]  # they go back and forth
    found["plans"] = [
        [step, [[a.layer, a.compressor, a.level] for a in plan.assignments]] for step, plan in plans
    ]
    found["buckets"] = [[names, size] for names, size in optimizer.buckets()]
    return found


def _compressible(layers: Any, plans: list[tuple[int, Any]], steps: int, world: int) -> float:
    """Bytes that one rank sends in the mean step for these layers, without headers. The first plan begins the run."""
    ends = [min(step, steps) for step, _ in plans[1:]] + [steps]
    total, begin = 0.0, 0
    for (_, plan), end in zip(plans, ends, strict=True):
        rows = [plan.by_layer[layer.name] for layer in layers]
        total += (end - begin) * sum(
            layer_bytes(at_level(row.compressor, row.level), layer, Scheme("sra"), Topology.one_host(world))
            for row, layer in zip(rows, layers, strict=True)
        )
        begin = end
    return total / max(steps, 1)
