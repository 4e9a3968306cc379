"""What only a real GPU shows of its driver: order between streams, whose memory is whose, which device is used."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gradcomp import ConfigError, DeviceError, StateError
from gradcomp.kernels import devices, segments
from gradcomp.kernels.cuda import driver as driver_module
from gradcomp.kernels.cuda.backend import CudaKernels
from gradcomp.kernels.cuda.call import Call
from gradcomp.kernels.cuda.mirrors import fill, mirror

torch: Any = pytest.importorskip("torch")
TorchPool: Any = pytest.importorskip("gradcomp.torch.devices").TorchPool


def nonzero(driver: Any, tensor: Any) -> bool:
    """Whether a kernel finds anything but zeros in a vector of float32."""
    table = np.zeros(1, segments.SEGMENT)
    table["gradient"], table["length"] = tensor.data_ptr(), len(tensor)
    call, found, blocks = Call(driver), np.zeros(1, np.uint8), -(-len(tensor) // 2048)
    begins = np.array([0, blocks])
    parameters = (call.give(table), call.give(begins), 1, call.result(found, zero=True))
    call.launch("rows.cu", "nonzero", blocks, *parameters)
    call.run()
    return bool(found[0])


@pytest.mark.parametrize("side", [False, True], ids=["default stream", "side stream"])
def test_kernels_wait_for_what_the_frameworks_stream_holds(side: bool, driver: Any) -> None:
    stream = torch.cuda.Stream() if side else torch.cuda.current_stream()
    tensor = torch.zeros(1_000_000, device="cuda:0")
    torch.cuda.synchronize()
    for _ in range(3):
        tensor.zero_()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000_000)  # a tenth of a second
            tensor[123] = 1.0
        event = driver.mark(stream.cuda_stream)
        assert not driver.reached(event)
        driver.follow(event)
        assert nonzero(driver, tensor)
        assert driver.reached(event)


def test_the_framework_sees_what_a_call_wrote(driver: Any) -> None:
    # A call has waited when it returns.
    tensor = torch.full((5000,), 7.0, device="cuda:0")
    torch.cuda.synchronize()
    driver.zero(tensor.data_ptr(), 4 * 4999)
    driver.synchronize()
    assert tensor.sum().item() == 7.0


def test_reaches_what_torch_allocates_there_and_nothing_of_the_host(driver: Any) -> None:
    tensor = torch.zeros(9, device="cuda:0")
    assert driver.reaches(tensor.data_ptr())
    assert devices.cuda_at(tensor.data_ptr()) is devices.cuda(0)
    with pytest.raises(ConfigError, match="not in the memory of a CUDA device"):
        devices.cuda_at(torch.zeros(9).data_ptr())
    assert not driver.reaches(torch.zeros(9).data_ptr())
    assert not driver.reaches(torch.zeros(9).pin_memory().data_ptr())
    if torch.cuda.device_count() > 1:
        assert not driver.reaches(torch.zeros(9, device="cuda:1").data_ptr())


def test_gradients_of_a_stream_that_is_captured_are_refused(driver: Any) -> None:
    with (
        torch.cuda.graph(torch.cuda.CUDAGraph()),
        pytest.raises(StateError, match="captured into a CUDA graph"),
    ):
        driver.mark(torch.cuda.current_stream().cuda_stream)


def test_memory_that_torch_lends_is_counted_by_torch(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_module, "_lent", {0: TorchPool(0)})
    before = torch.cuda.memory_allocated()
    block = driver.allocate(1 << 20)
    assert driver.reaches(block.address)
    assert torch.cuda.memory_allocated() >= before + (1 << 20)
    del block
    assert torch.cuda.memory_allocated() == before


def test_a_full_device_is_an_error_and_then_goes_on(driver: Any) -> None:
    with pytest.raises(DeviceError, match="cuda:0 has no memory for"):
        driver.allocate(1 << 50)
    assert driver.reaches(driver.allocate(1000).address)


def test_staging_memory_is_pinned(driver: Any) -> None:
    import cupy

    address = driver.pinned(1000).ctypes.data
    assert cupy.cuda.runtime.pointerGetAttributes(address).type == 1  # of the host, registered


def test_the_device_is_that_of_the_layer() -> None:
    from gradcomp.torch.devices import device_of

    for index in range(torch.cuda.device_count()):
        parameter = torch.nn.Parameter(torch.zeros(3, device=f"cuda:{index}"))
        assert device_of([("weight", parameter)]) is devices.cuda(index)
        assert devices.cuda(index).name == f"cuda:{index}"
        assert nonzero(devices.cuda(index).driver, torch.ones(3, device=f"cuda:{index}"))


def test_a_device_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match="no usable cuda:99"):
        devices.cuda(99)


def test_other_threads_can_use_it(driver: Any) -> None:
    from concurrent.futures import ThreadPoolExecutor

    tensors = [torch.full((3000,), float(i % 2), device="cuda:0") for i in range(8)]
    torch.cuda.synchronize()
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda tensor: nonzero(driver, tensor), tensors))
    assert found == [bool(i % 2) for i in range(8)]


def test_a_twin_holds_on_the_device_what_kernels_write(driver: Any) -> None:
    cupy: Any = pytest.importorskip("cupy")
    values = torch.arange(1000, dtype=torch.float32, device="cuda:0")
    torch.cuda.synchronize()
    table = np.zeros(1, segments.SEGMENT)
    table["gradient"], table["length"], table["payload"] = values.data_ptr(), 1000, 30
    table["bucket_size"] = 8
    message = mirror(driver, 4030, [(0, 30)])
    message[:30] = 9
    flags = np.zeros(1, np.uint8)
    CudaKernels(driver).encode(segments.FP32, table, message, flags, draw=None, scale=1.0, decay=1.0)
    there = cupy.asarray(message).get()
    assert there[30:].view(np.float32).tolist() == values.tolist()
    assert not there[:30].any()
    assert not message[30:].any()  # the host's side
    driver.upload(message.address, message[:30])
    fill(message[30:].view(np.float32), 2.0)
    assert cupy.asarray(message).get().tobytes() == bytes([9] * 30) + np.full(1000, 2, np.float32).tobytes()
