"""The torch transport uses Gloo groups of its own among some of the default process group's ranks."""

from __future__ import annotations

import ctypes
import logging
import os
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from gradcomp.core.errors import TransportError
from gradcomp.transport.base import GLOO_BYTE_SECONDS, Bytes, Transport, parts_of
from gradcomp.transport.control import ControlChannel, StoreSilentError, cut, hung_up, open_sockets

logger = logging.getLogger("gradcomp")

#: Gloo's deadline is this much later than the engine's, so that the engine reports what happened.
GROUP_TIMEOUT_MARGIN_SECONDS = 30.0
#: The time that a call of the control channel waits for the store's answer.
_ANSWER_SECONDS = 3.0
#: The time that the control channel waits for an answer when it is closed.
_END_SECONDS = 0.5


#: The message size from which each direction between two ranks has a connection of its own.
_BOTH_WAYS_BYTES = 1 << 17

#: The name that Gloo gives the thread that serves a group's connections.
_GLOO_THREAD = "gloo_tcp_loop"

_NO_COPIES: Bytes = np.empty(0, dtype=np.uint8)

#: A thread holds it while it makes a group through the default group's connection to the store.
_default_connection = threading.Lock()
#: The number of groups made so far, by attempt and ranks; it distinguishes groups of the same ranks.
_groups_made: dict[tuple[str, tuple[int, ...]], int] = {}


@dataclass(eq=False)
class _Handle:
    """Tracks a collective and keeps its tensors alive; ``completed`` is called once it is complete."""

    works: list[Any]
    tensors: tuple[torch.Tensor, ...]
    completed: Callable[[], None] | None = None

    def poll(self) -> bool:
        while self.works and self.works[-1].is_completed():
            try:
                self.works.pop().wait()
            except RuntimeError as error:
                raise TransportError(f"collective failed: {_reason(error)}") from error
        if self.works:
            return False
        if self.completed is not None:
            self.completed()
            self.completed = None
        self.tensors = ()  # the transport holds the last handle until it issues another one
        return True

    def block(self, seconds: float) -> None:
        if self.works:
            # The error says that the collective is not complete yet, or why it failed, which poll() reports.
            with suppress(RuntimeError):
                self.works[-1].wait(timedelta(seconds=seconds))


def _reason(error: RuntimeError) -> str:
    """Return Gloo's error message without its source files and its advice."""
    first = str(error).partition("\n")[0].partition(". This is typically caused by")[0]
    return re.sub(r"^\[/\S*\] ", "", first)


class TorchTransport(Transport):
    """Runs collectives on CPU memory through Gloo.

    Construction is collective over ``ranks``, which are ascending numbers in the default group. Ranks that make several
    transports of the same ranks make them in the same order. All-gathers of unequal parts use all-to-all, which is
    faster in Gloo than its all-gather. Two ranks have a second group, so that large messages are sent in both
    directions at once: Gloo's receiver reports that it is ready on the connection on which it also sends, after its own
    message.

    ``attempt`` is the number of the job's start, because the store may outlive a restart. ``rank`` and ``store`` are
    those of a job without a default group.
    """

    byte_seconds = GLOO_BYTE_SECONDS

    def __init__(
        self,
        ranks: Sequence[int],
        timeout_seconds: float,
        attempt: str = "0",
        rank: int | None = None,
        store: Any = None,
    ) -> None:
        # new_group() names a group after the number of groups that the process has. Ranks in several process sets have
        # more groups than others, so they would not use the same name.
        number = _groups_made.get((attempt, tuple(ranks)), 0)
        _groups_made[attempt, tuple(ranks)] = number + 1
        self.rank, self.size = list(ranks).index(dist.get_rank() if rank is None else rank), len(ranks)
        self._running: list[_Handle] = []
        self._copies: list[Bytes] = []
        # A connection serves one call at a time, and ranks wait for each other in such a call. Two threads that make
        # groups of different ranks over one connection could block each other for ever.
        alone = store is None and _default_connection.acquire(blocking=False)
        try:
            base = store or (_store() if alone else _connection_of_its_own(timeout_seconds))
            prefixed = PrefixStore(f"gradcomp/{attempt}/group/{','.join(map(str, ranks))}/{number}", base)
            self._groups = [
                self._make_group(prefixed, way, timeout_seconds) for way in range(1 + (self.size == 2))
            ]
        except RuntimeError as error:
            raise TransportError(f"Gloo could not connect ranks {list(ranks)}: {_reason(error)}") from error
        finally:
            if alone:
                _default_connection.release()

    def _make_group(self, store: PrefixStore, way: int, timeout_seconds: float) -> Any:
        timeout = timedelta(seconds=timeout_seconds + GROUP_TIMEOUT_MARGIN_SECONDS)
        others = threads_of_gloo()
        group = dist.ProcessGroupGloo(PrefixStore(str(way), store), self.rank, self.size, timeout)
        _let_others_finish(threads_of_gloo() - others)
        # Only close() destroys the group. A forked child must not, since it lacks the group's threads, nor the
        # interpreter when it ends.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        return group

    @property
    def group(self) -> Any:
        """Return the Gloo group; None after :meth:`close` or :meth:`abandon`."""
        return self._groups[0] if self._groups else None

    def allreduce(self, array: npt.NDArray[Any]) -> _Handle:
        tensor = torch.from_numpy(array)
        nbytes = 2 * array.nbytes * (self.size - 1) // self.size
        return self._issue(nbytes, lambda: [self.group.allreduce([tensor])], tensor)

    def alltoallv(
        self, send: Bytes, send_counts: Sequence[int], recv: Bytes, recv_counts: Sequence[int]
    ) -> _Handle:
        return self.prepare_alltoallv(send, send_counts, recv, recv_counts)()

    def allgatherv(self, buffer: Bytes, counts: Sequence[int]) -> _Handle:
        return self.prepare_allgatherv(buffer, counts)()

    def prepare_alltoallv(
        self, send: Bytes, send_counts: Sequence[int], recv: Bytes, recv_counts: Sequence[int]
    ) -> Callable[[], _Handle]:
        sent, received = send[: sum(send_counts)], recv[: sum(recv_counts)]
        if self.size == 2:
            peer = 1 - self.rank
            sends, receives = parts_of(sent, send_counts), parts_of(received, recv_counts)
            start = self._between_two(receives[peer], sends[peer])
            kept, own = receives[self.rank], sends[self.rank]
            if not len(own):
                return start

            def copy_and_start() -> _Handle:
                kept[:] = own
                return start()

            return copy_and_start
        target, source = torch.from_numpy(received), torch.from_numpy(sent)
        out_splits, in_splits = list(recv_counts), list(send_counts)
        nbytes = sum(send_counts) - send_counts[self.rank]

        def call() -> list[Any]:
            return [self.group.alltoall_base(target, source, out_splits, in_splits)]

        return partial(self._issue, nbytes, call, target, source)

    def prepare_allgatherv(self, buffer: Bytes, counts: Sequence[int]) -> Callable[[], _Handle]:
        parts = parts_of(buffer, counts)
        own = parts[self.rank]
        if self.size == 2:
            return self._between_two(parts[1 - self.rank], own)
        target = torch.from_numpy(buffer[: sum(counts)])
        out_splits, in_splits = list(counts), [len(own)] * self.size
        nbytes = (self.size - 1) * len(own)

        def start() -> _Handle:
            # Gloo takes a copy of the part for each rank. There is as much memory for copies as collectives under way
            # need at once, whatever their sizes.
            memory, needed = self._copies.pop() if self._copies else _NO_COPIES, self.size * len(own)
            if len(memory) < needed:
                memory = np.empty(needed, dtype=np.uint8)
            memory[:needed].reshape(self.size, len(own))[:] = own
            source = torch.from_numpy(memory[:needed])

            def call() -> list[Any]:
                return [self.group.alltoall_base(target, source, out_splits, in_splits)]

            handle = self._issue(nbytes, call, target, source)
            handle.completed = lambda: self._copies.append(memory)
            return handle

        return start

    def _between_two(self, recv: Bytes, send: Bytes) -> Callable[[], _Handle]:
        """Return a function that exchanges these messages with the other one of two ranks.

        Large ones travel both ways at once: rank 0 sends in the first group, rank 1 in the second.
        """
        peer = 1 - self.rank
        received, sent = torch.from_numpy(recv), torch.from_numpy(send)
        nothing, none, there, back = sent[:0], [0, 0], [0, 0], [0, 0]
        there[peer], back[peer] = len(sent), len(received)

        def together() -> list[Any]:
            return [self.group.alltoall_base(received, sent, back, there)]

        def both_ways() -> list[Any]:
            return [
                self._groups[self.rank].alltoall_base(nothing, sent, none, there),
                self._groups[peer].alltoall_base(received, nothing, back, none),
            ]

        call = both_ways if max(len(sent), len(received)) >= _BOTH_WAYS_BYTES else together
        return partial(self._issue, len(sent), call, received, sent)

    def _issue(self, nbytes: int, call: Callable[[], list[Any]], *tensors: torch.Tensor) -> _Handle:
        self.bytes_sent += nbytes
        try:
            handle = _Handle(call(), tensors)
        except RuntimeError as error:
            raise TransportError(f"collective failed: {_reason(error)}") from error
        self._running = [*(one for one in self._running if one.works), handle]
        return handle

    def abandon(self) -> None:
        """Give the groups up after a failure, because their destructors would wait for collectives that never end.

        Collectives that still run are never freed: Gloo's thread would free them when they end, for which it takes the
        interpreter's lock, and a thread that asks for the lock while the interpreter ends aborts the process.
        """
        self._groups = []
        running, self._running = self._running, []
        for work in (work for handle in running for work in handle.works):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(work))

    def close(self) -> None:
        """Destroy the groups, unless they were abandoned."""
        groups, self._groups = self._groups, []
        for group in groups:
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(group))


def threads_of_gloo() -> set[int]:
    """Return the threads of this process that serve Gloo's connections; none where this is not known."""
    found = set()
    with suppress(OSError):
        for thread in Path("/proc/self/task").iterdir():
            with suppress(OSError):  # it may have ended
                if (thread / "comm").read_text().strip() == _GLOO_THREAD:
                    found.add(int(thread.name))
    return found


def _let_others_finish(threads: Iterable[int]) -> None:
    """Give threads the policy SCHED_BATCH: when they wake up, they do not take the core from a thread that runs.

    Gloo's thread polls without a pause while another thread holds the lock of its connection. With Linux's default
    policy a thread that wakes up may take the core at once. So Gloo's thread took it from the thread that held the
    lock, and polled until the next tick of the timer. ``benchmarks/gloo_threads.py`` measures what that costs.
    """
    for thread in threads:
        try:
            if os.sched_getscheduler(thread) == os.SCHED_OTHER:
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
        except OSError as error:
            logger.debug("the scheduling policy of Gloo's thread could not be changed: %s", error)


def _store() -> Any:
    """Return the default group's store without its prefixes, which another connection would not have."""
    store: Any = dist.distributed_c10d._get_default_store()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def _connection_of_its_own(timeout_seconds: float) -> Any:
    """Return another connection to the default group's store; the store itself if it is no TCPStore."""
    store = _store()
    if not isinstance(store, TCPStore):
        return store
    timeout = timedelta(seconds=timeout_seconds)
    return TCPStore(store.host, store.port, None, is_master=False, timeout=timeout, wait_for_workers=False)


class TorchControl(ControlChannel):
    """Uses the job's store over a connection of its own, which a thread of its own calls.

    A TCPStore client waits for ever if the server is stopped but not dead, hence the thread: callers wait three seconds
    for an answer, and fail at once as long as an earlier call has no answer. ``server`` names the server in errors.
    ``connect`` opens the connection, if not to the default group's store.

    PyTorch prints a stack for every call on a connection that has ended, so no call is made after the first such one.
    """

    def __init__(
        self,
        prefix: str,
        timeout_seconds: float,
        server: str = "rank 0",
        connect: Callable[[], Any] | None = None,
    ) -> None:
        # The training thread may be using the default group's connection for a blocking call.
        before = open_sockets()
        try:
            store = _connection_of_its_own(timeout_seconds) if connect is None else connect()
        except RuntimeError as error:
            raise TransportError(f"no connection to the job's key-value store: {_reason(error)}") from error
        made = open_sockets().items() - before.items() if isinstance(store, TCPStore) else set()
        self._socket = made.pop() if len(made) == 1 else None
        self._store = PrefixStore(prefix, store)
        self._server = server
        self._calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._unanswered: Future[Any] | None = None
        self._gone = False
        self._thread = threading.Thread(target=self._serve, name="gradcomp-control", daemon=True)
        self._thread.start()

    def publish(self, key: str, value: bytes) -> None:
        self._call(lambda: self._store.set(key, value.decode(errors="replace")))

    def lookup(self, key: str) -> bytes | None:
        found = self._call(lambda: self._store.get(key) if self._store.check([key]) else None)
        return None if found is None else bytes(found)

    def close(self) -> None:
        """End the thread; if it waits for an answer, shut down the connection that it waits on.

        A thread that is inside the client when the interpreter ends would abort the process with SIGABRT.
        """
        if threading.current_thread() is self._thread:
            return
        self._calls.put(None)
        self._thread.join(_END_SECONDS)
        if self._thread.is_alive() and self._socket is not None:
            cut(*self._socket)
            self._thread.join(_ANSWER_SECONDS)

    def _call(self, work: Callable[[], Any]) -> Any:
        silent = StoreSilentError(f"the job's key-value store, served by {self._server}, does not answer")
        if self._unanswered is not None and not self._unanswered.done():
            raise silent
        future: Future[Any] = Future()
        self._calls.put((work, future))
        try:
            return future.result(_ANSWER_SECONDS)
        except TimeoutError:
            self._unanswered = future
            raise silent from None
        except (ConnectionError, RuntimeError) as error:
            raise TransportError(f"the job's key-value store, served by {self._server}, is gone") from error

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            work, future = call
            self._gone |= self._socket is not None and hung_up(*self._socket)
            try:
                if self._gone:
                    raise ConnectionError("the connection has ended")
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001 - the calling thread raises it
                self._gone |= isinstance(error, RuntimeError)
                future.set_exception(error)
