"""Broadcasts the root's variables; :mod:`gradcomp.tf.reductions` describes what all calls share."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from gradcomp.core.errors import ConfigError
from gradcomp.job.channel import Channel, channel_of, chunks
from gradcomp.job.collectives import refuse
from gradcomp.job.network import Ranks
from gradcomp.job.process_sets import Members, members, root_of
from gradcomp.pipeline.calls import Call
from gradcomp.tf.ordered import plain, run
from gradcomp.tf.tensors import VALUES, Array, bytes_of, name_of


@plain
def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int = 0,
    process_set: Members = None,
    inplace: bool = False,  # noqa: ARG001
) -> None:
    """Overwrite variables on every rank with those of ``root_rank``, in place, bit for bit.

    ``variables`` are tf.Variables or Keras variables, such as ``model.variables`` or ``optimizer.variables``,
    once they are built. Names, shapes, dtypes and order must be the same on all ranks, which is checked
    before anything is sent. ``root_rank`` is a rank of the job, also if a process set takes part. ``inplace``
    is Horovod's argument without effect. The call also works inside a tf.function. Wire: broadcasts of up to
    64 MiB, d bytes in all.
    """
    _broadcast(variables, root_rank, None, process_set)


@plain
def broadcast_(
    variables: Iterable[Any], root_rank: int, name: str | None = None, process_set: Members = None
) -> list[Any]:
    """Broadcast as :func:`broadcast_variables` does, and return the variables' new values.

    ``name`` tells calls apart.
    """
    given = _broadcast(variables, root_rank, name, process_set)
    return [tf.convert_to_tensor(variable) for variable in given]


def broadcast_global_variables(root_rank: int) -> None:  # noqa: ARG001
    """Raise ConfigError, as Horovod does in eager mode: TensorFlow 2 has no list of all variables."""
    raise ConfigError(
        "broadcast_global_variables: TensorFlow 2 has no list of all variables; call "
        "broadcast_variables(model.variables), and do the same with those of the optimizer once it is built"
    )


def _broadcast(variables: Any, root_rank: int, name: str | None, process_set: Members) -> list[Any]:
    given, problem = _variables(variables)
    root, wrong_root = root_of(root_rank, process_set)
    ranks = members(process_set)
    if problem := problem or wrong_root:
        refuse("broadcast_variables", ranks, problem, name)
    if len(ranks) == 1:
        return given
    lines = [f"broadcast_variables(root_rank={root_rank})"]
    lines += [f"{name_of(v)}: {tf.as_dtype(v.dtype).name} {[int(n) for n in v.shape]}" for v in given]

    def compare() -> list[Array]:
        _channel(ranks).submit(Call("broadcast_variables", lines, key=name), lambda _: None).result()
        return []

    run("broadcast_variables", compare, [], [])
    for chunk in chunks(given, _size_bytes):
        _broadcast_chunk(chunk, root, ranks, name)
    return given


def _broadcast_chunk(variables: list[Any], root: int, ranks: Ranks, name: str | None) -> None:
    """Broadcast the bytes of all these variables at once: the root's are read, the others' assigned."""
    sizes = [_size_bytes(variable) for variable in variables]
    ends = np.cumsum(sizes)
    dtypes = [tf.as_dtype(variable.dtype) for variable in variables]
    call = Call("broadcast_variables", [f"{sum(sizes)} bytes from rank {root}"], key=name)

    def send(*values: Array) -> list[Array]:
        channel = _channel(ranks)
        buffer = np.concatenate([bytes_of(value) for value in values])
        channel.submit(call, lambda _: channel.broadcast(buffer, root)).result()
        return []

    def receive() -> list[Array]:
        channel = _channel(ranks)
        buffer = np.empty(sum(sizes), np.uint8)
        channel.submit(call, lambda _: channel.broadcast(buffer, root)).result()
        # The copies are needed, because a variable that kept a view would keep the whole chunk.
        return [
            buffer[end - size : end].copy().view(dtype.as_numpy_dtype).reshape(variable.shape)
            for variable, dtype, size, end in zip(variables, dtypes, sizes, ends, strict=True)
        ]

    if _channel(ranks).rank == root:
        run("broadcast_variables", send, [tf.convert_to_tensor(variable) for variable in variables], [])
        return
    received = run("broadcast_variables", receive, [], dtypes)
    for variable, value in zip(variables, received, strict=True):
        variable.assign(tf.ensure_shape(value, variable.shape))


def _variables(given: Any) -> tuple[list[Any], str | None]:
    """Return the variables as a list, and a problem with them if there is one."""
    try:
        variables = list(given)
    except TypeError:
        return (
            [],
            f"variables must be a list of variables, such as model.variables, got {type(given).__name__}",
        )
    for variable in variables:
        if isinstance(variable, tf.Tensor) or not all(
            hasattr(variable, a) for a in ("assign", "name", "shape")
        ):
            return (
                [],
                f"not a variable but {type(variable).__name__}; give model.variables or a list of variables",
            )
        if tf.as_dtype(variable.dtype) not in VALUES:
            return [], f"{name_of(variable)}: {tf.as_dtype(variable.dtype).name} cannot be exchanged"
        if not tf.TensorShape(variable.shape).is_fully_defined():
            return [], f"{name_of(variable)}: its shape {variable.shape} is not fixed"
    return variables, None


def _size_bytes(variable: Any) -> int:
    return int(math.prod(variable.shape) * tf.as_dtype(variable.dtype).size)


def _channel(ranks: Ranks) -> Channel:
    channel = channel_of(ranks)
    assert channel is not None, "a world of one broadcasts nothing"
    return channel
