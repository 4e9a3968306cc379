"""The Horovod transport uses the engine of a job that was started with Horovod.

Allreduces here are Horovod's, which sums float32 and float64 but neither bytes nor bfloat16; everything else is sent by
its all-to-all, which takes bytes. Horovod's background thread matches operations by name and runs them in an order of
its own, so each operation has a name with a number, which all ranks count in the same way.

**Process sets.** All ranks of the job make Horovod's process sets together, including ranks outside of them: call
:func:`process_set` on all ranks, as ``gc.init(process_sets=...)`` does, then construct the transport on the members.

**Failure.** If a rank ends, Horovod fails every operation on the others without naming the rank, or it ends their
processes by an exception on its thread that nothing catches. After a failure Horovod cannot be used any more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt

from gradcomp.core.errors import ConfigError, TransportError
from gradcomp.transport.base import Bytes, Transport

#: The number of operations of one kind that run at a time, each under a name that later operations reuse. Horovod
#: agrees at once on a name that it has cached with the same length; for new names its thread takes half a core.
_NAMES = 8
#: The largest part of a message, because Horovod counts its elements in 32 bits.
_LARGEST_PART = 2**31 - 1

_sets: dict[tuple[int, ...], Any] = {}
#: Counters of the transports made so far, by their ranks; operations are named after the number.
_instances: defaultdict[tuple[int, ...], count[int]] = defaultdict(count)


@cache
def _horovod() -> Any:
    """Import and initialise ``horovod.torch``; ConfigError if it is missing or was built without an engine."""
    try:
        import horovod.torch as hvd
    except Exception as error:  # a build for another torch may raise any exception
        raise ConfigError(
            "the horovod transport needs Horovod built for this torch: run scripts/install_horovod.sh "
            f"({type(error).__name__}: {error})"
        ) from error
    if not (hvd.gloo_built() or hvd.mpi_built()):
        raise ConfigError("this Horovod was built with neither Gloo nor MPI: run scripts/install_horovod.sh")
    if not hvd.is_initialized():
        hvd.init(process_sets="dynamic")
    return hvd


def process_set(ranks: Sequence[int] | None = None) -> Any:
    """Return Horovod's process set of these ranks (None: all ranks); the first call makes it.

    The call is collective over all ranks of the job.
    """
    hvd = _horovod()
    members = tuple(range(hvd.size()) if ranks is None else ranks)
    if members == tuple(range(hvd.size())):
        return hvd.global_process_set
    if members != tuple(sorted(set(members))) or not set(members) <= set(range(hvd.size())):
        raise ConfigError(
            f"ranks {list(members)} are no process set: give different ranks below {hvd.size()} in ascending order"
        )
    if members not in _sets:
        try:
            _sets[members] = hvd.add_process_set(members)
        except ValueError as error:
            raise ConfigError(
                f"Horovod cannot make a process set of ranks {list(members)}: set HOROVOD_DYNAMIC_PROCESS_SETS=1 or "
                f'call hvd.init(process_sets="dynamic") ({error})'
            ) from error
    return _sets[members]


@dataclass(eq=False)
class _Handle:
    """Tracks an operation that runs, or that waits for ``before``, an earlier one of the same name.

    Horovod keeps the tensors of operations alive.
    """

    transport: HorovodTransport
    submit: Callable[[], int]
    target: Any
    before: _Handle | None
    number: int = -1

    def poll(self) -> bool:
        try:
            # Another rank may wait for any operation whose name is free, not just for the one polled.
            waiting = self.transport._waiting
            waiting[:] = [handle for handle in waiting if not handle.start()]
            return self.complete()
        except TransportError:
            raise
        except (RuntimeError, ValueError) as error:  # HorovodInternalError is a RuntimeError
            reason = str(error).partition("\n")[0]
            raise TransportError(f"collective failed: {reason}") from error

    def start(self) -> bool:
        """Submit the operation if no earlier one has its name; return true if it was submitted."""
        if self.before is not None and not self.before.complete():
            return False
        self.before = None
        self.number = self.submit()
        return True

    def complete(self) -> bool:
        """Return true if the operation is complete; raise TransportError if another number of bytes arrived."""
        if self.target is not None and self.number >= 0 and self.transport._hvd.poll(self.number):
            elements, address = self.target.numel(), self.target.data_ptr()
            self.transport._hvd.synchronize(self.number)
            if (self.target.numel(), self.target.data_ptr()) != (elements, address):
                raise TransportError(
                    f"a Horovod collective received {self.target.numel()} bytes instead of {elements}"
                )
            self.target = None
        return self.target is None


class HorovodTransport(Transport):
    """Runs collectives of Horovod among ``ranks``, which are in ascending order; None stands for all ranks.

    It initialises Horovod if the program has not. Construction does not communicate.

    Raises:
        ConfigError: Horovod is missing, this process is not one of the ranks, or :func:`process_set` was not called
            for them.
    """

    def __init__(self, ranks: Sequence[int] | None = None) -> None:
        self._hvd = hvd = _horovod()
        import torch

        self._torch = torch
        members = tuple(range(hvd.size()) if ranks is None else ranks)
        if hvd.rank() not in members:
            raise ConfigError(f"rank {hvd.rank()} is not one of the transport's ranks {list(members)}")
        if members != tuple(range(hvd.size())) and members not in _sets:
            raise ConfigError(
                f"call process_set({list(members)}) on all ranks of the job first, or name the set on all of them in "
                "gc.init(process_sets=...)"
            )
        self._set = process_set(members)
        self.rank, self.size = members.index(hvd.rank()), len(members)
        self._name = f"gradcomp.{'-'.join(map(str, members))}.{next(_instances[members])}"
        #: The number of the last operation of each kind, and the last operation of each name.
        self._numbers: dict[str, int] = {}
        self._last: dict[str, _Handle] = {}
        self._waiting: list[_Handle] = []

    def allreduce(self, array: npt.NDArray[Any]) -> _Handle:
        self.bytes_sent += 2 * array.nbytes * (self.size - 1) // self.size
        tensor = self._torch.from_numpy(array)
        call = partial(self._hvd.allreduce_async_, tensor, op=self._hvd.Sum, process_set=self._set)
        return self._issue(f"{array.dtype}.{len(array)}", lambda name: call(name=name), tensor)

    def alltoallv(
        self, send: Bytes, send_counts: Sequence[int], recv: Bytes, recv_counts: Sequence[int]
    ) -> _Handle:
        self.bytes_sent += sum(send_counts) - send_counts[self.rank]
        return self._alltoall(send[: sum(send_counts)], send_counts, recv[: sum(recv_counts)])

    def allgatherv(self, buffer: Bytes, counts: Sequence[int]) -> _Handle:
        # It is an all-to-all in which this rank sends its part to every rank.
        self.bytes_sent += (self.size - 1) * counts[self.rank]
        start = sum(counts[: self.rank])
        copies = np.tile(buffer[start : start + counts[self.rank]], self.size)
        return self._alltoall(copies, [counts[self.rank]] * self.size, buffer)

    def _alltoall(self, send: Bytes, send_counts: Sequence[int], recv: Bytes) -> _Handle:
        if max(send_counts) > _LARGEST_PART:
            raise TransportError(
                f"a message of {max(send_counts)} bytes: Horovod takes up to 2^31 - 1; use smaller slices"
            )
        torch = self._torch
        source, target = torch.from_numpy(send), torch.from_numpy(recv)
        splits = torch.tensor(send_counts, dtype=torch.int32)
        # Unlike alltoall_async, this receives into an existing tensor. Horovod resizes it to the bytes that arrive,
        # which changes nothing where the sizes agree.
        from horovod.torch.mpi_ops import _alltoall_async

        return self._issue(
            "bytes",
            lambda name: _alltoall_async(source, splits, target, splits.new(), name, self._set),
            target,
        )

    def _issue(self, kind: str, call: Callable[[str], int], target: Any) -> _Handle:
        number = self._numbers[kind] = self._numbers.get(kind, -1) + 1
        name = f"{self._name}.{kind}.{number % _NAMES}"
        handle = self._last[name] = _Handle(self, lambda: call(name), target, self._last.get(name))
        self._waiting.append(handle)
        handle.poll()
        return handle

    def close(self) -> None:
        """Do nothing: the program owns Horovod and ends it."""
