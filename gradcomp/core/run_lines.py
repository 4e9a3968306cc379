"""Lines of a run log that tell of steps and layers; ``docs/run-log.md`` describes their fields.

A line is written with :meth:`record`, and read with :meth:`parse`, which raises ValueError that says what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from reprlib import repr as shortened
from typing import Any, ClassVar, TypeVar

#: Numbers in a log must be below this, so that no sum, ratio or figure made of them overflows.
LIMIT = 2**63

T = TypeVar("T")

Record = Mapping[str, Any]
#: One number for each rank, None for a rank of which it is not known.
ByRank = tuple[float | None, ...]

STEP, PERIOD = "step", "period"


def is_count(value: Any, least: int = 0) -> bool:
    return type(value) is int and least <= value < LIMIT


def whole(value: Any, key: str, least: int = 0) -> int:
    if not is_count(value, least):
        raise ValueError(f"{key} must be a whole number of at least {least}, got {shortened(value)}")
    assert isinstance(value, int)
    return value


def count(record: Record, key: str, least: int = 0) -> int:
    return whole(record.get(key), key, least)


def text(record: Record, key: str) -> str:
    value = record.get(key)
    if not isinstance(value, str):
        raise ValueError(f"{key} must be text, got {shortened(value)}")
    return value


def number(record: Record, key: str) -> float:
    """Returns a number that is finite, not negative and below :data:`LIMIT`."""
    return _number(key, record.get(key))


def _number(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < LIMIT:
        raise ValueError(f"{key} must be a number of at least 0, got {shortened(value)}")
    return float(value)


def number_or_none(record: Record, key: str) -> float | None:
    return None if record.get(key) is None else number(record, key)


def rows(record: Record, key: str, read: Callable[[Any], T], length: int | None = None) -> tuple[T, ...]:
    """Returns the values of a list, as ``read`` gives them; ``length`` is what it must have, if not None."""
    value = record.get(key)
    if not isinstance(value, list) or (length is not None and len(value) != length):
        what = "a list" if length is None else f"a list of {length}"
        raise ValueError(f"{key} must be {what}, got {shortened(value)}")
    return tuple(read(one) for one in value)


def layer_number(value: Any, layers: int) -> int:
    if not is_count(value) or value >= layers:
        raise ValueError(f"a layer must be a number below {layers}, got {shortened(value)}")
    assert isinstance(value, int)
    return value


@dataclass(frozen=True)
class Window:
    """Tells where the time of a window of steps went, by rank, in seconds per step.

    ``seconds`` last from the end of one exchange to the end of the next; ``backward`` of them from the first gradient
    until the training thread waits, and ``exposed`` while it waits. ``waited`` is the part of those in which the last
    rank had not handed in its gradients. ``codec`` and ``wire`` are those of kernels and of rounds, most of them hidden
    behind ``backward``; they are sums over exchange buckets. ``sent_bytes`` are counted. ``last`` is the number of
    steps in which the others waited for this rank.

    ``skipped`` has the steps that were not applied, with the first layer that was not finite, or None where ranks had
    agreed to skip. ``discarded`` is the number of exchanges whose means were thrown away.
    """

    KIND: ClassVar[str] = "steps"
    BY_RANK: ClassVar[tuple[str, ...]] = (
        "seconds", "backward", "exposed", "waited", "codec", "wire", "sent_bytes", "last",
    )  # fmt: skip

    step: int
    steps: int
    seconds: ByRank
    backward: ByRank
    exposed: ByRank
    waited: ByRank
    codec: ByRank
    wire: ByRank
    sent_bytes: ByRank
    last: ByRank
    skipped: tuple[tuple[int, int | None], ...] = ()
    discarded: int = 0

    def record(self) -> dict[str, Any]:
        return {one.name: getattr(self, one.name) for one in fields(self)}

    @staticmethod
    def parse(record: Record, world: int, layers: int) -> Window:
        def skip(row: Any) -> tuple[int, int | None]:
            match row:
                case [int(step), layer] if is_count(step):
                    return step, None if layer is None else layer_number(layer, layers)
            raise ValueError(f"a skipped step must be [step, layer or null], got {shortened(row)}")

        def by_rank(name: str) -> ByRank:
            return rows(record, name, lambda value: None if value is None else _number(name, value), world)

        parts: dict[str, Any] = {name: by_rank(name) for name in Window.BY_RANK}
        return Window(
            count(record, "step"),
            count(record, "steps", least=1),
            **parts,
            skipped=rows(record, "skipped", skip),
            discarded=count(record, "discarded"),
        )


@dataclass(frozen=True)
class Sample:
    """Tells of one layer's gradient on rank 0: its L2 norm, and that of its residual, None if it has none.

    ``error`` is the relative error of the compressor in force on their sum, ||p - C(p)|| / ||p||, None if it could not
    be measured. ``over`` is STEP for the gradient of one step, and PERIOD for what a controller gathered in a period.
    """

    KIND: ClassVar[str] = "layer"

    step: int
    layer: int
    norm: float
    residual: float | None
    error: float | None
    over: str = STEP

    def record(self) -> dict[str, Any]:
        return {one.name: getattr(self, one.name) for one in fields(self)}

    @staticmethod
    def parse(record: Record, world: int, layers: int) -> Sample:
        over = text(record, "over")
        if over not in (STEP, PERIOD):
            raise ValueError(f"over must be {STEP!r} or {PERIOD!r}, got {shortened(over)}")
        return Sample(
            count(record, "step"),
            layer_number(record.get("layer"), layers),
            number(record, "norm"),
            number_or_none(record, "residual"),
            number_or_none(record, "error"),
            over,
        )


@dataclass(frozen=True)
class Factor:
    """Tells of one compression factor of GraVAC: gain and throughput, if they were measured, and steps that sent it."""

    factor: float
    gain: float | None
    throughput: float | None
    steps: int


@dataclass(frozen=True)
class Gains:
    """Tells of GraVAC's search after a step, for the model (row ``*``) or one layer.

    ``prior`` is the sum over ranks and layers of the norms of gradients, ``corrected`` that of gradients with
    residuals, None in older logs, and ``post`` that of what the minimum factor and the candidate select of these;
    squared norms with ``gain="energy"``.
    """

    KIND: ClassVar[str] = "gains"

    step: int
    row: str
    epsilon: float
    minimum: float
    candidate: float
    prior: float
    post: tuple[float, ...]
    factors: tuple[Factor, ...]
    corrected: float | None = None

    def record(self) -> dict[str, Any]:
        factors = [[f.factor, f.gain, f.throughput, f.steps] for f in self.factors]
        return {one.name: getattr(self, one.name) for one in fields(self)} | {"factors": factors}

    @staticmethod
    def parse(record: Record, world: int, layers: int) -> Gains:
        def factor(row: Any) -> Factor:
            match row:
                case [value, gain, throughput, int(steps)] if is_count(steps):
                    named = {"factor": value, "gain": gain, "throughput": throughput}
                    measured = number_or_none(named, "gain"), number_or_none(named, "throughput")
                    return Factor(number(named, "factor"), *measured, steps)
            raise ValueError(f"a factor must be [factor, gain, throughput, steps], got {shortened(row)}")

        return Gains(
            count(record, "step"),
            text(record, "row"),
            number(record, "epsilon"),
            number(record, "minimum"),
            number(record, "candidate"),
            number(record, "prior"),
            rows(record, "post", lambda value: _number("post", value), 2),
            rows(record, "factors", factor),
            number_or_none(record, "corrected"),
        )


Line = Window | Sample | Gains

#: What a controller has measured for a decision or in a step.
Account = Sequence[Sample | Gains]
