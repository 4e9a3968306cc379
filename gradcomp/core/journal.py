"""The run log: JSON lines about plans, steps and layers. ``docs/run-log.md`` describes the format.

Rank 0 appends while a run goes on, so a file may end in the middle of a line, and a resumed run adds to the same file.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from io import SEEK_END
from pathlib import Path
from reprlib import repr as shortened
from typing import Any, BinaryIO

from gradcomp.core.errors import ConfigError
from gradcomp.core.layers import LayerSpec, check_unique
from gradcomp.core.plan import Plan, histogram
from gradcomp.core.run_lines import (
    LIMIT,
    Gains,
    Line,
    Record,
    Sample,
    Window,
    count,
    is_count,
    number,
    rows,
    text,
    whole,
)
from gradcomp.version import __version__

__all__ = ["Journal", "Logged", "Run", "histogram", "read"]

logger = logging.getLogger("gradcomp")

FORMAT = 1


class Journal:
    """Appends lines to a run log, from any thread; each line is written out at once.

    Raises ConfigError if the file cannot be opened. If a line cannot be written later (a full disk), a warning is
    logged and the log ends, but not the training.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = path
        self._lock = threading.Lock()
        try:
            self._file: BinaryIO | None = Path(path).open("a+b")  # noqa: SIM115 - closed by close()
            self._cut = _ends_within_a_line(self._file)
        except OSError as error:
            raise ConfigError(f"cannot append to the run log {path}: {error.strerror or error}") from error

    def run(self, world: int, controller: str, compression: str, layers: Sequence[LayerSpec]) -> None:
        """Begins a run: until the next call, lines are about ``world`` ranks and these layers."""
        rows = [[layer.name, list(layer.shape), layer.dtype] for layer in layers]
        about = {"format": FORMAT, "version": __version__, "world": int(world)}
        self._write("run", **about, controller=controller, compression=compression, layers=rows)

    def plan(self, step: int, plan: Plan, layer_bytes: Sequence[float]) -> None:
        """Logs a plan that takes effect at ``step``.

        One rank sends ``layer_bytes`` a step under it, by formula; they are in the order of the run's layers.
        """
        rows = [[a.layer, a.compressor, a.level] for a in plan.assignments]
        about = {"step": int(step), "version": plan.version, "assignments": rows}
        by_layer = [round(one) for one in layer_bytes]
        self._write("plan", **about, predicted_bytes=round(sum(layer_bytes)), layer_bytes=by_layer)

    def measured(self, step: int, version: int, steps: int, measured_bytes: float) -> None:
        """Logs the mean of the bytes that this rank sent in each of the ``steps`` steps under plan ``version``.

        Nothing is logged if there were no steps.
        """
        if steps > 0:
            about = {"step": int(step), "version": int(version), "steps": int(steps)}
            self._write("bytes", **about, measured_bytes=float(measured_bytes))

    def choice(self, step: int, text: str) -> None:
        """Logs why a controller decided as it did, in one line."""
        self._write("choice", step=int(step), text=text)

    def line(self, line: Line) -> None:
        """Logs a window of steps, a layer's sample, or GraVAC's gains."""
        self._write(line.KIND, **line.record())

    def close(self) -> None:
        """Closes the file; later lines are dropped. May be called again."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._file is not None:
            with suppress(OSError):  # a failed write has been warned about already
                self._file.close()
            self._file = None

    def _write(self, kind: str, **values: Any) -> None:
        line = json.dumps({"kind": kind, **values}, separators=(",", ":"), allow_nan=False) + "\n"
        with self._lock:
            if self._file is None:
                return
            try:
                self._file.write(("\n" if self._cut else "").encode() + line.encode())
                self._file.flush()
                self._cut = False
            except OSError as error:
                logger.warning("the run log %s ends here: %s", self._path, error.strerror or error)
                self._close()


def _ends_within_a_line(file: BinaryIO) -> bool:
    """Returns true if the previous run was killed while it wrote its last line."""
    if file.seek(0, SEEK_END) == 0:
        return False
    file.seek(-1, SEEK_END)
    return file.read(1) != b"\n"


# ------------------------------------------------------------------------------------------ reading


@dataclass(frozen=True)
class Logged:
    """One plan of a run: used from ``step`` on, with the bytes that one rank sends per step, if they were measured.

    ``layer_bytes`` are the predicted ones by layer, in the order of the run's layers; None in older logs.
    """

    step: int
    plan: Plan
    predicted_bytes: int
    measured_bytes: float | None = None
    measured_steps: int = 0
    layer_bytes: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Run:
    """One run of a log; ``choices`` are (step, text)."""

    version: str
    world: int
    controller: str
    compression: str
    layers: tuple[LayerSpec, ...]
    plans: tuple[Logged, ...] = ()
    choices: tuple[tuple[int, str], ...] = ()
    windows: tuple[Window, ...] = ()
    samples: tuple[Sample, ...] = ()
    gains: tuple[Gains, ...] = ()

    @property
    def dense_bytes(self) -> int:
        """Returns the bytes that one rank would send uncompressed in a step: 2 d (N-1) / N for d bytes of gradient."""
        return 2 * sum(layer.nbytes for layer in self.layers) * (self.world - 1) // self.world

    def ratio(self, sent_bytes: float) -> float | None:
        """Returns the uncompressed bytes divided by these; None if nothing is sent either way."""
        return self.dense_bytes / sent_bytes if sent_bytes and self.dense_bytes else None

    def in_force(self, step: int | None = None) -> Logged | None:
        """Returns the plan of a step, or the last one; None before the first."""
        begun = [logged for logged in self.plans if step is None or logged.step <= step]
        return begun[-1] if begun else None


def read(path: str | os.PathLike[str]) -> list[Run]:
    """Returns the runs of a log, in order.

    Lines of unknown kinds are skipped, as is a line that a killed run did not finish: the last one, or the one before
    a run begins. Raises ConfigError, with the line number, for anything else that the format does not allow.
    """
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(f"cannot read the run log {path}: {error.strerror or error}") from error
    runs: list[_Read] = []
    rest = lines.pop()  # after the last newline: nothing, or an unfinished line
    records = [_parse(line) for line in lines] + ([_parse(rest)] if rest else [])
    for place, record in enumerate(records, 1):
        try:
            following = [one for one in records[place : place + 1] if isinstance(one, dict)]
            unfinished = place > len(lines) or any(one.get("kind") == "run" for one in following)
            if record is not None or not unfinished:
                _take(runs, record)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}, line {place}: {error}") from error
    return [run.complete() for run in runs]


def read_run(path: str | os.PathLike[str], number: int | None = None) -> tuple[Run, int, int]:
    """Returns the run of this number in a log, from 1, or the last one; its number; and the number of runs.

    Raises ConfigError as :func:`read` does, and if there is no such run.
    """
    runs = read(path)
    number = len(runs) if number is None else number
    if not runs:
        raise ConfigError(f"{path}: no run in this file")
    if not 1 <= number <= len(runs):
        raise ConfigError(f"{path}: no run {number}; there are runs 1 to {len(runs)}")
    return runs[number - 1], number, len(runs)


def _parse(line: bytes) -> Any:
    """Returns the value of a line; None if it is not JSON (or is null, which no line may be either)."""
    try:
        return json.loads(line.decode())
    except (ValueError, RecursionError):
        return None


class _Read:
    """A run that is being read; lines are added to lists, since a log may have many."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.plans: list[Logged] = []
        self.choices: list[tuple[int, str]] = []
        self.lines: dict[str, list[Any]] = {kind: [] for kind in _LINES}

    def complete(self) -> Run:
        windows, samples, gains = map(tuple, self.lines.values())
        plans, choices = tuple(self.plans), tuple(self.choices)
        return replace(self.run, plans=plans, choices=choices, windows=windows, samples=samples, gains=gains)


def _take(runs: list[_Read], record: Any) -> None:
    """Adds one line to the runs; raises ValueError that says what is wrong with it."""
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    kind = text(record, "kind")
    if kind == "run":
        runs.append(_Read(_run(record)))
    elif kind in _ADD or kind in _LINES:
        if not runs:
            raise ValueError(f"a line of kind {kind!r} comes before the first line of kind 'run'")
        read = runs[-1]
        if kind in _ADD:
            _ADD[kind](read, record)
        else:
            read.lines[kind].append(_LINES[kind].parse(record, read.run.world, len(read.run.layers)))


def _run(record: Record) -> Run:
    if count(record, "format") != FORMAT:
        raise ValueError(f"format {record['format']}; this version of gradcomp reads format {FORMAT}")
    layers = rows(record, "layers", _layer)
    check_unique(layers)
    world = count(record, "world", least=1)
    return Run(
        text(record, "version"), world, text(record, "controller"), text(record, "compression"), layers
    )


def _layer(row: Any) -> LayerSpec:
    match row:
        case [str(name), list(shape), str(dtype)] if all(is_count(n) for n in shape):
            layer = LayerSpec(name, tuple(shape), dtype)
            if layer.nbytes < LIMIT:
                return layer
    raise ValueError(f"a layer must be [name, [shape], dtype], got {shortened(row)}")


def _add_plan(read: _Read, record: Record) -> None:
    layers = read.run.layers
    count(record, "version")
    plan = Plan.from_json(json.dumps(dict(record)))
    plan.check_covers(layers)
    for a in plan.assignments:
        levels = a.level if isinstance(a.level, tuple) else (a.level or 0,)
        if not all(abs(level) < LIMIT for level in levels):
            raise ValueError(f"level of {a.layer!r} is out of range: {shortened(a.level)}")
    by_layer = None
    if record.get("layer_bytes") is not None:
        by_layer = rows(record, "layer_bytes", lambda value: whole(value, "layer_bytes"), len(layers))
    logged = Logged(count(record, "step"), plan, count(record, "predicted_bytes"), layer_bytes=by_layer)
    read.plans.append(logged)


def _add_bytes(read: _Read, record: Record) -> None:
    version, steps = count(record, "version"), count(record, "steps", least=1)
    measured = number(record, "measured_bytes")
    # A run that loads a checkpoint may use a version number again: the last plan with that number is meant.
    for at in reversed(range(len(read.plans))):
        if read.plans[at].plan.version == version:
            read.plans[at] = replace(read.plans[at], measured_bytes=measured, measured_steps=steps)
            return
    raise ValueError(f"bytes of version {version}, but this run has no such plan")


def _add_choice(read: _Read, record: Record) -> None:
    read.choices.append((count(record, "step"), text(record, "text")))


_ADD = {"plan": _add_plan, "bytes": _add_bytes, "choice": _add_choice}
_LINES: dict[str, Any] = {one.KIND: one for one in (Window, Sample, Gains)}
