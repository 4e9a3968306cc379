"""Sends the user's objects as bytes, which a frontend makes of them and reads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from gradcomp.core.errors import ConfigError
from gradcomp.exchange.request_group import Call
from gradcomp.job.all_or_none import MOST_OBJECT_BYTES, broadcast_payload, gather_payloads
from gradcomp.job.channel import alone, current_channel
from gradcomp.job.process_sets import Members, root_of

#: Returns an object's bytes; raises ConfigError that names what cannot be sent.
Encode = Callable[[Any], bytes]
#: Returns the object of received bytes; raises WireFormatError for any others.
Decode = Callable[[bytes], Any]


def broadcast_object(
    obj: Any,
    encode: Encode,
    decode: Decode,
    root_rank: int,
    name: str | None,
    process_set: Members,
    problem: str | None = None,
) -> Any:
    """Return the root's object on every rank; if it cannot be sent, or for a ``problem``, all ranks raise ConfigError.

    Wire: one broadcast of its bytes.
    """
    channel, (root, wrong_root) = current_channel(process_set), root_of(root_rank, process_set)
    payload, wrong = b"", None
    if channel is not None and channel.rank == root:
        payload, wrong = _encoded(obj, encode)
    lines = [f"broadcast_object(root_rank={root_rank}, name={name!r})"]
    call = Call("broadcast_object", lines, len(payload), wrong_root or wrong or problem, name)
    if channel is None:
        alone(call).result()
        return obj
    received = channel.submit(
        call, lambda lengths: broadcast_payload(channel, payload, lengths[root], root)
    ).result()
    return obj if channel.rank == root else decode(received)


def allgather_object(
    obj: Any,
    encode: Encode,
    decode: Decode,
    name: str | None,
    process_set: Members,
    problem: str | None = None,
) -> list[Any]:
    """Return every rank's object, in rank order; errors are as for :func:`broadcast_object`.

    Wire: one all-to-all of their bytes.
    """
    channel = current_channel(process_set)
    payload, wrong = (b"", None) if channel is None else _encoded(obj, encode)
    call = Call(
        "allgather_object", [f"allgather_object(name={name!r})"], len(payload), wrong or problem, name
    )
    if channel is None:
        alone(call).result()
        return [obj]
    received = channel.submit(call, partial(gather_payloads, channel, payload)).result()
    return [decode(data) for data in received]


def _encoded(obj: Any, encode: Encode) -> tuple[bytes, str | None]:
    """Return the object's bytes, and the reason why it cannot be sent, or None."""
    try:
        payload = encode(obj)
    except ConfigError as error:
        return b"", str(error)
    except (ValueError, RecursionError) as error:
        return b"", f"the object cannot be encoded: {error}"
    if len(payload) > MOST_OBJECT_BYTES:
        return b"", f"the object has {len(payload)} bytes, more than {MOST_OBJECT_BYTES}"
    return payload, None
