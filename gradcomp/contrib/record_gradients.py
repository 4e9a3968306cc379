"""Implements ``record_gradients``: samples of all ranks' gradients, before compression, in a file on rank 0."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gradcomp.compress.checks import check_flag, check_whole
from gradcomp.contrib.recording import Floats, Kept, Sampling, matching, read, sample, write
from gradcomp.core.errors import ConfigError, PlanMismatchError, StateError, WireFormatError
from gradcomp.core.layers import LayerSpec
from gradcomp.exchange.arrivals import Submission
from gradcomp.exchange.exchanger import Exchanger
from gradcomp.exchange.request_group import Call
from gradcomp.job.all_or_none import together_of
from gradcomp.job.channel import channel_of
from gradcomp.job.launch import Ranks
from gradcomp.job.report import Readers
from gradcomp.kernels.segments import DTYPE_NUMBERS, DTYPES

logger = logging.getLogger("gradcomp")

NAME = "gc.record_gradients"
LIMIT_BYTES = 256 << 20
#: A recording of fewer steps shows nothing about changes over time.
LEAST_STEPS = 4
#: The file is written anew whenever the recording has grown by this factor.
_GROWTH = 1.25


def record_gradients(
    opt: Any,
    path: str | os.PathLike[str],
    *,
    every: int = 50,
    layers: str | Sequence[str] | None = None,
    elements: int = 4096,
    seed: int = 0,
    append: bool = False,
    limit_bytes: int = LIMIT_BYTES,
) -> GradientRecorder:
    """Record some elements of every rank's gradients, as they are before compression, for ``gradcomp mi``.

    In every exchange whose number is a multiple of ``every``, each rank takes the same elements of its own gradients,
    in the form in which they are submitted: summed over passes, with the loss scale, without the residual. Rank 0
    gathers them when the exchange is done. It writes the file anew, in one rename, whenever it has grown by a quarter,
    and at the end: at :meth:`GradientRecorder.close` or ``shutdown()``. Parameters and means stay what they are.

    Collective over the ranks of ``opt``, between two steps; so is each recorded step. Wire: a comparison of calls and 4
    bytes for each recorded element, from every rank to rank 0. State: 4 bytes for each recorded element; the recording
    on rank 0. A layer without a dense gradient in a step is NaN there. ``add_param_group`` ends a recording. A file
    that cannot be written later, because the disk is full, ends the recording with a warning. Source: Abrahamyan et al.
    2021, section III, where gradients are recorded whole.

    Args:
        opt: what ``DistributedOptimizer`` or ``ddp_comm_hook`` returned; a Keras optimizer must be built.
        path: the npz file that rank 0 writes; ``gradcomp.analysis.read`` reads it.
        every: the steps from one recorded step to the next. When the recording would exceed ``limit_bytes``, this
            doubles, and every other recorded step is dropped.
        layers: shell patterns of layer names; None stands for all layers of two and more dimensions.
        elements: the most elements of each layer, drawn from ``seed``.
        seed: determines the recorded positions.
        append: continue a file of the same layers, elements and ranks, and drop from it the steps that this run
            repeats. Without it a file that exists is an error.
        limit_bytes: the most bytes of values, in rank 0's memory and in the file.

    Raises:
        ConfigError: on every rank, for bad arguments, a world of one, and a file that cannot be
            written or continued.
        PlanMismatchError: on every rank, if the ranks differ.
        StateError: on every rank, if ``opt`` is being recorded or a step is open.
    """
    patterns = [layers] if isinstance(layers, str) else layers
    arguments = [f"every={every}", f"layers={patterns}", f"elements={elements}", f"seed={seed}"]
    arguments += [f"append={append}", f"limit_bytes={limit_bytes}"]
    ranks = together_of(NAME, opt, arguments)

    def check() -> tuple[tuple[Exchanger, Sampling, Kept], str]:
        _check(path, every=every, elements=elements, seed=seed, limit_bytes=limit_bytes, append=append)
        exchanger = _exchanger_of(opt)
        sampling = sample(_chosen(exchanger.pipeline.layers, patterns), elements, seed)
        kept = Kept(every, _most_steps(sampling, ranks.size, limit_bytes))
        positions = b"".join(part.tobytes() for part in sampling.positions)
        return (exchanger, sampling, kept), hashlib.sha256(positions).hexdigest()

    (exchanger, sampling, kept), digests = ranks.do("check", check)
    if len(set(digests)) > 1:
        raise PlanMismatchError(f"{NAME}: the ranks drew different positions: use one version of NumPy")

    def begin() -> tuple[Kept, dict[str, Any]]:
        begun = kept
        if ranks.rank == 0:
            begun = _begun(Path(path), sampling, kept, ranks.size, append, exchanger.pipeline.step)
        return begun, {"every": begun.every, "steps": begun.steps}

    kept, told = ranks.do("begin", begin)
    if ranks.rank:
        found, steps = _history(told[0])
        kept = Kept(found, kept.most, steps)
    recorder = GradientRecorder(exchanger, Path(path), sampling, kept, ranks.members)
    exchanger.recorder = recorder
    return recorder


class GradientRecorder:
    """Records gradients until it is closed; :func:`record_gradients` makes it. Usable in a ``with`` statement.

    Implements :class:`gradcomp.exchange.exchanger.Recorder`.
    """

    def __init__(
        self, exchanger: Exchanger, path: Path, sampling: Sampling, kept: Kept, ranks: Ranks
    ) -> None:
        self.path = path
        self._exchanger = exchanger
        self._sampling = sampling
        self._kept = kept
        self._ranks = ranks
        self._lead = exchanger.pipeline.transport.rank == 0
        numbers = {layer.name: i for i, layer in enumerate(exchanger.pipeline.layers)}
        self._places = {numbers[layer.name]: place for place, layer in enumerate(sampling.layers)}
        self._row: Floats | None = None  # this rank's sample, in an exchange that is recorded
        self._step = 0
        self._written = len(kept.steps)
        self._failed = False

    @property
    def steps(self) -> list[int]:
        """Return the numbers of the recorded steps, the same on all ranks."""
        return list(self._kept.steps)

    def begin(self, step: int) -> None:
        self._step = step
        self._row = None
        if self._kept.due(step):
            self._row = np.full(self._sampling.width, np.nan, dtype=np.float32)

    def take(self, submission: Submission) -> None:
        if self._row is None or submission.layer not in self._places:
            return
        place = self._places[submission.layer]
        layer = self._sampling.layers[place]
        dtype = DTYPES[DTYPE_NUMBERS[layer.dtype]]
        values = self._exchanger.device.read(submission.gradient, layer.nbytes, submission.event).view(dtype)
        with np.errstate(over="ignore"):  # a float64 may be out of float32's range
            found = values[self._sampling.positions[place]].astype(np.float32)
        self._row[self._sampling.part(place)] = found

    def end(self) -> None:
        row, self._row = self._row, None
        if row is None:
            return
        rows = self._gather(row)
        if rows is None:
            self._detach()
            return
        self._kept.add(self._step, rows if self._lead else None)
        if self._lead and len(self._kept.steps) >= max(_GROWTH * self._written, self._written + 1):
            self._write()

    def _gather(self, row: Floats) -> Floats | None:
        """Return all ranks' rows on rank 0 and no row on the others, or None if rank 0 has given up."""
        channel = channel_of(self._ranks)
        assert channel is not None, "a world of one records nothing"
        size, own = channel.size, row.nbytes

        def work(numbers: list[int]) -> Floats | None:
            if numbers[0] < 0:
                return None
            if set(numbers) != {own}:
                raise WireFormatError(f"the ranks announced samples of {numbers} bytes")
            to, come = [0] * size, [0] * size
            to[0] = own
            if self._lead:
                come = [own] * size
            found = channel.alltoall(row.view(np.uint8), to, come)
            return found.view(np.float32).reshape(-1, len(row))

        call = Call(NAME, [f"sample of step {self._step}"], -1 if self._failed else own)
        return channel.submit(call, work).result()

    def close(self) -> None:
        """End the recording and write it. Call it on all ranks, between the same two steps; nothing is sent.

        ``shutdown()`` calls it. A file that cannot be written causes a warning.
        """
        self._detach()
        if self._lead and not self._failed and self._written != len(self._kept.steps):
            self._write()

    def _detach(self) -> None:
        if self._exchanger.recorder is self:
            self._exchanger.recorder = None

    def _write(self) -> None:
        kept = self._kept
        try:
            write(self.path, self._sampling, kept.every, len(self._ranks), kept.steps, kept.rows)
            self._written = len(kept.steps)
        except OSError as error:
            self._failed = True
            logger.warning("the recording %s ends here: %s", self.path, error.strerror or error)

    def __enter__(self) -> GradientRecorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# -------------------------------------------------------------------------------- the beginning of a recording


def _check(path: Any, append: Any, **numbers: Any) -> None:
    if not isinstance(path, str | os.PathLike):
        raise ConfigError(f"path must be a path, got {path!r}")
    for name, least in {"every": 1, "elements": 2, "seed": 0, "limit_bytes": 1}.items():
        check_whole(name, numbers[name], least)
    check_flag("append", append)


def _exchanger_of(opt: Any) -> Exchanger:
    if not isinstance(opt, Readers):
        raise ConfigError(
            f"expected what DistributedOptimizer or ddp_comm_hook returned, got {type(opt).__name__}"
        )
    exchanger = opt._exchanger_or_none()
    if exchanger is None:
        raise ConfigError(
            "nothing is exchanged: a world of one rank, or an optimizer that Keras has not built yet"
        )
    if exchanger.is_open:
        raise StateError("a step is open: a recording begins between steps")
    if exchanger.recorder is not None:
        raise StateError("these gradients are being recorded already: close() that recording first")
    return exchanger


def _chosen(layers: Sequence[LayerSpec], patterns: Sequence[str] | None) -> list[LayerSpec]:
    if patterns is None:
        chosen = [layer for layer in layers if len(layer.shape) > 1]
    elif isinstance(patterns, Sequence) and all(isinstance(pattern, str) for pattern in patterns):
        chosen = [layers[i] for i in matching([layer.name for layer in layers], patterns)]
    else:
        raise ConfigError(f"layers must be a shell pattern or several, got {patterns!r}")
    if not any(layer.size > 1 for layer in chosen):
        raise ConfigError("there is no layer to record: name some by layers=")
    return chosen


def _most_steps(sampling: Sampling, ranks: int, limit_bytes: int) -> int:
    step_bytes = 4 * ranks * sampling.width
    if limit_bytes < LEAST_STEPS * step_bytes:
        raise ConfigError(
            f"limit_bytes={limit_bytes} is less than {LEAST_STEPS} steps of {step_bytes} bytes: record fewer "
            "elements or layers"
        )
    return limit_bytes // step_bytes


def _begun(path: Path, sampling: Sampling, empty: Kept, size: int, append: bool, step: int) -> Kept:
    """Return what a recording continues before ``step``, and write it at once, so that a bad path is an error now."""
    kept = empty
    if os.path.lexists(path):
        if not append:
            raise ConfigError(f"{path} exists: append=True goes on with it, or give another path")
        there = read(path)
        if not there.sampling.same_as(sampling) or (len(there.steps) and there.ranks != size):
            raise ConfigError(f"{path} holds other layers, elements or ranks, or was drawn from another seed")
        if there.every % empty.every or (there.every // empty.every).bit_count() != 1:
            raise ConfigError(
                f"{path} has every={there.every}, which is not every={empty.every} times a power of two"
            )
        before = np.flatnonzero(there.steps < step).tolist()
        rows = [there.values[i].copy() for i in before]
        kept = Kept(there.every, empty.most, there.steps[before].tolist(), rows)
    try:
        write(path, sampling, kept.every, size, kept.steps, kept.rows)
    except OSError as error:
        raise ConfigError(f"cannot write the recording {path}: {error.strerror or error}") from error
    return kept


def _history(told: Any) -> tuple[int, list[int]]:
    """Return ``every`` and the steps of the file that rank 0 continues."""
    every, steps = told.get("every"), told.get("steps")
    if (
        type(every) is not int
        or every < 1
        or not isinstance(steps, list)
        or any(type(s) is not int for s in steps)
    ):
        raise WireFormatError(f"{NAME}: rank 0 sent {told!r:.80}")
    return every, steps
