"""The shortest time that a step can take, given when its gradients are ready and how fast the wire is."""

from __future__ import annotations


def roofline(
    buckets: list[tuple[int, list[str]]], ready: dict[str, float], after: float, bytes_per_second: float
) -> float:
    """max over k of (t_k + wire time of buckets k ... last) + time after backward, in seconds."""
    ends = max(ready.values())
    rest = 0
    for nbytes, names in reversed(buckets):
        rest += nbytes
        ends = max(ends, max(ready[name] for name in names) + rest / bytes_per_second)
    return ends + after
