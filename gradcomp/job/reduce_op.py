"""How ranks' values become one: what every frontend's ``op`` takes."""

from __future__ import annotations

import enum
from typing import Any


class ReduceOp(enum.Enum):
    """How ranks' values become one."""

    AVERAGE = "average"
    SUM = "sum"


Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM


def reduce_op_of(average: bool | None, op: Any) -> tuple[ReduceOp, str | None]:
    """The operation that ``average``, Horovod's older spelling, or ``op`` asks for, and what is wrong with them."""
    if average is not None and op is not None:
        return Average, "average and op are two spellings of the same argument; give one"
    if op is not None and not isinstance(op, ReduceOp):
        return Average, f"op must be Average or Sum, got {op!r}"
    return op or (Sum if average is False else Average), None
