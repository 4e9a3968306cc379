"""Broadcasts variables, and sends objects as JSON followed by the bytes of arrays, never as a pickle."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from gradcomp.core.errors import ConfigError, WireFormatError
from gradcomp.exchange.request_group import Call
from gradcomp.job import objects
from gradcomp.job.channel import Channel, channel_of, chunks
from gradcomp.job.collectives import refuse
from gradcomp.job.launch import Ranks
from gradcomp.job.process_sets import Members, members, root_of
from gradcomp.tf.bridge import VALUES, Array, bytes_of, name_of, plain, run

__all__ = [
    "allgather_object", "broadcast_", "broadcast_object", "broadcast_object_fn", "broadcast_variables",
]  # fmt: skip

_LENGTH_BYTES = 8


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

    def broadcast(buffer: Array) -> None:
        channel = _channel(ranks)
        channel.submit(call, lambda _: channel.broadcast(buffer, root)).result()

    def send(*values: Array) -> list[Array]:
        broadcast(np.concatenate([bytes_of(value) for value in values]))
        return []

    def receive() -> list[Array]:
        buffer = np.empty(sum(sizes), np.uint8)
        broadcast(buffer)
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
        kind = type(given).__name__
        return [], f"variables must be a list of variables, such as model.variables, got {kind}"
    for variable in variables:
        known = all(hasattr(variable, attribute) for attribute in ("assign", "name", "shape"))
        if isinstance(variable, tf.Tensor) or not known:
            kind = type(variable).__name__
            return [], f"not a variable but {kind}; give model.variables or a list of variables"
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


_DTYPES = {dtype.name: np.dtype(dtype.as_numpy_dtype) for dtype in VALUES}


@plain
def broadcast_object(
    obj: Any, root_rank: int = 0, session: Any = None, name: str | None = None, process_set: Members = None
) -> Any:
    """Return ``root_rank``'s object on every rank; the other ranks' argument is ignored.

    Objects are None, numbers, strings, bytes, NumPy arrays of numbers, and lists, tuples and dicts of them.
    Unlike Horovod, gradcomp never sends a pickle: anything else raises a ConfigError on every rank, and so
    does a ``session`` of TensorFlow 1. Inside a tf.function it runs while the function is traced. Wire: one
    broadcast of the object as JSON, followed by the bytes of arrays.
    """
    problem = _no_session(session)
    return objects.broadcast_object(obj, encode, decode, root_rank, name, process_set, problem)


def broadcast_object_fn(
    root_rank: int = 0, session: Any = None, name: str | None = None, process_set: Members = None
) -> Callable[[Any], Any]:
    """Return a function of an object that calls :func:`broadcast_object` with these arguments."""
    return partial(broadcast_object, root_rank=root_rank, session=session, name=name, process_set=process_set)


@plain
def allgather_object(
    obj: Any, session: Any = None, name: str | None = None, process_set: Members = None
) -> list[Any]:
    """Return every rank's object, in rank order.

    :func:`broadcast_object` lists the objects that can be sent; any other object raises a ConfigError on every rank.
    Wire: one all-to-all of the objects.
    """
    return objects.allgather_object(obj, encode, decode, name, process_set, _no_session(session))


def _no_session(session: Any) -> str | None:
    return None if session is None else "a session of TensorFlow 1 cannot communicate here; leave session out"


def encode(value: Any) -> bytes:
    """Return the value's bytes.

        8 bytes: the length of the JSON, little-endian; the JSON; arrays and byte strings in order

    Values are None, bool, int, float, str, bytes, NumPy arrays and scalars of numbers and bools, and lists, tuples and
    dicts (whose keys are strings, numbers, bools or None) of them. Raises ConfigError that names anything else.
    """
    parts: list[bytes] = []
    text = json.dumps(_to_json(value, parts)).encode()
    return b"".join([len(text).to_bytes(_LENGTH_BYTES, "little"), text, *parts])


def decode(data: bytes) -> Any:
    """Return the value of bytes that :func:`encode` made; WireFormatError for any other bytes."""
    try:
        end = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
        reader = _Reader(memoryview(data)[end:])
        value = _from_json(json.loads(data[_LENGTH_BYTES:end]), reader)
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError) as error:
        raise WireFormatError(f"these {len(data)} bytes are not an encoded value: {error}") from error
    if len(reader.rest) > 0:
        raise WireFormatError(f"an encoded value has {len(reader.rest)} bytes too many at its end")
    return value


@dataclass
class _Reader:
    rest: memoryview

    def take(self, count: int) -> memoryview:
        if not 0 <= count <= len(self.rest):
            raise ValueError(f"{count} of {len(self.rest)} bytes")
        taken, self.rest = self.rest[:count], self.rest[count:]
        return taken


def _to_json(value: Any, parts: list[bytes]) -> Any:
    """Return lists and plain values unchanged, and others as a dict with one entry, whose key is the kind."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [_to_json(item, parts) for item in value]
    if type(value) is tuple:
        return {"tuple": [_to_json(item, parts) for item in value]}
    if isinstance(value, dict):
        if wrong := [key for key in value if key is not None and type(key) not in (bool, int, float, str)]:
            raise _refusal(wrong[0], " as a key")
        return {"dict": [[key, _to_json(item, parts)] for key, item in value.items()]}
    if type(value) is bytes:
        parts.append(value)
        return {"bytes": len(value)}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.name in _DTYPES:
        # The dtype of that name is this machine's: values in the other byte order are swapped.
        parts.append(np.asarray(value, dtype=value.dtype.newbyteorder("="), order="C").tobytes())
        kind = "array" if isinstance(value, np.ndarray) else "scalar"
        return {kind: [value.dtype.name, list(value.shape)]}
    raise _refusal(value)


def _refusal(value: Any, where: str = "") -> ConfigError:
    kind = type(value).__name__ + (f" of {value.dtype}" if isinstance(value, np.ndarray) else "")
    advice = "; use its numpy()" if hasattr(value, "numpy") else ""
    return ConfigError(
        "only None, numbers, strings, bytes, NumPy arrays of numbers and lists, tuples and dicts of them can be "
        f"sent, this has {kind}{where}{advice}"
    )


def _from_json(value: Any, reader: _Reader) -> Any:
    if isinstance(value, list):
        return [_from_json(item, reader) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tuple":
        return tuple(_from_json(item, reader) for item in content)
    if kind == "dict":
        return {key: _from_json(item, reader) for key, item in content}
    if kind == "bytes":
        return bytes(reader.take(content))
    if kind in ("array", "scalar"):
        dtype, shape = _DTYPES[content[0]], [int(length) for length in content[1]]
        count = int(np.prod(shape, dtype=np.int64))
        array = np.frombuffer(bytearray(reader.take(count * dtype.itemsize)), dtype).reshape(shape)
        return array if kind == "array" else array[()]
    raise ValueError(f"unknown kind {kind}")
