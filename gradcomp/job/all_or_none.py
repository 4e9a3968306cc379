"""Work that is done on all ranks or on none: an error on one rank is an error on every rank."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from gradcomp.core.errors import ConfigError, GradcompError, StateError, TransportError, WireFormatError
from gradcomp.core.strings import printable
from gradcomp.exchange.checkpoint_manager import checkpoint_manager_or_none
from gradcomp.exchange.request_group import Call
from gradcomp.job.call_matching import cut
from gradcomp.job.channel import Channel, channel_of
from gradcomp.job.launch import Ranks
from gradcomp.job.runtime import current

#: The longest object that can be broadcast.
MOST_OBJECT_BYTES = 1 << 36

T = TypeVar("T")
_MOST_REPORT_BYTES = 1 << 29
_MOST_SHOWN = 1 << 16  # characters of a rank's error: it may list every layer
_KINDS: dict[Any, type[GradcompError]] = {"ConfigError": ConfigError, "TransportError": TransportError}


def broadcast_payload(channel: Channel, payload: bytes, length: int, root: int) -> bytes:
    """Return the root's ``payload`` on every rank; the root has announced ``length``. On the channel's thread.

    Raises WireFormatError, on every rank, for a length that no object has, and where there is no memory for it.
    """
    if not 0 <= length <= MOST_OBJECT_BYTES:
        raise WireFormatError(
            f"an object of {length} bytes was announced, at most {MOST_OBJECT_BYTES} are allowed"
        )
    try:
        held = bytearray(payload or length)
    except MemoryError as error:
        raise WireFormatError(
            f"an object of {length} bytes was announced, for which there is no memory"
        ) from error
    buffer = np.frombuffer(held, dtype=np.uint8)
    channel.broadcast(buffer, root)
    return bytes(held)


def gather_payloads(channel: Channel, payload: bytes, lengths: Sequence[int]) -> list[bytes]:
    """Return every rank's ``payload`` in rank order; the ranks have announced ``lengths``. On the channel's thread.

    Raises WireFormatError, on every rank, for a length that no object has.
    """
    if not all(0 <= length <= MOST_OBJECT_BYTES for length in lengths):
        raise WireFormatError(
            f"objects of {list(lengths)} bytes were announced, at most {MOST_OBJECT_BYTES} are allowed"
        )
    whole = channel.allgather(np.frombuffer(bytearray(payload), np.uint8), list(lengths))
    return [part.tobytes() for part in cut(whole, lengths)]


class Together:
    """Runs the stages of one call on its ranks, which continue only if a stage succeeded on all of them.

    ``arguments`` must be equal on all ranks; otherwise every rank raises PlanMismatchError.
    """

    def __init__(self, name: str, ranks: Ranks, arguments: Sequence[str] = ()) -> None:
        self._name = name
        self._arguments = list(arguments)
        #: The numbers of these ranks in the job.
        self.members = ranks
        self._channel = channel_of(ranks)
        self.rank = 0 if self._channel is None else self._channel.rank
        self.size = 1 if self._channel is None else self._channel.size

    def do(
        self, stage: str, work: Callable[[], tuple[T, Any]], undo: Callable[[], None] = lambda: None
    ) -> tuple[T, list[Any]]:
        """Do ``work`` on every rank. Return this rank's first result of it, and every rank's second one.

        If it raised on any rank, ``undo`` runs on all; then all raise an error that says what happened where. It is a
        ConfigError or TransportError if the first error was one, and a StateError otherwise. Where ranks cannot hear
        each other some may have gone on, so after a TransportError nothing is undone.
        """
        result: list[T] = []
        cause: Exception | None = None
        report: dict[str, Any]
        try:
            mine, told = work()
            result.append(mine)
            report = {"told": told}
        except Exception as error:  # noqa: BLE001 - the other ranks would wait for one that stays away
            cause = error
            kind = type(error).__name__
            expected = isinstance(error, GradcompError | OSError)
            report = {"error": str(error) if expected else f"{kind}: {error}", "kind": kind}
        reports = self._gather(stage, json.dumps(report).encode())
        failures = [
            f"rank {r}: {printable(str(other['error']), _MOST_SHOWN)}"
            for r, other in enumerate(reports)
            if "error" in other
        ]
        if failures:
            undo()
            first = next(other["kind"] for other in reports if "error" in other)
            shown = "; ".join(failures[:3]) + (f"; and {len(failures) - 3} more" if len(failures) > 3 else "")
            raise _KINDS.get(first, StateError)(f"{self._name}: {shown}") from cause
        return result[0], [other["told"] for other in reports]

    def _gather(self, stage: str, text: bytes) -> list[dict[str, Any]]:
        channel = self._channel
        if channel is None:
            return [json.loads(text)]

        def exchange(lengths: list[int]) -> list[dict[str, Any]]:
            if not all(0 <= length <= _MOST_REPORT_BYTES for length in lengths):
                raise WireFormatError(f"the ranks announced reports of {lengths} bytes")
            return [_report(each) for each in gather_payloads(channel, text, lengths)]

        lines = [f"{self._name}: {stage}", *self._arguments]
        return channel.submit(Call(self._name, lines, len(text)), exchange).result()


def together_of(name: str, opt: Any, arguments: Sequence[str]) -> Together:
    """Return the ranks of ``opt``, or all of the job if it was not wrapped, since all must learn of that."""
    manager = checkpoint_manager_or_none(opt)
    return Together(name, current().everyone if manager is None else manager.ranks, arguments)


def _report(text: bytes) -> dict[str, Any]:
    try:
        report = json.loads(text)
    except ValueError as error:
        raise WireFormatError(f"a rank's report is not JSON: {error}") from error
    if not isinstance(report, dict) or not (report.keys() == {"told"} or report.keys() == {"error", "kind"}):
        raise WireFormatError("a rank's report is malformed")
    return report
