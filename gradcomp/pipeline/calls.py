"""Ranks compare the call that they are about to make before any message whose size depends on it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradcomp.core.errors import ConfigError, PlanMismatchError, WireFormatError
from gradcomp.core.text import printable
from gradcomp.transport.base import AllGather, Bytes

_MOST_DESCRIPTION_BYTES = 1 << 26


@dataclass(frozen=True)
class Inline:
    """Holds arrays so small that they travel with the comparison of a call instead of in their own collective.

    ``finish`` takes the bytes of every rank's arrays, in rank order; the arrays of a rank lie one behind the other.
    """

    arrays: Sequence[Bytes]
    finish: Callable[[Sequence[Bytes]], None]


@dataclass(frozen=True)
class Call:
    """Describes what this rank calls; ``lines`` must be equal on all ranks, ``number`` is shared with them.

    ``problem`` says why this rank cannot take part: it still meets the others, so that all of them raise
    ConfigError. ``key`` names a user's call, so that it is found on other ranks whatever else they call before it.
    """

    name: str
    lines: Sequence[str]
    number: int = 0
    problem: str | None = None
    key: str | None = None
    #: Returns, as JSON values, what a rank in ``join()`` must know to take part with zeros; None if it cannot.
    zeros: Callable[[], Any] | None = None
    #: Of ``join()``: takes part in a call of the other ranks, given what :attr:`zeros` returned there.
    stand_in: Callable[[Any], None] | None = None
    #: At most :func:`gradcomp.job.matching.inline_bytes` bytes; the lines determine whether there are any.
    inline: Inline | None = None


def compare(call: Call, rank: int, size: int) -> Generator[AllGather, None, list[int]]:
    """Return every rank's number if all make the same call and none has a problem.

    The generator yields operations that are to be issued and waited for. It raises ConfigError on every rank if one
    has a problem, and PlanMismatchError on every rank if they call different things. Wire: 56 bytes per rank; the
    descriptions themselves travel only if something is wrong.
    """
    description = "\n".join(call.lines).encode()
    text = description if call.problem is None else call.problem.encode()
    header = np.zeros(7, dtype=np.int64)
    header[:3] = call.problem is not None, call.number, len(text)
    header[3:] = np.frombuffer(hashlib.sha256(description).digest(), dtype=np.int64)
    headers = np.zeros((size, len(header)), dtype=np.int64)
    headers[rank] = header
    yield AllGather(headers.reshape(-1).view(np.uint8), [header.nbytes] * size)
    troubled = np.flatnonzero(headers[:, 0])
    if len(troubled) == 0 and (headers[:, 3:] == headers[0, 3:]).all():
        return [int(number) for number in headers[:, 1]]
    lengths = [int(length) for length in headers[:, 2]]
    if not all(0 <= length <= _MOST_DESCRIPTION_BYTES for length in lengths):
        raise WireFormatError(
            f"the ranks announced descriptions of their calls of {lengths} bytes, which is impossible"
        )
    ends = np.cumsum(lengths)
    whole = np.zeros(sum(lengths), dtype=np.uint8)
    whole[ends[rank] - len(text) : ends[rank]] = np.frombuffer(text, dtype=np.uint8)
    yield AllGather(whole, lengths)
    texts = [
        whole[end - length : end].tobytes().decode(errors="replace")
        for end, length in zip(ends, lengths, strict=True)
    ]
    if len(troubled) > 0:
        raise ConfigError(f"{call.name}: rank {troubled[0]}: {printable(texts[troubled[0]])}")
    raise PlanMismatchError(f"{call.name}: the ranks do not call the same: {difference(texts)}")


def difference(texts: Sequence[str]) -> str:
    """Return, in words, the first line in which a rank differs from rank 0."""
    for rank, text in enumerate(texts):
        ours, theirs = texts[0].split("\n"), text.split("\n")
        for i in range(max(len(ours), len(theirs))):
            pair = [lines[i] if i < len(lines) else "nothing more" for lines in (ours, theirs)]
            if pair[0] != pair[1]:
                return f"rank 0 has {printable(pair[0])}, rank {rank} has {printable(pair[1])}"
    raise WireFormatError("the digests of the ranks' calls differ, but their descriptions do not")
