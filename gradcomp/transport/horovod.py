"""Horovod as a transport, for jobs that Horovod started and runs in.

Horovod's allreduce takes float32 and float64 but neither bytes nor bfloat16; its all-to-all takes bytes, and carries
everything else here. Its background thread makes the calls that all ranks have named, in an order of its own, so each
operation has a name that the ranks count alike.

**Some ranks.** Horovod's process sets are made by all ranks of the job together, those outside too: call
:func:`process_set` on all of them, then construct the transport on the members.

**Failure.** If a rank ends, Horovod fails every operation on the others, without saying which rank it was, or it ends
their processes, by an exception on its thread that nobody catches. Once failed, it is of no more use.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt

from gradcomp.core.errors import ConfigError, TransportError
from gradcomp.transport.base import Bytes, Transport

#: Names are used again after so many operations, the most that can be under way: Horovod caches what it knows of 1024.
_NAMES = 256
#: Horovod counts the elements of a part in 32 bits.
_LARGEST_PART = 2**31 - 1

_sets: dict[tuple[int, ...], Any] = {}
#: By ranks: what number the next transport among them has.
_instances: defaultdict[tuple[int, ...], count[int]] = defaultdict(count)


@cache
def _horovod() -> Any:
    """``horovod.torch``, initialised; ConfigError if it is not there or was built without an engine."""
    try:
        import horovod.torch as hvd
    except Exception as error:  # a build that does not fit raises whatever it meets first
        raise ConfigError(
            "the horovod transport needs Horovod built for this torch: scripts/install_horovod.sh "
            f"({type(error).__name__}: {error})"
        ) from error
    if not (hvd.gloo_built() or hvd.mpi_built()):
        raise ConfigError("this Horovod was built with neither Gloo nor MPI: scripts/install_horovod.sh")
    if not hvd.is_initialized():
        hvd.init(process_sets="dynamic")
    return hvd


def process_set(ranks: Sequence[int] | None = None) -> Any:
    """Horovod's process set of these ranks (None: all), made on the first call. Collective over the whole job."""
    hvd = _horovod()
    members = tuple(range(hvd.size()) if ranks is None else ranks)
    if members == tuple(range(hvd.size())):
        return hvd.global_process_set
    if members != tuple(sorted(set(members))) or not set(members) <= set(range(hvd.size())):
        raise ConfigError(f"ranks {list(members)} are not some of {hvd.size()} in ascending order")
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
    """An operation under way; Horovod keeps its tensors."""

    hvd: Any
    number: int
    target: Any
    elements: int
    address: int
    complete: bool = False

    def poll(self) -> bool:
        if not self.complete:
            try:
                if not self.hvd.poll(self.number):
                    return False
                self.hvd.synchronize(self.number)
            except (RuntimeError, ValueError) as error:  # HorovodInternalError is one
                raise TransportError(f"collective failed: {_reason(error)}") from error
            if (self.target.numel(), self.target.data_ptr()) != (self.elements, self.address):
                raise TransportError(f"{self.target.numel()} bytes came, {self.elements} were expected")
            self.complete = True
        return True


def _reason(error: Exception) -> str:
    return str(error).partition("\n")[0]


class HorovodTransport(Transport):
    """Collectives of Horovod among ``ranks``, in ascending order; None: all.

    Initialises Horovod if the program has not. Construction does not communicate. Raises ConfigError if there is no
    Horovod, if this process is not one of the ranks, or if :func:`process_set` was not called for them.
    """

    def __init__(self, ranks: Sequence[int] | None = None) -> None:
        self._hvd = hvd = _horovod()
        import torch

        self._torch = torch
        members = tuple(range(hvd.size()) if ranks is None else ranks)
        if hvd.rank() not in members:
            raise ConfigError(f"rank {hvd.rank()} is not one of {list(members)}")
        if members != tuple(range(hvd.size())) and members not in _sets:
            raise ConfigError(f"call process_set({list(members)}) on all ranks of the job first")
        self._set = process_set(members)
        self.rank = members.index(hvd.rank())
        self.size = len(members)
        self.bytes_sent = 0
        self._name = f"gradcomp.{'-'.join(map(str, members))}.{next(_instances[members])}"
        self._number = 0

    def allreduce(self, array: npt.NDArray[Any]) -> _Handle:
        """See :class:`Transport`."""
        self.bytes_sent += 2 * array.nbytes * (self.size - 1) // self.size
        tensor = self._torch.from_numpy(array)
        return self._issue(
            lambda name: self._hvd.allreduce_async_(
                tensor, name=name, op=self._hvd.Sum, process_set=self._set
            ),
            tensor,
        )

    def alltoallv(
        self, send: Bytes, send_counts: Sequence[int], recv: Bytes, recv_counts: Sequence[int]
    ) -> _Handle:
        """See :class:`Transport`."""
        self.bytes_sent += sum(send_counts) - send_counts[self.rank]
        return self._alltoall(send[: sum(send_counts)], send_counts, recv[: sum(recv_counts)])

    def allgatherv(self, buffer: Bytes, counts: Sequence[int]) -> _Handle:
        """See :class:`Transport`; by all-to-all."""
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
        # As alltoall_async, but into our tensor: Horovod resizes it to what arrives, which is its size already.
        from horovod.torch.mpi_ops import _alltoall_async

        return self._issue(
            lambda name: _alltoall_async(source, splits, target, splits.new(), name, self._set), target
        )

    def _issue(self, call: Callable[[str], int], target: Any) -> _Handle:
        name = f"{self._name}.{self._number % _NAMES}"
        self._number += 1
        try:
            return _Handle(self._hvd, call(name), target, target.numel(), target.data_ptr())
        except (RuntimeError, ValueError) as error:
            raise TransportError(f"collective failed: {_reason(error)}") from error

    def close(self) -> None:
        """Nothing to release: Horovod belongs to the program."""
