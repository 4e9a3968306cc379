"""Steps of a few ranks in one process, whose messages are changed, lost, repeated or exchanged on the way.

Or their sender has altered them, before it made their checksum.
"""

from __future__ import annotations

import random
from collections import deque
from functools import cache

import numpy as np
from configurations import ROWS
from fuzz.mutations import mutate
from reduce.schemes import PARTIAL, REDUCTIONS, fits, topologies

from gradcomp import Compressor, GradcompError, LayerSpec, LGreCo, Quantize, Signum
from gradcomp.exchange.fingerprint import Fingerprint
from gradcomp.kernels.devices import HOST
from gradcomp.kernels.reference_headers import FIXED
from gradcomp.reduce.header import MAGIC, ByteHeader, padded
from gradcomp.testing.simulation import Simulation, same_bytes

_SIZES = (1, 33, 100, 300)
_STEPS = 3
_KEPT = 40


@cache
def _compressors() -> list[tuple[str, Compressor]]:
    return [(name, row.compressor) for name, row in ROWS.items()]


class Wire:
    """Changes messages between ranks, one in ``every``, up to ``most``; not what a rank sends to itself."""

    def __init__(self, r: random.Random, every: int, most: int) -> None:
        self._random, self._every, self._left = r, every, most
        self._kept: deque[np.ndarray] = deque(maxlen=_KEPT)
        self._late: np.ndarray | None = None
        self.done: list[str] = []
        #: Messages with headers that arrived as others than were sent.
        self.altered = 0

    def __call__(self, source: int, destination: int, message: np.ndarray) -> np.ndarray:
        if source == destination:
            return message
        original, r = message.copy(), self._random
        if self._late is not None and len(self._late) == len(message):
            message, self._late = self._late, None
        elif self._left and r.randrange(self._every) == 0:
            self._left -= 1
            kind = r.choice(("mutate", "mutate", "mutate", "drop", "replay", "reorder"))
            message = self._change(kind, message)
            self.done.append(f"{kind} {source}->{destination}")
        self._kept.append(original)
        if _has_header(original) and not np.array_equal(message, original):
            self.altered += 1
        return message

    def _change(self, kind: str, message: np.ndarray) -> np.ndarray:
        r = self._random
        if kind == "drop":
            return message[:0]
        if kind == "mutate":
            # A message of another length ends the step at once: mostly, the length stays.
            return mutate(r, message, same_length=r.random() < 0.9)
        earlier = [one for one in self._kept if len(one) == len(message)]
        if not earlier:
            return mutate(r, message, same_length=True)
        if kind == "reorder":
            self._late = message.copy()
        return r.choice(earlier)


class Sender(Wire):
    """What a buggy rank sends: its payloads are altered, and their checksums are right."""

    def _change(self, kind: str, message: np.ndarray) -> np.ndarray:
        changed, at = message.copy(), 0
        while at < len(changed) and _has_header(changed[at:]):
            fixed = changed[at : at + FIXED.itemsize].view(FIXED)[0]
            begin, size = ByteHeader.size(int(fixed["layers"])), int(fixed["payload_bytes"])
            one = changed[at : at + begin + padded(size)]
            at += len(one)
            if size:
                one[begin : begin + size] = mutate(
                    self._random, one[begin : begin + size].copy(), same_length=True
                )
            payload = HOST.kernels.crc32c(one[begin:])
            fixed["checksum"] = HOST.kernels.crc32c(
                one[FIXED.itemsize : begin], HOST.kernels.crc32c(one[:28], payload)
            )
        return changed


def _has_header(message: np.ndarray) -> bool:
    return len(message) >= FIXED.itemsize and int(message[:2].copy().view("<u2")[0]) == MAGIC


def _layer(r: random.Random, name: str) -> LayerSpec:
    shape = (r.choice(_SIZES),) if r.random() < 0.6 else (r.randint(1, 12), r.randint(1, 20))
    return LayerSpec(name, shape, r.choice(("float32", "float32", "float16", "bfloat16")))


#: Of ranks that hold the same parameters.
_ALIKE = Fingerprint(np.ones(1, np.uint32))


def run(seed: int, altered_by_sender: bool = False) -> tuple[int, str]:
    """Steps made with this seed, and what was found: nothing, or a line that says what.

    What changes on the way must be an error in that step. What its sender has altered is a gradient like another where
    all ranks hold the same means; where they do not, all ranks must know it at the end of the next exchange.
    """
    r = random.Random(f"{'sender' if altered_by_sender else 'protocol'} {seed}")
    name, compressor = r.choice(_compressors())
    votes = isinstance(compressor, Signum)  # a majority has no partial sums
    reduction = r.choice([one for one in REDUCTIONS if fits(one, 2) and not (votes and one in PARTIAL)])
    world = r.choice((2, 3, 3, 4))
    layers = [_layer(r, f"layer{i}") for i in range(r.randint(1, 3))]
    wire = (Sender if altered_by_sender else Wire)(r, r.choice((3, 10, 30)), r.choice((1, 1, 2, 5)))
    controlled = isinstance(compressor, Quantize) and isinstance(compressor.bits, int) and r.random() < 0.3
    ranks = Simulation(
        layers, compressor, world, seed=seed, shuffle=r.random() < 0.5, delay=r.choice((0.0, 0.3)),
        tamper=wire, checksums=True, topology=r.choice(topologies(world)), reduction=reduction,
        slice_elements=r.choice((16, 120, 1 << 20)), controller=LGreCo(every_steps=2) if controlled else None,
    )  # fmt: skip
    ranks.fingerprints = [_ALIKE] * world
    where = f"{name} {reduction} world {world} {[layer.shape for layer in layers]}"
    for step in range(_STEPS):
        try:
            errors = ranks.attempt()
        except AssertionError as error:
            return step + 1, f"hang: {where}: {wire.done}: {error}"
        for error in errors:
            if error is not None and not isinstance(error, GradcompError):
                return step + 1, f"untyped: {where}: {wire.done}: {type(error).__name__}: {error}"
        if any(errors):
            return step + 1, ""
        if any(pipeline.fingerprints for pipeline in ranks.pipelines):
            known = all(pipeline.fingerprints for pipeline in ranks.pipelines)
            return step + 1, "" if known else f"some ranks know: {where}: {wire.done}"
        if wire.altered and not altered_by_sender:
            return step + 1, f"accepted: {where}: {wire.done}"
        if found := _differences(ranks):
            if not altered_by_sender:
                return step + 1, f"{found}: {where}: {wire.done}"
            return step + 2, _next_exchange(ranks, f"{found}: {where}: {wire.done}")
        if len({pipeline.commit() for pipeline in ranks.pipelines}) > 1:
            return step + 1, f"ranks disagree whether the step counts: {where}: {wire.done}"
    return _STEPS, ""


def _next_exchange(ranks: Simulation, problem: str) -> str:
    """The problem, unless all ranks know of it after one more exchange, which nobody alters."""
    ranks.world.tamper = None
    for pipeline in ranks.pipelines:
        pipeline.commit()
    errors = ranks.attempt()
    if all(errors) or all(pipeline.fingerprints for pipeline in ranks.pipelines):
        return ""
    return problem


def _differences(ranks: Simulation) -> str:
    first = ranks.ranks[0]
    bad = ranks.pipelines[0].result.nonfinite
    for rank, pipeline in zip(ranks.ranks, ranks.pipelines, strict=True):
        if pipeline.result.nonfinite.tolist() != bad.tolist():
            return "different verdicts"
        for layer in range(len(ranks.layers)):
            mine = rank.outputs.get(layer)
            if bad[layer]:
                continue
            if not same_bytes(mine, first.outputs.get(layer)):
                return "different means"
            if mine is not None and not np.isfinite(mine.astype(np.float32)).all():
                return "a mean that is not finite, and no flag"
    return ""
