"""The shortest time that a step can take, given when its gradients are ready, what travels, and how fast the wire is.

Bytes are counted, not computed: whatever a compressor asks for (a sum, a gather, a broadcast, a reduction, sizes that
depend on the data, several rounds), the transport counts what this rank sends in each round of each bucket.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

#: Bytes that a rank sends, by step, bucket and round.
Rounds = list[list[list[int]]]


class WireRecord:
    """What one rank sends in every round of every bucket, in the last steps of a pipeline."""

    def __init__(self, pipeline: Any, keep_steps: int) -> None:
        self._steps: dict[int, dict[int, list[int]]] = {}
        opened = pipeline.open

        def opens(*arguments: Any, **named: Any) -> None:
            opened(*arguments, **named)
            exchange = pipeline._exchange
            begin = exchange._begin  # the one place where a bucket begins
            exchange._begin = lambda: counting(begin())

        def counting(bucket_in_flight: Any) -> Any:
            issue = bucket_in_flight.issue

            def counted(transport: Any) -> bool:
                before = transport.bytes_sent
                goes_on: bool = issue(transport)
                if goes_on:
                    buckets = self._steps.setdefault(pipeline.step, {})
                    buckets.setdefault(bucket_in_flight.number, []).append(transport.bytes_sent - before)
                    self._steps.pop(pipeline.step - keep_steps, None)
                return goes_on

            bucket_in_flight.issue = counted
            return bucket_in_flight

        pipeline.open = opens

    def rounds(self) -> Rounds:
        """By step, oldest first, by bucket, in the order in which they travel, and by round."""
        return [
            [rounds for _, rounds in sorted(buckets.items())] for _, buckets in sorted(self._steps.items())
        ]


def busiest_bytes(ranks: Sequence[Rounds]) -> list[float]:
    """Bytes of every bucket as the wire feels them: of every round, those of the rank that sends most.

    A round ends when its last byte has arrived, so where one rank sends to all, the others wait for that. The mean over
    the steps that are recorded.
    """
    totals: list[float] = []
    for steps in zip(*ranks, strict=True):
        for number, bucket in enumerate(zip(*steps, strict=True)):
            if number == len(totals):
                totals.append(0.0)
            totals[number] += sum(map(max, zip(*bucket, strict=True)))
    return [total / len(ranks[0]) for total in totals]


def roofline(
    buckets: Sequence[tuple[float, Sequence[str]]],
    ready: dict[str, float],
    after: float,
    bytes_per_second: float,
) -> float:
    """max over k of (t_k + wire time of buckets k ... last) + time after backward, in seconds.

    ``buckets``: bytes and names of layers. The rounds of a bucket follow one another, so its bytes are those
    of all its rounds; what a round waits for, latency and the arithmetic between two of them, is not in the roofline.
    """
    ends = max(ready.values())
    rest = 0.0
    for nbytes, names in reversed(buckets):
        rest += nbytes
        ends = max(ends, max(ready[name] for name in names) + rest / bytes_per_second)
    return ends + after
