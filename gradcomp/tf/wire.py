"""Checks the arguments of collectives, and makes the descriptors that ranks compare."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from gradcomp.job.collectives import Descriptor, refuse
from gradcomp.job.network import Ranks
from gradcomp.job.process_sets import Members, members
from gradcomp.job.reduce_op import ScaledOp
from gradcomp.tf.tensors import VALUES, Array, dense


def given_tensors(tensors: Any, dtypes: Iterable[Any] = VALUES) -> tuple[list[Any], str | None]:
    """Return a group as tensors, and why it cannot be exchanged, or None; ``dtypes`` are those allowed."""
    if not isinstance(tensors, list | tuple):
        return [], f"not a list of tensors but {type(tensors).__name__}"
    found, problem = [], None
    for place, value in enumerate(tensors):
        tensor, wrong = dense(value, dtypes)
        found.append(tensor)
        if wrong and problem is None:
            problem = wrong if len(tensors) == 1 else f"tensor {place}: {wrong}"
    return found, problem


def agreed(
    kind: str,
    tensors: Sequence[Any],
    name: str | None,
    process_set: Members,
    problem: str | None,
    how: ScaledOp | None = None,
) -> Ranks:
    """Return the ranks that take part; raise a problem on all of them, also while a function is traced."""
    ranks = members(process_set)
    for tensor in [] if problem else tensors:
        # If the number of dimensions is not known yet, the call checks it when it runs.
        shape = (0,) if tensor.shape.rank is None else tuple(size or 0 for size in tensor.shape)
        dtype = tensor.dtype
        problem = problem or Descriptor(kind, ranks, name, dtype.name, dtype.size, shape, how).problem
    if problem is not None:
        refuse(kind, ranks, problem, name if isinstance(name, str) else None)
    return ranks


def descriptors(
    kind: str,
    values: Sequence[Array],
    name: str | None,
    ranks: Ranks,
    how: ScaledOp | None = None,
    root: int | None = None,
) -> list[Descriptor]:
    return [
        Descriptor(kind, ranks, name, value.dtype.name, value.itemsize, value.shape, how, root)
        for value in values
    ]
