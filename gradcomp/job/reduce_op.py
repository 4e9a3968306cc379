"""Defines the operations that every frontend's ``op`` takes."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Any


class ReduceOp(enum.Enum):
    """Names the operation that combines the ranks' values."""

    AVERAGE = "average"
    SUM = "sum"
    ADASUM = "adasum"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"


Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Adasum = ReduceOp.ADASUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT


@dataclass(frozen=True)
class ScaledOp:
    """Computes ``postscale * op(prescale * x_0, ..., prescale * x_(N-1))`` of N ranks' values."""

    op: ReduceOp = Average
    prescale: float = 1.0
    postscale: float = 1.0

    @property
    def scales(self) -> bool:
        """Return whether a factor is not 1."""
        return self.prescale != 1.0 or self.postscale != 1.0

    def __str__(self) -> str:
        factors = {"prescale_factor": self.prescale, "postscale_factor": self.postscale}
        return ", ".join(
            [f"op={self.op.name}", *(f"{name}={value!r}" for name, value in factors.items() if value != 1.0)]
        )


def reduce_op_of(average: bool | None, op: Any) -> tuple[ReduceOp, str | None]:
    """Return the operation that ``op``, or Horovod's older ``average``, asks for, and what is wrong with them."""
    if average is not None and op is not None:
        return Average, "average and op are two spellings of the same argument; give one"
    if op is not None and not isinstance(op, ReduceOp):
        return Average, f"op must be Average or Sum, Min, Max, Product or Adasum, got {op!r}"
    return op or (Sum if average is False else Average), None


def scaled_op_of(
    average: bool | None, op: Any, prescale_factor: Any = 1.0, postscale_factor: Any = 1.0
) -> tuple[ScaledOp, str | None]:
    """Return the operation and factors that a user's arguments ask for, and what is wrong with them."""
    reduce_op, problem = reduce_op_of(average, op)
    factors = []
    for name, value in (("prescale_factor", prescale_factor), ("postscale_factor", postscale_factor)):
        try:
            factors.append(float(value))
        except (TypeError, ValueError):
            factors.append(math.nan)
        if not math.isfinite(factors[-1]):
            problem = problem or f"{name} must be a finite number, got {value!r}"
    return ScaledOp(reduce_op, *(1.0 if problem else factor for factor in factors)), problem
