"""Horovod as a transport, for jobs that Horovod started and runs in.

Horovod's allreduce takes float32 and float64 but neither bytes nor bfloat16; its all-to-all takes bytes, and carries
everything else here. Its background thread makes the calls that all ranks have named, in an order of its own, so each
operation has a name that the ranks count alike.

**Some ranks.** Horovod's process sets are made by all ranks of the job together, those outside too: call
:func:`process_set` on all of them, as ``gc.init(process_sets=...)`` does, then construct the transport on the members.

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

#: So many operations alike are under way at a time, each with a name that the next ones use again. Horovod agrees at
#: once on a name that it has seen before with the same length; on others it takes its thread half a core.
_NAMES = 8
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
    """An operation under way, or one that waits for ``before``, which has its name; Horovod keeps its tensors."""

    transport: HorovodTransport
    submit: Callable[[], int]
    target: Any
    before: _Handle | None
    number: int = -1

    def poll(self) -> bool:
        try:
            self.transport._submit_waiting()
            return self.complete()
        except TransportError:
            raise
        except (RuntimeError, ValueError) as error:  # HorovodInternalError is one
            raise TransportError(f"collective failed: {_reason(error)}") from error

    def start(self) -> bool:
        """Submit it if its name is free; whether it was."""
        if self.before is not None and not self.before.complete():
            return False
        self.before = None
        self.number = self.submit()
        return True

    def complete(self) -> bool:
        """Whether it is."""
        if self.target is not None and self.number >= 0 and self.transport._hvd.poll(self.number):
            elements, address = self.target.numel(), self.target.data_ptr()
            self.transport._hvd.synchronize(self.number)
            if (self.target.numel(), self.target.data_ptr()) != (elements, address):
                raise TransportError(f"{self.target.numel()} bytes came, {elements} were expected")
            self.target = None
        return self.target is None


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
            raise ConfigError(
                f"call process_set({list(members)}) on all ranks of the job first, or let all of them name the set in "
                "gc.init(process_sets=...)"
            )
        self._set = process_set(members)
        self.rank = members.index(hvd.rank())
        self.size = len(members)
        self.bytes_sent = 0
        self._name = f"gradcomp.{'-'.join(map(str, members))}.{next(_instances[members])}"
        #: By kind of operation: how many there were. By name: the last one.
        self._numbers: dict[str, int] = {}
        self._last: dict[str, _Handle] = {}
        self._waiting: list[_Handle] = []

    def allreduce(self, array: npt.NDArray[Any]) -> _Handle:
        """See :class:`Transport`."""
        self.bytes_sent += 2 * array.nbytes * (self.size - 1) // self.size
        tensor = self._torch.from_numpy(array)
        return self._issue(
            f"{array.dtype}.{len(array)}",
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

    def _submit_waiting(self) -> None:
        """All whose names are free, whichever is polled: another rank may wait for any of them."""
        if self._waiting:
            self._waiting = [handle for handle in self._waiting if not handle.start()]

    def close(self) -> None:
        """Nothing to release: Horovod belongs to the program."""
