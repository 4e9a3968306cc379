"""Gradients of torch on a device. The stand-in's device takes the CPU's tensors for its own."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from batch import on_ranks
from cuda_on_cpu.driver import CpuDriver
from fake_streams import FakeStreams
from kernels.standin import FOLDER
from small_torch import assert_same_on_all_ranks, backward, bits_of, data, shared_folder

import gradcomp.kernels.cuda
import gradcomp.torch as gc
from gradcomp.analysis import read
from gradcomp.exchange.thread import in_background
from gradcomp.kernels import devices
from gradcomp.torch import ddp, distributed_state
from gradcomp.torch import devices as torch_devices
from gradcomp.torch import layers as layers_module
from gradcomp.torch import streams as streams_module
from gradcomp.torch.ddp import HookState
from gradcomp.torch.devices import device_of
from gradcomp.torch.streams import streams_of
from gradcomp.torch.tensors import Form


class _Everything(CpuDriver):
    """All memory is the device's: whatever torch allocates."""

    def reaches(self, address: int) -> bool:
        return True


@contextmanager
def replaced(name: str, value: Any, *modules: Any) -> Iterator[None]:
    """What modules know by a name is something else, for a while."""
    before = [getattr(module, name) for module in modules]
    for module in modules:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, value_before in zip(modules, before, strict=True):
            setattr(module, name, value_before)


@contextmanager
def on_host() -> Iterator[None]:
    """Gradients are on the CPU."""
    yield None


@contextmanager
def on_device() -> Iterator[_Everything]:
    """Optimizers that are made inside have their gradients on a device with kernels."""
    driver = _Everything(FOLDER, order=2)
    device = devices.on("cuda:0", driver)
    with replaced("device_of", lambda named: device, distributed_state, ddp):
        yield driver


@contextmanager
def through_host() -> Iterator[FakeStreams]:
    """Optimizers that are made inside have their gradients on a device without kernels."""
    streams = FakeStreams()
    device = torch_devices.Staged("cuda:0", streams=streams)
    with replaced("device_of", lambda named: device, distributed_state, ddp):
        yield streams


def parameters_after(steps: int, compression: str, place: Any = on_host) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 40), torch.nn.Tanh(), torch.nn.Linear(40, 30))
    policy = gc.Policy(compression, filter=gc.Filter(min_elements=64))
    with place() as found:
        opt = gc.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.05), model.named_parameters(), policy
        )
        for step in range(steps):
            opt.zero_grad()
            whole = step % 3 != gc.rank()  # else this rank has no gradient of the last layer
            backward(model if whole else model[0], step)
            opt.step()
        if place is on_device:
            kinds = [kind for kind, _ in found.events]
            assert found.launched
            assert kinds.count("follow") >= kinds.count("mark") > steps
            # The engine's thread and those in the background, and no thread of the script.
            ours = {thread.ident: thread.name for thread in threading.enumerate()}
            assert {ours[ident] for ident in found.current_in} == {"gradcomp", "gradcomp-background"}
        # One layer, of which the last step had no gradient, came from the other rank.
        if place is through_host:
            assert found.copies["up on 0"] == 4 * steps
            assert steps * 2 < found.copies["down"] < 4 * steps
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("place", ["on_device", "through_host"])
@pytest.mark.parametrize("compression", ["quantize:bits=4,bucket_size=64", "topk:density=0.1", "none"])
@on_ranks(2)
def test_a_rank_on_the_cpu_and_one_on_a_device_train_together(compression, place):
    mixed = parameters_after(6, compression, globals()[place] if gc.rank() == 1 else on_host)
    assert bits_of(mixed) == bits_of(parameters_after(6, compression))


class Partly(torch.nn.Module):
    """Layers of which a step may leave out the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(8, 40), torch.nn.Linear(40, 30)

    def forward(self, x: torch.Tensor, whole: bool) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        return self.last(hidden) if whole else hidden


def parameters_under_ddp(steps: int, place: Any = on_host) -> tuple[list[torch.Tensor], list[list[bool]]]:
    """And which layers had a gradient, by step: DDP fills in zeros, which only their kernels can tell."""
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(Partly(), find_unused_parameters=True)
    policy = gc.Policy("quantize:bits=4,bucket_size=64", filter=gc.Filter(min_elements=64))
    with place() as found:
        state, hook = gc.ddp_comm_hook(model, policy)
        model.register_comm_hook(state, hook)
        opt = torch.optim.SGD(model.parameters(), lr=0.05)
        present = []
        for step in range(steps):
            opt.zero_grad()
            model(data(step), step % 3 == 0).square().mean().backward()
            opt.step()
            present.append(state.exchanger.pipeline.result.present.tolist())
        if place is on_device:
            assert found.launched
            assert [kind for kind, _ in found.events].count("mark") >= steps
        if place is through_host:
            [(back, copies)] = [item for item in found.copies.items() if item[0] != "down"]
            assert back != "up on 0"  # where they would wait for the rest of backward()
            assert copies == found.copies["down"] >= steps
    return [p.detach().clone() for p in model.parameters()], present


@pytest.mark.parametrize("place", ["on_device", "through_host"])
@on_ranks(2)
def test_a_hook_on_the_cpu_and_one_on_a_device_train_together(place):
    mixed, present = parameters_under_ddp(6, globals()[place] if gc.rank() == 1 else on_host)
    assert bits_of(mixed) == bits_of(parameters_under_ddp(6)[0])
    assert sorted(map(sum, present)) == [2, 2, 2, 2, 4, 4]


@on_ranks(2)
def test_powersgd_on_two_devices_keeps_ranks_equal():
    assert_same_on_all_ranks(parameters_after(6, "powersgd:rank=2", on_device))


@pytest.mark.parametrize(
    ("shape", "where", "complaint"),
    [
        ((3,), "meta", "dense and on meta when ddp_comm_hook was called; its gradient is .* on cpu now"),
        ((4,), "cpu", "had another dtype or size when ddp_comm_hook was called; its gradient has 3 elements"),
    ],
)
def test_a_hook_notices_that_a_model_has_changed(shape: Any, where: str, complaint: str) -> None:
    parameter, buffer = torch.nn.Parameter(torch.zeros(3)), torch.zeros(3)
    bucket: Any = SimpleNamespace(
        buffer=lambda: buffer, parameters=lambda: [parameter], gradients=lambda: [buffer]
    )
    state: Any = SimpleNamespace(
        _numbers={id(parameter): 0}, named=[("w", parameter)], _layers=[gc.LayerSpec("w", shape)],
        _where=torch.device(where),
    )  # fmt: skip
    with pytest.raises(gc.StateError, match=f"layer 'w' .*{complaint}"):
        HookState._contents(state, bucket)


def test_devices_that_cannot_be_used_are_named() -> None:
    def parameter(device: str) -> Any:
        return device, torch.nn.Parameter(torch.zeros(3, device=device))

    assert device_of([parameter("cpu")]) is devices.HOST
    assert device_of([]) is devices.HOST
    with pytest.raises(gc.ConfigError, match="gradients on meta cannot be exchanged"):
        device_of([parameter("meta")])
    with pytest.raises(gc.ConfigError, match="are on cpu, meta; one optimizer"):
        device_of([parameter("cpu"), parameter("meta")])


@pytest.fixture
def without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither package is there by which CUDA is called."""
    for name in ("over_cupy", "over_bindings"):
        monkeypatch.setitem(sys.modules, f"gradcomp.kernels.cuda.{name}", None)
        monkeypatch.delattr(gradcomp.kernels.cuda, name, raising=False)


def test_cupy_is_taken_where_it_is_installed_and_else_the_bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "on", lambda name, driver: (name, driver))
    for name in ("over_cupy", "over_bindings"):
        package: Any = ModuleType(name)
        package.driver = lambda index, name=name: (name, index)
        monkeypatch.setitem(sys.modules, f"gradcomp.kernels.cuda.{name}", package)
        monkeypatch.setattr(gradcomp.kernels.cuda, name, package, raising=False)
    assert devices.cuda.__wrapped__(3) == ("cuda:3", ("over_cupy", 3))
    monkeypatch.delattr(gradcomp.kernels.cuda, "over_cupy")
    monkeypatch.setitem(sys.modules, "gradcomp.kernels.cuda.over_cupy", None)
    assert devices.cuda.__wrapped__(3) == ("cuda:3", ("over_bindings", 3))


@pytest.mark.usefixtures("without_cuda")
def test_without_cupy_and_bindings_gradients_of_a_gpu_go_through_the_host_with_one_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_devices.logger, "propagate", True)
    parameter: Any = SimpleNamespace(device=torch.device("cuda:7"))
    found = [device_of([("weight", parameter)]) for _ in range(3)]
    assert all(isinstance(device, torch_devices.Staged) and device.name == "cuda:7" for device in found)
    [said] = [record.getMessage() for record in caplog.records]
    assert "cuda:7 need CuPy or cuda-bindings: pip install 'gradcomp[cuda13]'" in said
    assert "pinned memory" in said


# --- copies through pinned memory ------------------------------------------------------------------------------


def test_a_copy_to_the_host_is_behind_the_gradient_and_beside_the_scripts_stream() -> None:
    streams = FakeStreams()
    script = streams.another()
    gradient = torch.zeros(3)
    way = torch_devices.ThroughHost(streams)
    with streams.on(script):
        script.held.append(lambda: gradient.fill_(5.0))  # backward has not come to it
        handed = way.hand_in(gradient)
    while not streams.reached(handed.event):
        pass
    assert handed.tensor.tolist() == [5.0] * 3
    assert handed.event.stream is not script


def test_means_come_back_in_the_order_of_the_current_stream() -> None:
    streams = FakeStreams()
    script, form = streams.another(), Form.of(torch.zeros(2, 3).t())
    way = torch_devices.ThroughHost(streams)
    made = way.allocate(form, None)
    made.tensor.copy_(torch.arange(6.0))
    with streams.on(script):
        mean = way.finished(made, form)
    assert mean.stride() == (1, 3)
    assert mean.t().flatten().tolist() == list(range(6))
    assert streams.copies == {f"up on {script.handle}": 1}


# --- the script's stream ---------------------------------------------------------------------------------------


@on_ranks(2)
def test_what_the_engines_thread_begins_is_in_the_order_of_the_stream_that_trains():
    streams = FakeStreams()
    script = streams.another()
    with (
        replaced("streams_of", lambda device: streams, streams_module, torch_devices, layers_module),
        streams.on(script),
        on_device() as driver,
    ):
        layers = [torch.nn.Parameter(torch.zeros(50, 20)) for _ in range(2)]
        opt = gc.DistributedOptimizer(
            torch.optim.SGD(layers, lr=0.1), compression=gc.Policy("quantize:bits=4")
        )
        for _ in range(3):
            opt.zero_grad()
            layers[gc.rank()].sum().backward()  # memory for the other layer's mean is the engine's thread's
            opt.step()
    marks = [stream for kind, stream in driver.events if kind == "mark"]
    assert marks.count(script.handle) == 2 * 3
    # Parameters are sampled on a stream beside it, behind what it held.
    assert len(marks) - 2 * 3 == 2
    assert [reader for reader, followed in streams.waited if followed is script]
    # What the script does next is behind the kernels' own stream.
    assert streams.waited.count((script, streams.external(driver.stream))) == 3


def test_parameters_are_compared_as_they_are_in_the_order_of_the_scripts_stream() -> None:
    streams = FakeStreams()
    script = streams.another()
    parameter = torch.nn.Parameter(torch.zeros(5))
    named = [("w", parameter)]
    with replaced("streams_of", lambda device: streams, layers_module), streams.on(script):
        script.held.append(lambda: parameter.data.fill_(1.0))  # the last step, not done yet
        work = layers_module.digests_behind(named)
    found = in_background(work).result()
    assert found == layers_module.digests_of([("w", torch.nn.Parameter(torch.ones(5)))])
    [(reader, followed)] = streams.waited
    assert followed is script
    assert reader not in (script, streams.default)


# --- numbers that a device holds -------------------------------------------------------------------------------


def residual_after(scales: list[float], streams: Any) -> tuple[bytes, bytes]:
    """The parameter and the residual after steps at these scales of the loss, and falling learning rates."""
    weight, rate = torch.nn.Parameter(torch.zeros(32, 32)), torch.tensor(1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=scales[0])
    with replaced("streams_of", streams, streams_module):
        opt = gc.DistributedOptimizer(
            torch.optim.SGD([weight], lr=rate),
            [("w", weight)],
            gc.ErrorFeedback(gc.Quantize(4, rounding="nearest"), follow_rate=True),
            grad_scaler=scaler,
        )
        if streams is not streams_of:
            scaler.get_scale = lambda: pytest.fail("this would wait for the device")
        for step, scale in enumerate(scales):
            scaler.update(scale) if step else None
            rate.fill_(1.0 / (1 + step))
            gradient = torch.randn(32, 32, generator=torch.Generator().manual_seed(10 * step + gc.rank()))
            opt.zero_grad()
            scaler.scale((weight * gradient).sum()).backward()
            scaler.step(opt)
        held = opt.compression_state()["residuals"]["w"]
    return weight.detach().numpy().tobytes(), held.numpy().tobytes()


@on_ranks(2)
def test_a_scale_and_a_rate_that_a_device_holds_are_those_of_their_own_step():
    scales, fake = [1024.0, 512.0, 65536.0, 2.0], FakeStreams()
    assert residual_after(scales, lambda device: fake) == residual_after(scales, streams_of)
    assert fake.copies == {"down": 2 * len(scales)}


def test_an_exchange_begins_when_the_scale_has_come() -> None:
    parameter = torch.tensor(8.0)
    streams = FakeStreams(late=2)
    with replaced("streams_of", lambda device: streams, streams_module):
        number: Any = streams_module.number_of(parameter, 0.5)
    assert [number.done() for _ in range(4)] == [False, False, True, True]
    assert number.result() == 4.0
    assert streams_module.number_of(parameter, 0.5) == 4.0  # the CPU's own is here
    assert streams_module.number_of(3, 0.5) == 1.5


@pytest.mark.parametrize("kernels", [True, False])
@on_ranks(2)
def test_gradients_on_a_device_are_recorded(kernels: bool):
    path = shared_folder() / "run.npz"
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 40)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(gc.rank()))
    (own,) = torch.autograd.grad(model(x).square().mean(), model.weight)
    with on_device() if kernels else through_host():
        opt = gc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        with gc.record_gradients(opt, path, every=1):
            model(x).square().mean().backward()
            opt.step()
    both = gc.allgather(own.reshape(1, -1))
    if gc.rank() == 0:
        assert read(path).values[0].tolist() == both.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_parameters_are_sampled_alike_with_kernels_and_without(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    named = [
        (str(size), torch.nn.Parameter(torch.randn(size, dtype=dtype))) for size in (1, 300, 70_000, 140_000)
    ]
    named.append(
        ("turned", torch.nn.Parameter(torch.randn(8, 6, 5, 7).to(memory_format=torch.channels_last)))
    )
    staged = torch_devices.Staged("cuda:0", streams=FakeStreams())
    for turn in (0, 5):
        here, there = (layers_module.ParameterSamples(named, device) for device in (devices.HOST, staged))
        expected, found = here.take(turn, "[]").result(), there.take(turn, "[]").result()
        assert expected.layers.all()
        assert found.layers.tolist() == expected.layers.tolist()
        assert found.value == expected.value
    named[1][1].data = torch.zeros(3)  # another than before: not read
    assert here.take(6, "[]").result().layers[1] == there.take(6, "[]").result().layers[1] == 0
