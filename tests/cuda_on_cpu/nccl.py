"""NCCL's stand-in: ranks are threads of one process, each with a stream that runs what was started, in order, later."""

from __future__ import annotations

import ctypes
import queue
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from kernels.standin import FOLDER
from threads import on_each

from cuda_on_cpu.driver import CpuDriver
from gradcomp.core.errors import TransportError
from gradcomp.core.topology import Topology
from gradcomp.transport.inprocess import World as InProcessWorld
from gradcomp.transport.nccl import NcclTransport
from gradcomp.transport.two_level import TwoLevelTransport


class QueuedDriver(CpuDriver):
    """Copies and operations run on a thread; nothing that was started is done before it has come to it."""

    def __init__(self) -> None:
        super().__init__(FOLDER)
        self._pages: list[np.ndarray] = []
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            while True:
                self._work.get()()
        except TransportError:
            pass  # a stream on which an operation failed goes no further

    def stop(self) -> None:
        raise TransportError("the stream is gone")

    def start(self, work: Callable[[], None]) -> None:
        self._work.put(work)

    def pinned(self, nbytes: int) -> np.ndarray:
        """Whoever lets go of it while a copy is still to come finds it overwritten, as by the pool's next owner."""
        page = np.full(nbytes + 1, 0xA7, dtype=np.uint8)
        self._pages.append(page)
        room = (ctypes.c_uint8 * len(page)).from_address(page.ctypes.data)
        weakref.finalize(room, page.fill, 0xEE)
        return np.frombuffer(room, np.uint8)[:nbytes]

    def upload(self, address: int, source: np.ndarray) -> None:
        data, nbytes = source.ctypes.data, source.nbytes
        self.start(lambda: ctypes.memmove(address, data, nbytes))

    def download(self, target: np.ndarray, address: int) -> None:
        data, nbytes = target.ctypes.data, target.nbytes
        self.start(lambda: ctypes.memmove(data, address, nbytes))

    def mark(self, stream: int) -> threading.Event:
        assert stream == self.stream
        event = threading.Event()
        self.start(event.set)
        return event

    def reached(self, event: threading.Event) -> bool:
        return event.is_set()

    def synchronize(self) -> None:
        assert self.mark(self.stream).wait(30)


class World:
    """Messages on their way. A send ends when the message was taken, as NCCL's may."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._changed = threading.Condition()
        self._mail: dict[tuple[int, int], list[bytes]] = {}
        self._met: dict[tuple[str, int], dict[int, np.ndarray]] = {}
        self._failure = ""

    def kill(self, rank: int) -> None:
        with self._changed:
            self._failure = self._failure or f"rank {rank} is gone"
            self._changed.notify_all()

    def check(self) -> None:
        if self._failure:
            raise TransportError(f"NCCL failed: {self._failure}")

    def _wait_for(self, true: Callable[[], bool]) -> None:
        self._changed.notify_all()
        self._changed.wait_for(lambda: self._failure or true())
        self.check()

    def exchange(
        self, rank: int, sends: list[tuple[int, int, int]], recvs: list[tuple[int, int, int]]
    ) -> None:
        with self._changed:
            boxes = [self._mail.setdefault((rank, to), []) for _, _, to in sends]
            for box, (address, nbytes, _) in zip(boxes, sends, strict=True):
                box.append(ctypes.string_at(address, nbytes))
            for address, nbytes, source in recvs:
                box = self._mail.setdefault((source, rank), [])
                self._wait_for(lambda box=box: box)
                message = box.pop(0)
                if len(message) != nbytes:
                    self._failure = f"rank {source} sent {len(message)} bytes, {nbytes} were expected"
                    self._wait_for(lambda: True)
                ctypes.memmove(address, message, nbytes)
            self._wait_for(lambda: not any(boxes))

    def collective(self, kind: str, number: int, rank: int, root: int, array: np.ndarray) -> None:
        """Numbers are by kind. The sum for a root is in descending order of ranks, that for all in ascending order."""
        with self._changed:
            parts = self._met.setdefault((kind, number), {})
            parts[rank] = array.copy()
            self._wait_for(lambda: len(parts) == self.size)
            order = range(self.size) if kind == "allreduce" else range(self.size)[::-1]
            if kind == "broadcast":
                array[:] = parts[root]
            elif kind == "allreduce" or rank == root:
                with np.errstate(all="ignore"):
                    array[:] = np.sum([parts[other] for other in order], axis=0, dtype=array.dtype)


def nccl_ranks(size: int) -> list[NcclTransport]:
    """Transports of ranks that are threads."""
    world = World(size)
    return on_each(size, lambda rank: NcclTransport(Communicator(world, rank), 30.0))


def hosts_over_nccl(hosts: tuple[int, ...]) -> list[TwoLevelTransport]:
    """Transports of ranks that are threads: the stand-in inside hosts, and between hosts in process."""
    topology = Topology(hosts)
    numbers = range(len(topology.leaders))
    remote, leaders = InProcessWorld(topology.world).transports(), InProcessWorld(len(numbers)).transports()
    local = [nccl_ranks(hosts.count(host)) for host in numbers]
    back = [InProcessWorld(hosts.count(host)).transports() for host in numbers]
    made = []
    for rank, host in enumerate(hosts):
        place = topology.members(rank).index(rank)
        leads = leaders[host] if rank in topology.leaders else None
        made.append(TwoLevelTransport(local[host][place], remote[rank], topology, leads, back[host][place]))
    return made


class Communicator:
    """See gradcomp.transport.nccl; notes in ``groups`` how many messages went together."""

    def __init__(self, world: World, rank: int) -> None:
        self.rank, self.size, self.world = rank, world.size, world
        self.driver: Any = QueuedDriver()
        self.groups: list[int] = []
        self._sends: list[tuple[int, int, int]] = []
        self._recvs: list[tuple[int, int, int]] = []
        self._numbers: Counter[str] = Counter()
        self.released = False

    def _on_device(self, address: int, nbytes: int) -> None:
        self.check()
        assert nbytes
        assert self.driver.reaches(address)
        assert self.driver.reaches(address + nbytes - 1)

    @contextmanager
    def together(self) -> Iterator[None]:
        yield
        sends, recvs = self._sends, self._recvs
        self._sends, self._recvs = [], []
        self.groups.append(len(sends) + len(recvs))
        self.driver.start(lambda: self.world.exchange(self.rank, sends, recvs))

    def send(self, address: int, nbytes: int, to: int) -> None:
        assert to != self.rank
        self._on_device(address, nbytes)
        self._sends.append((address, nbytes, to))

    def recv(self, address: int, nbytes: int, source: int) -> None:
        assert source != self.rank
        self._on_device(address, nbytes)
        self._recvs.append((address, nbytes, source))

    def add_up(self, address: int, count: int, dtype: np.dtype[Any]) -> None:
        self._together("allreduce", address, count, dtype, 0)

    def reduce(self, address: int, count: int, root: int) -> None:
        self._together("reduce", address, count, np.dtype(np.float32), root)

    def broadcast(self, address: int, nbytes: int, root: int) -> None:
        self._together("broadcast", address, nbytes, np.dtype(np.uint8), root)

    def _together(self, kind: str, address: int, count: int, dtype: np.dtype[Any], root: int) -> None:
        assert 0 <= root < self.size
        self._on_device(address, count * dtype.itemsize)
        assert address % dtype.itemsize == 0
        number, self._numbers[kind] = self._numbers[kind], self._numbers[kind] + 1
        room = (ctypes.c_uint8 * (count * dtype.itemsize)).from_address(address)
        array = np.frombuffer(room, dtype)
        self.driver.start(lambda: self.world.collective(kind, number, self.rank, root, array))

    def check(self) -> None:
        self.world.check()

    def abort(self) -> None:
        assert not self.released
        self.released = True
        self.world.kill(self.rank)
        self.driver.start(self.driver.stop)

    def destroy(self) -> None:
        assert not self.released
        self.driver.synchronize()
        self.released = True
        self.driver.start(self.driver.stop)
