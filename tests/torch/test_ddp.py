"""``ddp_comm_hook``: DistributedDataParallel with compressed gradients, against DistributedOptimizer and plain DDP."""

from __future__ import annotations

import functools
import random
import time
from types import SimpleNamespace

import preloaded
import pytest
import torch
from batch import on_ranks
from launching import run_ranks
from small_torch import (
    assert_same_on_all_ranks,
    backward,
    bits_of,
    data,
    initialised,
    residuals,
    same,
    small,
    train,
    unsent,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import gradcomp.torch as gc

FOUR_BITS = "quantize:bits=4,bucket_size=64"
WITH_RESIDUALS = "quantize:bits=4,bucket_size=64,rounding=nearest"
STEPS = 8  # DDP forms its buckets anew behind the first, and ours are put in order behind the second
MANY_BUCKETS = 0.0005  # MB: a bucket has few layers, from the second step on


class Crossed(torch.nn.Module):
    """Runs its layers in another order than it registers them, so that DDP has reason to form new buckets."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.last = torch.nn.Linear(width, 3)
        self.first = torch.nn.Linear(8, width)
        self.norm = torch.nn.LayerNorm(width)
        self.middle = torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.middle(self.norm(torch.tanh(self.first(x))))))


class Deep(torch.nn.Module):
    """Enough layers for many buckets, registered in the order in which their gradients come."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [(24, 24)] * 5 + [(8, 24)]
        self.layers = torch.nn.ModuleList(torch.nn.Linear(*size) for size in sizes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in reversed(self.layers):
            x = torch.tanh(layer(x))
        return x


class Recomputed(Deep):
    """Recomputes every layer in backward, in a backward pass inside the outer one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        for layer in reversed(self.layers):
            x = torch.tanh(checkpoint(layer, x, use_reentrant=True))
        return x


class Branches(torch.nn.Module):
    """``forward(x, names)`` uses only the named branches."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = torch.nn.Linear(8, 16)
        self.branches = torch.nn.ModuleDict({name: torch.nn.Linear(16, 16) for name in "abc"})

    def forward(self, x: torch.Tensor, names: str) -> torch.Tensor:
        x = torch.tanh(self.trunk(x))
        return sum(self.branches[name](x).square().mean() for name in names)


def build(kind=Crossed, seed=0):
    torch.manual_seed(seed)
    return kind()


def hooked(model, compression=FOUR_BITS, *, wrapped_first=False, grad_scaler=None, **ddp_arguments):
    """The model in DDP with gradcomp's hook, and the hook's state."""
    ddp_arguments = {"bucket_cap_mb": MANY_BUCKETS, **ddp_arguments}
    if wrapped_first:
        ddp = DistributedDataParallel(model, **ddp_arguments)
        state, hook = gc.ddp_comm_hook(ddp, small(compression), grad_scaler=grad_scaler)
    else:
        state, hook = gc.ddp_comm_hook(model, small(compression), grad_scaler=grad_scaler)
        ddp = DistributedDataParallel(model, **ddp_arguments)
    ddp.register_comm_hook(state, hook)
    return ddp, state


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@functools.cache  # on all ranks alike
def with_distributed_optimizer(compression, kind=Crossed):
    model = build(kind)
    train(model, gc.DistributedOptimizer(sgd(model), model.named_parameters(), small(compression)), STEPS)
    return bits_of(model.parameters())


def assert_equal_to_distributed_optimizer(compression, kind=Crossed, **arguments) -> None:
    model = build(kind)
    ddp, state = hooked(model, compression, **arguments)
    train(ddp, sgd(ddp), STEPS)
    assert bits_of(model.parameters()) == with_distributed_optimizer(compression, kind)
    assert_same_on_all_ranks(model.parameters())
    assert state.statistics().steps == STEPS


# ------------------------------------------------------------------------------------------ what the means are


def mixed():
    """Layers of several dtypes, which travel together."""
    model = Crossed()
    dtypes = {"first": torch.bfloat16, "norm": torch.float32, "middle": torch.float64, "last": torch.float32}
    for name, dtype in dtypes.items():
        layer = getattr(model, name).to(dtype)
        layer.register_forward_pre_hook(lambda _, x, dtype=dtype: (x[0].to(dtype),))
    return model


def convolution():
    """Weights in another memory order."""
    model = torch.nn.Sequential(
        torch.nn.Unflatten(1, (2, 2, 2)),
        torch.nn.Conv2d(2, 32, 2).to(memory_format=torch.channels_last),
        torch.nn.BatchNorm2d(32),
        torch.nn.Flatten(),
        torch.nn.Linear(32, 3),
    )
    model[4].weight = torch.nn.Parameter(model[4].weight.t().contiguous().t())
    return model


ALIKE = {
    "none": (Crossed, {"compression": "none"}),
    "bf16": (Crossed, {"compression": "bf16"}),
    "4 bits": (Crossed, {}),
    "wrapped first": (Crossed, {"wrapped_first": True}),
    "wrapped first, views": (Crossed, {"wrapped_first": True, "gradient_as_bucket_view": True}),
    "many DDP buckets": (Deep, {}),
    "one DDP bucket": (Deep, {"bucket_cap_mb": 25}),
    "static graph": (Crossed, {"static_graph": True}),
    "unused parameters": (Crossed, {"find_unused_parameters": True}),
    "reentrant checkpoints": (Recomputed, {}),
    "several dtypes": (mixed, {}),
    "another memory order": (convolution, {}),
}


@on_ranks(2)
@pytest.mark.parametrize("case", ALIKE)
def test_parameters_are_those_of_distributed_optimizer_bit_for_bit(case):
    kind, arguments = ALIKE[case]
    assert_equal_to_distributed_optimizer(**{"compression": FOUR_BITS, "kind": kind, **arguments})


@on_ranks(2)
def test_without_compression_it_is_plain_ddp_bit_for_bit():
    model, plain = build(), build()
    for ddp in (DistributedDataParallel(plain, bucket_cap_mb=MANY_BUCKETS), hooked(model, "none")[0]):
        train(ddp, sgd(ddp), STEPS)
    assert bits_of(model.parameters()) == bits_of(plain.parameters())


@on_ranks(2)
def test_ddp_forms_new_buckets_after_the_first_step_and_rank_0s_new_order_is_adopted():
    ddp, state = hooked(build())
    initial = list(state.exchanger.pipeline.ordering.order)
    train(ddp, sgd(ddp), 1)
    assert state.exchanger.pipeline.ordering.order == initial
    train(ddp, sgd(ddp), 2, first=1)
    logged = ddp._get_ddp_logging_data()
    assert logged["has_rebuilt_buckets"] == 1
    assert len(logged["rebuilt_bucket_sizes"].split(",")) > 1
    layers = state.exchanger.pipeline.layers
    arrived = [layers[number].name.partition(".")[0] for number in state.exchanger.pipeline.ordering.order]
    assert list(dict.fromkeys(arrived)) == ["last", "middle", "norm", "first"]


# Buckets that are put in order take second residuals to other ranks, the hook's one step later than the optimizer's.
@on_ranks(2)
def test_a_future_completes_while_backward_runs():
    with initialised(reorder=False, slice_elements=256):
        model = build(Deep)
        state, hook = gc.ddp_comm_hook(model, small(FOUR_BITS))
        first, early = [], []

        def watch(state, bucket):
            if bucket.is_last() and state.exchanger.pipeline.step > 2:
                deadline = time.monotonic() + 10
                while not first[-1].done() and time.monotonic() < deadline:
                    time.sleep(0.001)
                early.append(first[-1].done())
            future = hook(state, bucket)
            if bucket.index() == 0:
                first.append(future)
            return future

        ddp = DistributedDataParallel(model, bucket_cap_mb=MANY_BUCKETS)
        ddp.register_comm_hook(state, watch)
        train(ddp, sgd(ddp), 5)
        assert early == [True, True]


@on_ranks(2)
def test_with_residuals_too_parameters_are_those_of_distributed_optimizer():
    with initialised(reorder=False, slice_elements=256):
        assert_equal_to_distributed_optimizer(WITH_RESIDUALS, Deep)


@on_ranks(2)
def test_no_sync_accumulates_without_an_exchange():
    model, reference = build(), build()
    ddp, state = hooked(model)
    wrapped = gc.DistributedOptimizer(
        sgd(reference), reference.named_parameters(), small(FOUR_BITS), backward_passes_per_step=3
    )
    optimizer = sgd(ddp)
    for step in range(6):
        optimizer.zero_grad()
        wrapped.zero_grad()
        for part in range(3):
            backward(reference, 3 * step + part)
        with ddp.no_sync():
            for part in range(2):
                backward(ddp, 3 * step + part)
        backward(ddp, 3 * step + 2)
        optimizer.step()
        wrapped.step()
    assert bits_of(model.parameters()) == bits_of(reference.parameters())
    assert state.statistics().steps == 6


# ------------------------------------------------------------------------------------------ unused parameters


@on_ranks(2)
def test_a_layer_that_one_rank_did_not_use_gets_the_mean():
    model = build(Branches)
    ddp, _ = hooked(model, "none", find_unused_parameters=True)
    x = torch.ones(2, 8)
    ddp(x, "ab" if gc.rank() == 0 else "a").backward()
    twin = build(Branches)
    twin(x, "ab").backward()
    assert torch.equal(model.branches["b"].weight.grad, twin.branches["b"].weight.grad / 2)
    assert torch.equal(model.branches["a"].weight.grad, twin.branches["a"].weight.grad)


@on_ranks(2)
def test_a_layer_that_no_rank_used_neither_moves_nor_loses_its_residual():
    model = build(Branches)
    ddp, state = hooked(model, WITH_RESIDUALS, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(ddp.parameters())
    uses = ["abc", "abc", "ab", "b", "ab", "ab", "ab", "abc", "ac"]
    for step, names in enumerate(uses):
        before = [model.branches[name].weight.detach().clone() for name in "abc"]
        kept = unsent(state)["branches.c.weight"]
        optimizer.zero_grad()
        # Rank 1 leaves out a branch that rank 0 uses, in turn.
        own = names if gc.rank() == 0 or len(names) == 1 else names.replace(names[step % len(names)], "", 1)
        ddp(data(step), own).backward()
        optimizer.step()
        for name, old in zip("abc", before, strict=True):
            moved = not torch.equal(model.branches[name].weight, old)
            assert moved == (name in names), (step, name)
        now = unsent(state)["branches.c.weight"]
        alike = torch.allclose(kept, now, rtol=1e-4, atol=1e-3 * float(now.abs().max()))
        assert alike == ("c" not in names), step
        assert now.any()
    assert_same_on_all_ranks(model.parameters())


@on_ranks(2)
def test_zeros_without_unused_parameters_stay_zeros_and_the_residual_waits():
    model = build()
    ddp, state = hooked(model, WITH_RESIDUALS)
    train(ddp, sgd(ddp), 3)
    kept = residuals(state)["middle.weight"]
    assert kept.any()
    model.zero_grad()
    (0.0 * ddp(data(3)).sum()).backward()
    assert all(not p.grad.any() for p in model.parameters())
    assert same(residuals(state)["middle.weight"], kept)


@on_ranks(2)
def test_ranks_with_uneven_inputs_join():
    model = build()
    ddp, state = hooked(model)
    optimizer = sgd(ddp)
    train(ddp, optimizer, 6)
    with ddp.join():
        for step in range(6, 8 + 2 * gc.rank()):
            optimizer.zero_grad()
            backward(ddp, step)
            optimizer.step()
    state.settle()
    assert state.statistics().steps == 10


# ------------------------------------------------------------------------------------------ what a user can ask


@on_ranks(2)
def test_statistics_and_trace():
    ddp, state = hooked(build(), bucket_cap_mb=25)
    train(ddp, sgd(ddp), 2)
    assert state.statistics().ratio > 1.5
    assert state.statistics().exposed_seconds > 0
    metrics = state.compression_metrics()
    assert metrics["gradcomp/steps"] == state.statistics().steps == 2
    assert metrics["gradcomp/sent_mb"] == pytest.approx(state.statistics().wire_bytes / 2e6)
    assert metrics["gradcomp/ratio"] == pytest.approx(state.statistics().ratio)
    assert metrics["gradcomp/bits"] == pytest.approx(32 / state.statistics().ratio)
    assert metrics["gradcomp/step_ms"] > metrics["gradcomp/exposed_ms"] > 0
    assert state.reduced_statistics() is None
    assert {"ready", "compress", "send", "reduce", "decompress"} <= {
        span.name for span in state.trace_spans()
    }
    assert [name for name, _ in state.named_parameters] == [name for name, _ in ddp.module.named_parameters()]


@on_ranks(2)
def test_names_are_those_of_the_bare_module():
    model = build()
    _, state = hooked(torch.compile(model, backend="eager"), wrapped_first=True)
    assert [layer.name for layer in state.exchanger.pipeline.layers] == [
        n for n, _ in model.named_parameters()
    ]


@on_ranks(1)
def test_a_world_of_one_leaves_the_bucket_as_it_is():
    state, hook = gc.ddp_comm_hook(build(), FOUR_BITS)
    tensor = torch.randn(5)
    before = tensor.clone()
    assert hook(state, SimpleNamespace(buffer=lambda: tensor)).wait() is tensor
    assert torch.equal(tensor, before)
    assert state.exchanger is None
    assert state.statistics().steps == 0
    state.settle()


# ------------------------------------------------------------------------------------------ other worlds


@on_ranks(3)
def test_three_ranks():
    assert_equal_to_distributed_optimizer(FOUR_BITS, Deep)


@on_ranks(3)
def test_three_ranks_without_compression():
    model, plain = build(), build()
    ddp, _ = hooked(model, "none")
    reference = DistributedDataParallel(plain)
    for each in (ddp, reference):
        train(each, sgd(each), 3)
    # The order in which an allreduce adds depends on where a layer lies in its buffer.
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
    assert_same_on_all_ranks(model.parameters())


@on_ranks(3)
def test_three_ranks_of_which_some_use_a_branch_and_all_are_late_at_times():
    delays = random.Random(gc.rank())
    model = build(Branches)
    ddp, state = hooked(model, WITH_RESIDUALS, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(ddp.parameters())
    for step in range(8):
        optimizer.zero_grad()
        names = "abc"[: 1 + (step + gc.rank()) % 3]
        time.sleep(delays.choice([0, 0, 0.05]))
        ddp(data(step), names).backward()
        optimizer.step()
    assert_same_on_all_ranks(model.parameters())
    assert state.statistics().steps == 8


# ------------------------------------------------------------------------------------------ faults


@on_ranks(2, "faults")
def test_an_error_in_the_engine_is_raised_by_backward_as_what_it_is():
    ddp, state = hooked(build())
    train(ddp, sgd(ddp), 2)
    if gc.rank() == 1:
        state.exchanger.abort("rank 1 had enough")
        return
    with pytest.raises(gc.TransportError, match="rank 1 had enough"):
        backward(ddp, 2)
    with pytest.raises(gc.TransportError, match="rank 1 had enough"):
        state.settle()


@on_ranks(2, "faults")
def test_an_error_in_the_first_step_of_a_static_graph_is_raised_with_its_text():
    def gives_up(*numbers):
        state.exchanger.abort("rank 1 had enough")
        time.sleep(2)
        type(state.exchanger).open(state.exchanger, *numbers)

    model = build()
    state, hook = gc.ddp_comm_hook(model, FOUR_BITS)
    ddp = DistributedDataParallel(model, static_graph=True)
    ddp.register_comm_hook(state, hook)
    if gc.rank() == 1:
        state.exchanger.open = gives_up
    with pytest.raises(RuntimeError if gc.rank() == 0 else gc.TransportError, match="rank 1 had enough"):
        backward(ddp, 0)


@on_ranks(2, "faults")
def test_an_error_in_one_ranks_hook_is_raised_on_both():
    model = build()
    ddp, state = hooked(model)
    train(ddp, sgd(ddp), 2)
    if gc.rank() == 1:
        state._numbers.pop(id(model.norm.weight))
    expected, text = (
        (gc.StateError, "shape") if gc.rank() == 1 else (gc.TransportError, "rank 1: StateError: .* shape")
    )
    with pytest.raises(expected, match=text):
        backward(ddp, 2)


@on_ranks(2, "faults")
def test_parameters_that_changed_their_dtype_are_an_error():
    model = build()
    state, hook = gc.ddp_comm_hook(model, FOUR_BITS)
    ddp = DistributedDataParallel(model.double())
    ddp.register_comm_hook(state, hook)
    with pytest.raises((gc.StateError, gc.TransportError), match="float64"):
        ddp(data(0).double()).square().mean().backward()


def test_a_rank_that_dies_in_mid_step_is_an_error_on_the_other():
    def program():
        import os

        import torch
        from torch.nn.parallel import DistributedDataParallel

        import gradcomp.torch as gc

        gc.init(stall_warning_seconds=1.0, timeout_seconds=5.0, log_level="warning")
        model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4)))
        state, hook = gc.ddp_comm_hook(model, "quantize:bits=4")
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.0005)

        def dies(state, bucket):
            if gc.rank() == 1 and state.exchanger.pipeline.step == 3 and bucket.index() == 1:
                os._exit(17)
            return hook(state, bucket)

        ddp.register_comm_hook(state, dies)
        try:
            for _ in range(10):
                ddp(torch.randn(4, 16)).sum().backward()
        except gc.TransportError as error:
            print("raised:", error)
            raise

    survivor, dead = run_ranks(program, 2, timeout=40, imported=preloaded.TORCH)
    assert dead.returncode == 17
    assert survivor.returncode == 1, survivor
    assert "raised:" in survivor.stdout
