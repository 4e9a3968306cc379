"""NCCL over its stand-in: what goes together, what memory is kept, and how ranks meet."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cuda_on_cpu.nccl import Communicator, QueuedDriver, World, nccl_ranks
from threads import meets, on_each

from gradcomp.core.errors import ConfigError, TransportError, WireFormatError
from gradcomp.transport.base import wait
from gradcomp.transport.nccl import NcclTransport


def test_an_operation_is_one_group_and_what_goes_to_all_is_copied_once() -> None:
    ranks = nccl_ranks(3)
    communicators: list[Any] = [rank._communicator for rank in ranks]
    for communicator in communicators:
        communicator.groups.clear()
    uploaded: list[int] = []
    driver = communicators[0].driver
    upload = driver.upload
    driver.upload = lambda address, source: (uploaded.append(source.nbytes), upload(address, source))
    buffers = [np.full(3 * 1600, rank, np.uint8) for rank in range(3)]
    for handle in [rank.allgatherv(buffer, [1600] * 3) for rank, buffer in zip(ranks, buffers, strict=True)]:
        wait(handle)
    assert all(buffer.tolist() == [0] * 1600 + [1] * 1600 + [2] * 1600 for buffer in buffers)
    assert [communicator.groups for communicator in communicators] == [[4]] * 3
    assert uploaded == [1600]
    downloaded: list[int] = []
    download = driver.download
    driver.download = lambda target, address: (downloaded.append(target.nbytes), download(target, address))
    received = [np.zeros(1600, np.uint8) for _ in range(2)]
    sent = [np.full(1600, rank, np.uint8) for rank in range(3)]
    handles = [
        ranks[0].exchange([(1, sent[1]), (2, sent[2])], [(1, received[0]), (2, received[1])]),
        ranks[1].exchange([(0, sent[1])], [(0, buffers[1][:1600])]),
        ranks[2].exchange([(0, sent[2])], [(0, buffers[2][:1600])]),
    ]
    for handle in handles:
        wait(handle)
    assert (uploaded, downloaded) == ([1600, 3200], [3200])  # one copy each way
    assert [set(each.tolist()) for each in received] == [{1}, {2}]


def test_memory_is_kept_for_an_operation_whose_handle_is_forgotten() -> None:
    ranks = nccl_ranks(2)
    sent = np.arange(200, dtype=np.uint8)
    ranks[0].exchange([(1, sent)], [])
    gc.collect()
    assert len(ranks[0]._under_way) == 1
    received = np.zeros(200, np.uint8)
    wait(ranks[1].exchange([], [(0, received)]))
    assert received.tobytes() == sent.tobytes()
    assert not ranks[1]._under_way


def test_what_is_sent_is_kept_until_it_has_been_copied() -> None:
    ranks = nccl_ranks(2)
    started = threading.Event()
    ranks[0]._driver.start(started.wait)  # the stream has not come so far
    sent = [ranks[0].exchange([(1, np.full(200, number, dtype=np.uint8))], []) for number in (1, 2)]
    gc.collect()
    started.set()
    for number in (1, 2):
        received = np.zeros(200, np.uint8)
        wait(ranks[1].exchange([], [(0, received)]))
        assert received.tolist() == [number] * 200
    for handle in sent:
        wait(handle)


@pytest.mark.parametrize("left", ["abandon", "close"])
def test_a_communicator_is_released_once(left: str) -> None:
    ranks = nccl_ranks(1)
    getattr(ranks[0], left)()
    ranks[0].close()
    ranks[0].abandon()
    assert ranks[0]._communicator.released  # it asserts that it was not before


def test_abandoning_ends_what_is_under_way() -> None:
    ranks = nccl_ranks(2)
    handle = ranks[0].allreduce(np.ones(10, np.float32))
    assert not handle.poll()
    ranks[1].abandon()
    with pytest.raises(TransportError, match="NCCL failed: rank 1 is gone"):
        wait(handle)


def test_a_rank_that_goes_while_the_others_connect() -> None:
    world = World(2)
    world.kill(1)
    communicator = Communicator(world, 0)
    communicator._on_device = lambda *_: None  # it is noticed by polling only
    with pytest.raises(TransportError, match="rank 1 is gone"):
        NcclTransport(communicator, 30.0)
    assert communicator.released


@pytest.mark.alone
def test_a_rank_that_never_talks() -> None:
    world = World(2)
    communicator = Communicator(world, 0)
    begin = time.monotonic()
    with pytest.raises(TransportError, match="did not connect all of 2 ranks in 1 s"):
        NcclTransport(communicator, 1.0)
    assert time.monotonic() - begin < 10
    assert communicator.released


# --- CuPy's ---------------------------------------------------------------------------------------------------


class FakeNcclError(RuntimeError):
    """NcclError."""


class FakeRuntimeError(RuntimeError):
    """CUDARuntimeError."""


class Machine:
    """A module named cupy, for ranks that are threads, and what NCCL would see."""

    def __init__(self, size: int) -> None:
        self.place = threading.local()
        self.worlds: dict[bytes, World] = {}
        self.size = size
        self.log: dict[int, list[tuple[Any, ...]]] = {rank: [] for rank in range(size)}
        self.slow = 0.0
        machine = self

        class Device:
            def __init__(self) -> None:
                if machine.place.gpu is None:
                    raise FakeRuntimeError("no CUDA-capable device is detected")
                self.id = machine.place.gpu
                self.pci_bus_id = f"0000:0{self.id}:00.0"

        class NcclCommunicator:
            def __init__(self, size: int, identity: bytes, rank: int) -> None:
                time.sleep(machine.slow)
                self.rank = rank
                self.inner = Communicator(machine.worlds.setdefault(identity, World(size)), rank)
                machine.place.communicator = self

            def __getattr__(self, name: str) -> Any:
                return lambda *arguments: machine.log[self.rank].append((name, *arguments))

            def check_async_error(self) -> None:
                raise FakeNcclError("NCCL_ERROR_REMOTE_ERROR")

        def note(name: str) -> Callable[[], None]:
            return lambda: machine.log[machine.place.rank].append((name,))

        nccl = SimpleNamespace(
            available=True, get_unique_id=lambda: b"\x01" * 128, NcclCommunicator=NcclCommunicator,
            NcclError=FakeNcclError, groupStart=note("groupStart"), groupEnd=note("groupEnd"),
            NCCL_UINT8="bytes", NCCL_FLOAT32="float32", NCCL_FLOAT64="float64", NCCL_SUM="sum",
        )  # fmt: skip
        self.nccl = nccl
        self.cupy: Any = ModuleType("cupy")
        self.cupy.cuda = ModuleType("cupy.cuda")
        self.cupy.cuda.nccl = nccl
        self.cupy.cuda.Device = Device
        self.cupy.cuda.runtime = SimpleNamespace(CUDARuntimeError=FakeRuntimeError)


class Driver(QueuedDriver):
    """What CuPy's driver has beside the stand-in's."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index

    def current(self) -> Any:
        return nullcontext()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(3)
    over_cupy: Any = ModuleType("gradcomp.kernels.cuda.over_cupy")
    over_cupy.driver = Driver
    monkeypatch.setitem(sys.modules, "cupy", made.cupy)
    monkeypatch.setitem(sys.modules, "cupy.cuda", made.cupy.cuda)
    monkeypatch.setitem(sys.modules, "gradcomp.kernels.cuda.over_cupy", over_cupy)
    monkeypatch.setenv("NCCL_RUNTIME_CONNECT", "0")
    return made


def joined(machine: Machine, gpus: list[int | None], seconds: float = 30.0) -> list[Any]:
    from gradcomp.transport import nccl as nccl_module

    meet = meets(len(gpus))

    def work(rank: int) -> Any:
        machine.place.gpu, machine.place.rank = gpus[rank], rank
        return nccl_module.nccl_transport(rank, len(gpus), meet[rank], seconds)

    return on_each(len(gpus), work)


def no_identity() -> bytes:
    raise FakeNcclError("NCCL_ERROR_SYSTEM_ERROR")


@pytest.mark.parametrize(
    ("gpus", "spoil", "complaint"),
    [
        ([0, 1, 0], {}, "ranks 0 and 2 are both on GPU 0000:00:00.0 of .*, but NCCL needs one for each"),
        ([0, None, 2], {}, "rank 1: the nccl transport needs a GPU: no CUDA-capable device"),
        ([0, 1], {"available": False}, r"rank 0: .* CuPy does not find: pip install 'gradcomp\[nccl13\]'"),
        ([0, 1], {"get_unique_id": no_identity}, "rank 0: NCCL cannot begin: NCCL_ERROR_SYSTEM_ERROR"),
        ([0, 1], None, r"rank 0: .* needs CuPy and NCCL: pip install 'gradcomp\[nccl13\]'"),
    ],
)
def test_all_ranks_hear_what_is_wrong_with_one(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, gpus: list[int | None], spoil: Any, complaint: str
) -> None:
    if spoil is None:
        monkeypatch.setitem(sys.modules, "cupy", None)
    else:
        vars(machine.nccl).update(spoil)
    for found in joined(machine, gpus):
        with pytest.raises(ConfigError, match=complaint):
            raise found


@pytest.mark.parametrize(
    ("told", "complaint"),
    [
        (b'{"device": "a"}', "has no identity"),
        (b'{"device": "a", "id": "no digits"}', "has no identity"),
        *((part, "start-up message of a rank") for part in (b"\xff", b"[]", b"3")),
    ],
)
def test_what_another_rank_says_of_itself_is_checked(machine: Machine, told: bytes, complaint: str) -> None:
    from gradcomp.transport import nccl as nccl_module

    machine.place.gpu, machine.place.rank = 0, 1
    with pytest.raises(WireFormatError, match=complaint):
        nccl_module.nccl_transport(1, 2, lambda mine: [told, mine], 5.0)


def test_ranks_that_do_not_come_together_in_time(machine: Machine) -> None:
    machine.slow = 5.0
    for found in joined(machine, [0, 1], 0.5):
        with pytest.raises(TransportError, match="did not connect 2 ranks in"):
            raise found


def test_calls_of_nccl(machine: Machine) -> None:
    """Names, order of arguments and constants, as CuPy 14 has them; an error of NCCL's is a TransportError."""
    from gradcomp.transport.nccl import CupyCommunicator

    driver = Driver(0)
    machine.place.rank = 1
    ours = CupyCommunicator(machine.nccl, driver, b"id", 1, 3)
    with ours.together():
        ours.send(256, 10, 2)
        ours.recv(512, 20, 0)
    ours.add_up(1024, 5, np.dtype(np.float64))
    ours.reduce(2048, 6, 2)
    ours.broadcast(4096, 30, 1)
    ours.abort()
    ours.destroy()
    stream = driver.stream
    assert machine.log[1] == [
        ("groupStart",),
        ("send", 256, 10, "bytes", 2, stream),
        ("recv", 512, 20, "bytes", 0, stream),
        ("groupEnd",),
        ("allReduce", 1024, 1024, 5, "float64", "sum", stream),
        ("reduce", 2048, 2048, 6, "float32", "sum", 2, stream),
        ("broadcast", 4096, 4096, 30, "bytes", 1, stream),
        ("abort",),
        ("destroy",),
    ]
    with pytest.raises(TransportError, match="NCCL failed: NCCL_ERROR_REMOTE_ERROR"):
        ours.check()


@pytest.mark.parametrize(("set_before", "found"), [("", "0"), ("1", "1")])
def test_connections_are_made_with_the_communicator_unless_the_user_has_said_otherwise(
    set_before: str, found: str, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NCCL_RUNTIME_CONNECT")
    if set_before:
        monkeypatch.setenv("NCCL_RUNTIME_CONNECT", set_before)
    joined(machine, [0])
    assert os.environ["NCCL_RUNTIME_CONNECT"] == found


def test_a_status_that_cupy_has_no_name_for(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    from gradcomp.transport.nccl import CupyCommunicator

    machine.place.rank = 0
    ours = CupyCommunicator(machine.nccl, Driver(0), b"id", 0, 1)

    def status(number: int) -> None:
        def ask(_: Any) -> None:
            raise KeyError(number)

        monkeypatch.setattr(machine.nccl.NcclCommunicator, "check_async_error", ask)

    status(7)
    ours.check()  # "in progress" is no failure
    status(8)
    with pytest.raises(TransportError, match="NCCL failed with status 8"):
        ours.check()


def test_the_thread_that_meets_the_others_works_on_their_gpu(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gradcomp.transport import nccl as nccl_module

    monkeypatch.setattr(nccl_module, "NcclTransport", lambda communicator, _: communicator)
    for communicator in joined(machine, [0, 1]):
        (thread,) = communicator.driver.current_in
        assert thread != threading.get_ident()
