"""What every rank checks about calls that cannot be: a typed error on every rank, over each frontend."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from collective_adapters import Check, Collectives, same
from collective_checks import ones

from gradcomp import ConfigError, PlanMismatchError, Quantize, TopK
from gradcomp.job.reduce_op import Adasum, Average, Max, Min, Sum

CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


@check
def what_differs_under_one_call(c: Collectives) -> None:
    """Shapes, dtypes, operations, factors, names, groups, roots, and calls; both sides are named."""
    gc, last = c.gc, c.rank == c.world - 1
    who = ("rank 0 has", f"rank {c.world - 1} has")
    for call, mine, theirs, *texts in (
        (gc.allreduce, ones(3), ones(4), "[3]", "[4]", *who),
        (gc.reducescatter, ones(3), ones(4), "[3]", "[4]", *who),
        *((gathers, ones(c.world, 3), ones(c.world, 4), "[*, 3]", "[*, 4]") for gathers in (gc.allgather, gc.alltoall)),
        (gc.grouped_allreduce, [ones(1), ones(1)], [ones(1), ones(2)], "[1]", "[2]"),
    ):  # fmt: skip
        with c.raises(PlanMismatchError, *texts):
            c(call, theirs if last else mine)
    for call in (gc.allreduce, gc.reducescatter, gc.allgather, gc.alltoall):
        with c.raises(PlanMismatchError, "float32", "float64"):
            c(call, ones(12, dtype=np.float64 if last else np.float32))
    for call in (gc.allreduce, gc.allgather):  # ranks whose names differ wait for each other for a second
        with c.raises(PlanMismatchError, "'loss'", "'accuracy'"):
            c(partial(call, name="accuracy" if last else "loss"), ones(6))
    for call in (gc.allreduce, gc.reducescatter):
        with c.raises(PlanMismatchError, "AVERAGE", "SUM"):
            c(partial(call, op=Sum if last else Average), ones(6))
        with c.raises(PlanMismatchError, "'op'", "MIN", "MAX"):
            c(partial(call, op=Min if last else Max, name="op"), ones(6))
        with c.raises(PlanMismatchError, "'factor'", "prescale_factor=2.0"):
            c(partial(call, prescale_factor=2.0 if last else 1.0, name="factor"), ones(6))
    with c.raises(PlanMismatchError, "root_rank=0", "root_rank=1", "'start'"):
        c(partial(gc.broadcast, root_rank=min(c.rank, 1), name="start"), ones(1))
    with c.raises(PlanMismatchError, "barrier()", "allreduce("):
        if c.rank == 0:
            c(gc.barrier)
        else:
            c(gc.allreduce, ones(3))


@check
def one_ranks_bad_argument_is_everyones_error(c: Collectives) -> None:
    last = c.rank == c.world - 1
    with c.raises(ConfigError, f"rank {c.world - 1}", "str"):
        c(lambda: c.gc.allreduce("no tensor" if last else c.tensor(ones(3))))


@check
def what_cannot_be_reduced_or_gathered(c: Collectives) -> None:
    gc = c.gc
    scalar, complex_number = np.float32(1.0), np.array([1j])
    for call in (gc.allgather, gc.reducescatter, gc.alltoall):
        with c.raises(ConfigError, "without dimensions has no rows"):
            c(call, np.asarray(scalar))
    with c.raises(ConfigError, "average and op"):
        c(partial(gc.allreduce, average=True, op=Sum), ones(1))
    for call in (gc.allreduce, gc.reducescatter):
        for value, arguments, *texts in (
            (complex_number, {}, "rank 0", "complex128"),
            (ones(1), {"op": "mean"}, "Average or Sum"),
            (ones(1, dtype=bool), {}, "average of bool", "op=Sum"),
            (ones(1, dtype=bool), {"op": Sum, "prescale_factor": 2.0}, "bool cannot be scaled"),
            (ones(1), {"prescale_factor": float("nan")}, "prescale_factor must be a finite number"),
            (ones(1), {"compression": TopK(density=0.5)}, "compression must be", "topk"),
            (ones(1), {"compression": Quantize(bits=4)}, "quantize", "Compression.none, fp16 or bf16"),
        ):
            with c.raises(ConfigError, *texts):
                c(partial(call, **arguments), value)
    for call, dtype in ((gc.reducescatter, "float32"), (gc.allreduce, "int64")):
        with c.raises(ConfigError, "Adasum is an allreduce of floating-point tensors", dtype):
            c(partial(call, op=Adasum), ones(2, dtype=dtype))


@check
def roots_that_are_not_there(c: Collectives) -> None:
    calls: tuple[Callable[[Any], Any], ...] = (
        lambda root: c.gc.broadcast(c.tensor(ones(1)), root),
        lambda root: c.gc.broadcast_object(1, root),
    )
    for call in calls:
        for root in (c.world, -1, "0"):
            with c.raises(ConfigError, "root_rank", f"0 .. {c.world - 1}"):
                c(partial(call, root))


@check
def wrong_splits_are_refused_everywhere(c: Collectives) -> None:
    gc, right = c.gc, [1] * (c.world - 1) + [2]
    for wrong in ([1] * c.world, right[1:], [-1, *right[1:-1], 3], [[1] * c.world], [0] * c.world):
        with c.raises(ConfigError, f"rank {c.world - 1}", "splits"):
            c(gc.alltoall, ones(c.world + 1), np.array(wrong if c.rank == c.world - 1 else right))
    for call in (
        lambda x: gc.alltoall(x, c.tensor(ones(c.world))),
        partial(gc.alltoall, splits=[0.5] * c.world),
    ):
        with c.raises(ConfigError, "splits"):
            c(call, ones(3))
    with c.raises(ConfigError, "give splits"):
        c(gc.alltoall, ones(c.world + 1))


@check
def errors_leave_the_channel_usable(c: Collectives) -> None:
    for size in (1, 2):
        with c.raises(PlanMismatchError):
            c(partial(c.gc.allreduce, op=Sum), ones(size + min(c.rank, 1)))
        same(c(partial(c.gc.allreduce, op=Sum), ones(7)), ones(7) * c.world)
