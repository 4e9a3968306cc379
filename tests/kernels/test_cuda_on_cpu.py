"""The stand-in for a GPU shows mistakes that a GPU would hide, or only show now and then."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cuda_on_cpu import driver as cpu
from cuda_on_cpu.driver import CpuDriver
from kernels.standin import FOLDER

from gradcomp.kernels.cuda import modules
from gradcomp.kernels.cuda.call import Call

SOURCE = """
struct Params { std::uint64_t from, to; std::int64_t i; double x; };
extern "C" __global__ void __launch_bounds__(32) copy(const Params __grid_constant__ params) {
    const auto* from = reinterpret_cast<const unsigned char*>(params.from);
    reinterpret_cast<unsigned char*>(params.to)[0] = from[params.i];
}
extern "C" __global__ void __launch_bounds__(32) shared(const Params __grid_constant__ params) {
    __shared__ unsigned char x[4];
    if (params.i < 0) x[threadIdx.x % 4] = 1;
    reinterpret_cast<unsigned char*>(params.to)[blockIdx.x] = x[1];
}
extern "C" __global__ void __launch_bounds__(32) leave(const Params __grid_constant__ params) {
    if (threadIdx.x == 3) return;
    __syncthreads();
}
extern "C" __global__ void __launch_bounds__(32) part(const Params __grid_constant__ params) {
    const unsigned all = 0xFFFFFFFF;
    if (threadIdx.x < 16)
        __shfl_xor_sync(all, 1, 1);
    else
        __shfl_xor_sync(all, 2, 1);
}
""".replace('extern "C" __global__ void __launch_bounds__(32)', "KERNEL(32)")
PRELUDE = '#define KERNEL(threads) extern "C" __global__ void __launch_bounds__(threads)\n'


@pytest.fixture(autouse=True)
def sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modules, "flat", lambda name: PRELUDE + SOURCE)
    monkeypatch.setattr(cpu, "holding", lambda *_: None)  # they are in no module


def run(kernel: str, i: int, blocks: int = 1) -> bytes:
    """What a kernel makes of an array of 1, 2, 3."""
    call = Call(CpuDriver(FOLDER))
    found = np.zeros(blocks, np.uint8)
    # The last to lie in memory is read beyond its end, where there is more of the call's.
    to = call.result(found)
    given = call.update(np.array([1, 2, 3], np.uint8))
    call.launch("mistakes.cu", kernel, blocks, given, to, i, 0.5)
    call.run()
    return found.tobytes()


def test_shared_memory_begins_as_garbage() -> None:
    assert run("shared", 0, 3) == bytes([0xA7] * 3)


@pytest.mark.parametrize("kernel", ["leave", "part"])
def test_threads_that_do_not_meet_are_found(kernel: str) -> None:
    with pytest.raises(RuntimeError, match="wait for each other"):
        run(kernel, 0)


def test_reading_beyond_an_array_is_found_by_the_sanitizer() -> None:
    assert run("copy", 2) == bytes([3])
    run("copy", 3)  # not without it
    for i, clean in ((2, True), (3, False)):
        folders = os.pathsep.join(map(str, (Path(__file__).parents[2], Path(__file__).parents[1])))
        asan = subprocess.run(
            [os.environ.get("CXX", "c++"), "-print-file-name=libasan.so"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        if not Path(asan).is_file():
            pytest.skip("the compiler has no libasan.so")
        ended = subprocess.run(
            [sys.executable, "-c", f"from kernels import test_cuda_on_cpu as t; t.sanitized({i})"],
            env=os.environ
            | {
                "PYTHONPATH": folders,
                "LD_PRELOAD": asan,
                "ASAN_OPTIONS": "detect_leaks=0",
                "GRADCOMP_SANITIZE_KERNELS": "1",
            },
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (ended.returncode == 0) == clean, ended.stderr
        assert ("AddressSanitizer: use-after-poison" in ended.stderr) != clean


def test_nobody_leaves_a_call_while_kernels_may_run() -> None:
    """Memory that they use goes back to pools, and gradients to their owner, only after a wait."""

    class Failing(CpuDriver):
        def download(self, target: np.ndarray, address: int) -> None:
            raise KeyboardInterrupt

    driver = Failing(FOLDER)
    call = Call(driver)
    array = np.zeros(3, np.uint8)
    call.launch("mistakes.cu", "copy", 1, call.give(array), call.result(array), 0, 0.5)
    with pytest.raises(KeyboardInterrupt):
        call.run()
    assert (len(driver.launched), driver.synchronized) == (1, 1)


def test_parameters_are_not_copied_to_the_device() -> None:
    """They go with the launch: a kernel waits for no load of its own parameters."""

    class Noting(CpuDriver):
        def upload(self, address: int, modules: np.ndarray) -> None:
            self.uploaded = modules.tobytes()
            super().upload(address, modules)

    driver = Noting(FOLDER)
    call = Call(driver)
    found = np.zeros(1, np.uint8)
    call.launch("mistakes.cu", "copy", 1, call.give(np.array([7, 9], np.uint8)), call.result(found), 1, 0.5)
    call.run()
    assert found.tolist() == [9]
    assert driver.uploaded[:2] == bytes([7, 9])
    assert len(driver.uploaded) == 256


def sanitized(i: int) -> None:
    """What the process of a test does."""
    modules.flat = lambda name: PRELUDE + SOURCE  # type: ignore[assignment]
    cpu.holding = lambda *_: None  # type: ignore[assignment]
    run("copy", i)


@pytest.mark.parametrize("parameters", [(0, 0, 0), (0, 0, 0, 1), (0, 0, 0.5, 0.5), (0.5, 0, 0, 0.5)])
def test_parameters_that_are_not_the_struct_s_are_refused(parameters: tuple[float, ...]) -> None:
    with pytest.raises(AssertionError, match="parameter"):
        Call(CpuDriver(FOLDER)).launch("mistakes.cu", "copy", 1, *parameters)
