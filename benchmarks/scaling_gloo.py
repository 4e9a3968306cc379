"""What a Gloo group of N ranks reads and writes at the job's store, counted; and how many calls a TCPStore answers.

All ranks of a group are threads of this process, and their store counts. The groups are real: every pair of ranks has
a connection over the loopback interface.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from time import process_time
from typing import Any

import torch.distributed as dist

_PATIENCE = timedelta(seconds=60)


@dataclass(frozen=True)
class Mesh:
    """What a group of ``ranks`` takes: keys, bytes of one value, calls and bytes of one rank, descriptors of one."""

    ranks: int
    keys: int
    value_bytes: int
    calls: float
    bytes: float
    descriptors: float


class _Values:
    def __init__(self) -> None:
        self.by_key: dict[str, bytes] = {}
        self.changed = threading.Condition()
        self.calls = self.bytes = 0


class _Store(dist.Store):
    """Counts what Gloo asks of its store."""

    def __init__(self, values: _Values) -> None:
        super().__init__()
        self._values = values

    def set(self, key: str, value: Any) -> None:
        content = value.encode() if isinstance(value, str) else bytes(value)
        with self._values.changed:
            self._count(len(content))
            self._values.by_key[key] = content
            self._values.changed.notify_all()

    def get(self, key: str) -> bytes:
        with self._values.changed:
            self._await([key])
            self._count(len(self._values.by_key[key]))
            return self._values.by_key[key]

    def wait(self, keys: Sequence[str], timeout: timedelta = _PATIENCE) -> None:
        with self._values.changed:
            self._count(0)
            self._await(keys)

    def _await(self, keys: Sequence[str]) -> None:
        there = self._values.changed.wait_for(
            lambda: all(key in self._values.by_key for key in keys), _PATIENCE.total_seconds()
        )
        if not there:
            raise RuntimeError(f"no rank wrote {keys}")

    def _count(self, nbytes: int) -> None:
        self._values.calls += 1
        self._values.bytes += nbytes


def mesh(size: int) -> Mesh:
    """Make a group of ``size`` ranks and count."""
    values = _Values()
    before = _descriptors()
    with ThreadPoolExecutor(size) as pool:
        groups = list(
            pool.map(lambda rank: dist.ProcessGroupGloo(_Store(values), rank, size, _PATIENCE), range(size))
        )
    opened = (_descriptors() - before) / size
    longest = max(map(len, values.by_key.values()))
    del groups
    return Mesh(size, len(values.by_key), longest, values.calls / size, values.bytes / size, opened)


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def call_seconds(calls: int = 4000) -> float:
    """The processor time of a TCPStore's client and server for one call, together, on this core."""
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, timeout=_PATIENCE, wait_for_workers=False)
    store.set("key", "x" * 100)
    begin = process_time()
    for _ in range(calls // 2):
        store.check(["key"])
        store.get("key")
    return (process_time() - begin) / calls
