"""What the benchmark of learned compression writes down of a run: losses, and bytes and time by phase."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any

from convergence_tasks import Job
from learned_codes import losses
from learned_rows import EXACT_STEPS, NETS_EVERY, TRAIN_STEPS

from gradcomp.compress.identity import Identity
from gradcomp.compress.messages import Broadcast, Gather, Reduce, Sum
from gradcomp.compress.registry import registered
from gradcomp.compress.wrappers.base import Wrapper
from gradcomp.contrib.lgc.autoencoder import Autoencoder
from gradcomp.contrib.lgc.server import Decoders

PHASES = ("exact", "values", "codes")
_ENDS = (EXACT_STEPS, EXACT_STEPS + TRAIN_STEPS)
#: Points of a loss curve, and how often the metric is found.
POINTS, TESTS = 100, 12


def phase_of(step: int) -> int:
    """Of a step, counted from 0."""
    return sum(step >= end for end in _ENDS)


@dataclass
class Handed:
    """Bytes that compressors of lossy layers handed over in a phase, before any reduction multiplies them.

    By message of an exchange, in its order: every step's, and those that this rank broadcast. ``led``: how many
    broadcasts it was the root of.
    """

    every: dict[str, int] = field(default_factory=dict)
    root: dict[str, int] = field(default_factory=dict)
    led: dict[str, int] = field(default_factory=dict)

    def add(self, key: str, size: int, root: bool) -> None:
        place = self.root if root else self.every
        place[key] = place.get(key, 0) + size
        if root:
            self.led[key] = self.led.get(key, 0) + 1


class Watch:
    """Sees one run on one rank."""

    def __init__(self, job: Job, rank: int) -> None:
        self._job, self._rank = job, rank
        self._every = max(job.steps // TESTS, 1)
        self._losses: list[float] = []
        self._seconds: list[float] = []
        self._wire: list[int] = []
        self._metrics: list[tuple[int, float]] = []
        self._handed = [Handed() for _ in PHASES]
        self._nets: list[float] = []
        self._plain: list[dict[str, float]] = []
        _watch_messages(self._note)
        _watch_training(self._nets, self._plain)

    def _note(self, key: str, size: int, root: int | None) -> None:
        """The engine thread works on the step that is next to be counted."""
        if root is None or root == self._rank:
            self._handed[phase_of(len(self._losses))].add(key, size, root is not None)

    def step(self, loss: float, seconds: float, sent: Any) -> None:
        """After a step; the metric is found between steps, which nobody times."""
        self._losses.append(loss)
        self._seconds.append(seconds)
        self._wire.append(sent.wire_bytes)
        if len(self._losses) % self._every == 0:
            self._metrics.append((len(self._losses), self._job.metric()))
            self._job.model.train()

    def found(self) -> dict[str, Any]:
        """Of the whole run."""
        steps = len(self._losses)
        phases = []
        for number, name in enumerate(PHASES):
            own = [step for step in range(steps) if phase_of(step) == number]
            if own:
                before = self._wire[own[0] - 1] if own[0] else 0
                handed = self._handed[number]
                phases.append(
                    {
                        "phase": name,
                        "steps": len(own),
                        "wire_bytes": self._wire[own[-1]] - before,
                        "step_seconds": statistics.median(self._seconds[step] for step in own),
                        "every_step": {key: size / len(own) for key, size in handed.every.items()},
                        "as_root": {key: size / handed.led[key] for key, size in handed.root.items()},
                    }
                )
        ends = [steps * part // POINTS for part in range(POINTS + 1)]
        return {
            "phases": phases,
            "loss_curve": [
                [b, statistics.fmean(self._losses[a:b])] for a, b in itertools.pairwise(ends) if b > a
            ],
            "metric_curve": self._metrics,
            "parameters": sum(p.numel() for p in self._job.model.parameters()),
            "nets_loss": [
                round(statistics.fmean(self._nets[end - NETS_EVERY : end]), 4)
                for end in range(NETS_EVERY, len(self._nets) + 1, NETS_EVERY)
            ],
            "plain_loss": {
                row: statistics.fmean(found[row] for found in self._plain)
                for row in next(iter(self._plain), {})
            },
        }


_originals: dict[type, Any] = {}


def _watch_messages(note: Callable[[str, int, int | None], None]) -> None:
    """From now on tell ``note`` of every message of every compressor that loses something."""
    for cls in {base for known in registered().values() for base in known.__mro__}:
        if "exchange" in cls.__dict__ and not issubclass(cls, Wrapper | Identity):
            original = _originals.setdefault(cls, cls.__dict__["exchange"])
            if not getattr(original, "__isabstractmethod__", False):
                cls.exchange = _watched(original, note)  # type: ignore[attr-defined]


def _watched(original: Any, note: Callable[[str, int, int | None], None]) -> Any:
    @wraps(original)
    def exchange(self: Any, group: Any, context: Any) -> Any:
        work, reply, number = original(self, group, context), None, 0
        while True:
            try:
                message = work.send(reply)
            except StopIteration as end:
                return end.value
            reply = yield _counted(message, f"{type(self).name} {number} ", note)
            number += 1

    return exchange


def _counted(message: Any, key: str, note: Callable[[str, int, int | None], None]) -> Any:
    key += type(message).__name__.lower()
    if isinstance(message, Sum):
        note(key, message.length * (8 if message.dtype == "float64" else 4), None)
        return message
    if isinstance(message, Reduce):
        return message
    root = message.root if isinstance(message, Broadcast) else None
    assert isinstance(message, Gather | Broadcast)
    write = message.write

    def counted(view: Any) -> Any:
        flags, used = write(view)
        note(key, used, root)
        return flags, used

    return replace(message, write=counted)


def _watch_training(nets: list[float], plain: list[dict[str, float]]) -> None:
    """From now on append the nets' loss in every step of their training; that of plain codes in one of NETS_EVERY."""
    for cls in (Autoencoder, Decoders):
        train = _originals.setdefault(cls, cls.train)
        setattr(cls, "train", _watched_training(train, nets, plain))  # noqa: B010 - a method of a class that is typed


def _watched_training(train: Any, nets: list[float], plain: list[dict[str, float]]) -> Any:
    @wraps(train)
    def watched(self: Any, weights: Any, samples: Any, *arguments: Any) -> Any:
        if len(nets) % NETS_EVERY == 0:
            plain.append(losses(samples))
        found = train(self, weights, samples, *arguments)
        nets.append(float(found[-1]))
        return found

    return watched
