"""What the driver makes of CUDA's answers, by either package: devices of threads, errors, memory that is full."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kernels import fake_bindings, fake_cupy
from kernels.carried import Carried
from kernels.groups import CODECS, Group, Segment, nearest_level

from gradcomp.core.errors import ConfigError, DeviceError, StateError
from gradcomp.kernels import reference
from gradcomp.kernels.cuda import driver as driver_module
from gradcomp.kernels.cuda import over_cuda
from gradcomp.kernels.cuda.backend import CudaKernels


@pytest.fixture(params=[fake_cupy, fake_bindings], ids=["cupy", "bindings"])
def made(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any]]:
    """A driver of device 1, in a program whose threads begin on device 0."""
    monkeypatch.setattr(driver_module, "_lent", {})
    with request.param.installed() as (fake, driver):
        yield fake, driver(1)


BY_CUPY = pytest.mark.parametrize("made", [fake_cupy], ids=["cupy"], indirect=True)
BY_BINDINGS = pytest.mark.parametrize("made", [fake_bindings], ids=["bindings"], indirect=True)


@pytest.mark.parametrize(("status", "answer"), [(0, True), (600, False)])
def test_an_event_is_reached_or_not_yet(status: int, answer: bool, made: Any) -> None:
    fake, driver = made
    event = driver.mark(5)
    fake.event_status = status
    assert driver.reached(event) is answer


def test_an_event_of_a_device_that_failed_is_an_error_with_cudas_text(made: Any) -> None:
    fake, driver = made
    event = driver.mark(5)
    fake.event_status = 700
    with pytest.raises(DeviceError, match="cuda:1 failed: cudaErrorIllegalAddress: an illegal memory access"):
        driver.reached(event)


def test_copies_and_waits_on_a_device_that_failed_are_the_same_error(made: Any) -> None:
    fake, driver = made
    fake.status = 700
    for call in (
        driver.synchronize,
        lambda: driver.zero(0, 4),
        lambda: driver.download(driver.pinned(4), 0),
        lambda: driver.upload(0, driver.pinned(4)),
    ):
        with pytest.raises(DeviceError, match="cudaErrorIllegalAddress"):
            call()


@BY_CUPY
def test_a_launch_that_fails_is_the_same_error(made: Any) -> None:
    _, driver = made

    def function(*_: Any) -> None:
        raise fake_cupy.DriverFailure("CUDA_ERROR_ILLEGAL_ADDRESS")

    with pytest.raises(DeviceError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        driver.launch(function, 1, 32, np.zeros(8, np.uint8))


@BY_BINDINGS
def test_a_launch_that_the_bindings_report_is_the_same_error(made: Any) -> None:
    fake, driver = made
    fake.launch_status = 700
    with pytest.raises(DeviceError, match="CUDA_ERROR_ILLEGAL_ADDRESS: what the driver says"):
        driver.launch(0, 1, 32, np.zeros(8, np.uint8))


@BY_CUPY
def test_a_struct_of_parameters_is_one_argument_by_value(made: Any) -> None:
    """CuPy passes what an array of one element holds, of any type."""
    _, driver = made
    given: list[Any] = []
    parameters = np.arange(24, dtype=np.uint8)
    driver.launch(lambda *launched: given.append(launched), 3, 32, parameters)
    ((blocks, threads, (struct,)),) = given
    assert (blocks, threads) == ((3,), (32,))
    assert (struct.size, struct.itemsize) == (1, 24)
    assert struct.tobytes() == parameters.tobytes()
    assert struct.__array_interface__["data"] == parameters.__array_interface__["data"]


def test_as_many_blocks_run_at_a_time_as_all_processors_hold(made: Any) -> None:
    """By the device's own number of processors, and what CUDA says of the kernel; one where it says none."""
    fake, driver = made
    kernel = SimpleNamespace(kernel=SimpleNamespace(ptr=99))
    assert driver.resident(kernel, 256) == 3 * 132
    ((_, *asked),) = fake.asked
    assert asked == [256, 0]
    fake.blocks = 0
    assert driver.resident(kernel, 256) == 1


@pytest.mark.parametrize("stream", [5, 0], ids=["the stream itself", "the default one beside it"])
def test_gradients_of_a_stream_that_is_captured_are_refused(stream: int, made: Any) -> None:
    fake, driver = made
    fake.capturing = {5}
    with pytest.raises(StateError, match="captured into a CUDA graph"):
        driver.mark(stream)


def test_a_thread_of_our_own_stays_on_its_device(made: Any) -> None:
    fake, driver = made
    fake.devices_used.clear()

    def work() -> None:
        driver.make_current()
        for _ in range(3):
            driver.reached(driver.mark(5))
            driver.allocate(64)
            driver.synchronize()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert fake.devices_used == {1}  # CUDA makes a context on every device that a thread goes to


def test_a_thread_of_the_script_is_back_on_its_device_after_a_call(made: Any) -> None:
    fake, driver = made
    driver.allocate(64)
    assert fake.get_device() == 0
    fake.status = 700
    with pytest.raises(DeviceError):
        driver.synchronize()
    assert fake.get_device() == 0


def test_the_stream_goes_before_others(made: Any) -> None:
    fake, _ = made
    (settings,) = fake.streams
    assert settings["non_blocking"]
    assert settings["priority"] < 0


def test_the_pool_is_counted_whatever_device_is_current(made: Any) -> None:
    _, driver = made
    assert driver.pooled_bytes == 4096


def test_a_full_device_is_an_error_that_says_who_holds_what(made: Any) -> None:
    fake, driver = made
    fake.free = 1000
    with pytest.raises(
        DeviceError, match=r"no memory for 2000 bytes: 123 of 456 are free; .* holds 4096, 4096 of"
    ):
        driver.allocate(2000)
    assert fake.freed == 1


class Lent:
    """A framework's allocator, of which some bytes are kept and not in use."""

    def __init__(self, free: int, kept: int) -> None:
        self.free, self.kept, self.asked = free, kept, []

    def allocate(self, nbytes: int, stream: int) -> Any:
        self.asked.append((nbytes, stream))
        if nbytes > self.free:
            raise MemoryError("full")
        return SimpleNamespace(address=512)

    def release(self) -> None:
        self.free, self.kept = self.free + self.kept, 0

    def describe(self) -> str:
        return f"Framework holds {self.free} bytes"


def test_memory_comes_from_the_framework_that_lends_it(made: Any) -> None:
    fake, driver = made
    pool = Lent(100, 0)
    driver_module.lend(1, pool)
    fake.free = 0
    assert driver.allocate(64).address == 512
    assert pool.asked == [(64, driver.stream)]


def test_what_a_framework_keeps_and_does_not_use_is_given_back_once(made: Any) -> None:
    _, driver = made
    pool = Lent(100, 1000)
    driver_module.lend(1, pool)
    assert driver.allocate(500).address == 512
    with pytest.raises(DeviceError, match=r"no memory for 5000 bytes.*Framework holds 1100 bytes"):
        driver.allocate(5000)
    assert len(pool.asked) == 4


def test_memory_of_another_device_is_not_taken(made: Any) -> None:
    _, driver = made
    driver_module.lend(0, Lent(0, 0))
    assert driver.allocate(64).address % 256 == 0


def test_pinned_memory_has_the_size_that_was_asked_for(made: Any) -> None:
    _, driver = made
    assert len(driver.pinned(5)) == 5
    assert driver.pinned(0).dtype == np.uint8


# --- what only the bindings leave to the driver ----------------------------------------------------------------------


@BY_BINDINGS
@pytest.mark.parametrize("codec", ["minmax", "l2", "onebit", "e2m1"])
def test_kernels_that_the_bindings_launch_give_the_bytes_of_the_reference(codec: str, made: Any) -> None:
    _, driver = made
    rng = np.random.default_rng(3)
    rows = [
        Segment(
            rng.normal(size=length).astype(np.float32),
            rng.normal(size=length).astype(np.float32),
            bits=nearest_level(CODECS[codec], 4),
            bucket_size=100,
        )
        for length in (0, 1, 777)
    ]
    group = Group(CODECS[codec], rows)
    backend = Carried(CudaKernels(driver), driver)
    payload = group.encode(reference, stochastic=True)
    assert group.encode(backend, stochastic=True) == payload
    assert group.decode(backend, payload.payload) == group.decode(reference, payload.payload)


@BY_BINDINGS
def test_memory_and_events_go_back_with_their_last_reference(made: Any) -> None:
    fake, driver = made
    block, event = driver.allocate(100), driver.mark(5)
    assert len(fake._blocks) == 1
    del block, event
    assert (len(fake._blocks), fake.destroyed) == (0, 1)


@BY_BINDINGS
def test_pinned_memory_is_used_again_when_no_array_looks_at_it(made: Any) -> None:
    fake, driver = made
    first = driver.pinned(700)
    part = first[600:]
    del first
    driver.pinned(1024)  # beside it, for a part is still there
    assert len(fake.pinned) == 2
    del part
    kept = [driver.pinned(513) for _ in range(3)]
    assert len(fake.pinned) == 3
    assert len({array.ctypes.data for array in kept}) == 3


@BY_BINDINGS
def test_what_cuda_would_tell_pytorch_next_is_forgotten(made: Any) -> None:
    """CUDA keeps the last status that is no success, and PyTorch asks for it behind kernels of its own."""
    fake, driver = made
    event = driver.mark(5)
    assert driver.reached(event)
    assert fake.forgotten == 0
    fake.event_status = 600
    assert not driver.reached(event)
    fake.free = 0
    with pytest.raises(DeviceError, match="no memory"):
        driver.allocate(1)
    fake.status = 700
    with pytest.raises(DeviceError):
        driver.synchronize()
    assert fake.forgotten == 4


@BY_BINDINGS
def test_an_address_is_a_devices_or_an_error(made: Any) -> None:
    _, driver = made
    block = driver.allocate(8)
    assert over_cuda.index_of(driver._cuda, block.address) == 1
    with pytest.raises(ConfigError, match="not in the memory of a CUDA device"):
        over_cuda.index_of(driver._cuda, np.zeros(1).ctypes.data)


def test_the_real_bindings_have_what_the_fake_has() -> None:
    """Each function, with as many arguments; each attribute."""
    runtime = pytest.importorskip("cuda.bindings.runtime")
    driver = pytest.importorskip("cuda.bindings.driver")
    fake = fake_bindings.Fake()
    for real, pretended in ((runtime, fake.runtime), (driver, fake.driver)):
        for name, value in vars(pretended).items():
            if name.startswith("__"):
                continue
            assert hasattr(real, name), name
            if isinstance(value, SimpleNamespace):
                for attribute, number in vars(value).items():
                    assert int(getattr(getattr(real, name), attribute)) == number, attribute
            elif callable(value) and name != "CUresult":
                told = getattr(real, name).__doc__.splitlines()[0]
                counted = told.partition("(")[2].rstrip(")").count(",") + (not told.endswith("()"))
                taken = value.__func__.__code__
                assert counted == taken.co_argcount - 1 or taken.co_flags & 4, told
    assert fake_bindings.Status.cudaErrorNotReady == runtime.cudaError_t.cudaErrorNotReady
    assert {status.name for status in fake_bindings.Status} <= set(runtime.cudaError_t.__members__)
