"""``init_process_group(backend="gradcomp")``: compressed DDP, and every collective as Gloo has it."""

from __future__ import annotations

import functools
import json

import preloaded
import pytest
import torch
import torch.distributed as dist
from batch import on_ranks
from documented import ROOT, blocks
from launching import run_ranks
from small_torch import assert_same_on_all_ranks, bits_of, data
from torch.nn.parallel import DistributedDataParallel

import gradcomp.torch as gc
from gradcomp.torch import backend
from gradcomp.torch.registered_layers import RegisteredLayers, sizes_of

FOUR_BITS, TWO_BITS = "quantize:bits=4,bucket_size=64", "quantize:bits=2,bucket_size=64"
STEPS = 6

two_ranks = on_ranks(2, backend_compression=FOUR_BITS)
three_ranks = on_ranks(3, backend_compression=FOUR_BITS)


def build(width: int = 48) -> torch.nn.Module:
    """Matrices that are large enough to be compressed, registered in another order than they run."""
    torch.manual_seed(0)
    model = torch.nn.ModuleDict(
        {
            "last": torch.nn.Linear(width, width),
            "bn": torch.nn.BatchNorm1d(width),
            "middle": torch.nn.Linear(width, width),
            "first": torch.nn.Linear(8, width),
        }
    )
    model.forward = lambda x: model["last"](torch.tanh(model["bn"](model["middle"](model["first"](x)))))
    return model


def train(ddp, steps: int = STEPS, lr: float = 0.1):
    optimizer = torch.optim.SGD(ddp.parameters(), lr=lr, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        ddp(data(step)).square().mean().backward()
        optimizer.step()
    return bits_of(ddp.parameters())


@functools.cache
def group(name: str):
    return dist.new_group(backend=name)


def compressed(model, **arguments):
    return DistributedDataParallel(model, process_group=group("gradcomp"), **arguments)


# ------------------------------------------------------------------------------------------ collectives


def reduced(op):
    def call(mine, group):
        dist.all_reduce(mine, op, group=group)
        return [mine]

    return call


def all_reduce_async(mine, group):
    work = dist.all_reduce(mine, group=group, async_op=True)
    work.wait()
    assert work.is_completed()
    (value,) = work.get_future().wait()
    return [mine, value]


def coalesced(mine, group):
    with dist._coalescing_manager(group=group):
        for part in mine.split(5):
            dist.all_reduce(part, group=group)
    return [mine]


def broadcast(mine, group):
    dist.broadcast(mine, 1, group=group)
    return [mine]


def reduce(mine, group):
    dist.reduce(mine, 0, group=group)
    return [mine] if dist.get_rank() == 0 else []


def all_gather(mine, group):
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine, group=group)
    return found


def all_gather_into_tensor(mine, group):
    found = mine.new_empty(len(mine) * dist.get_world_size())
    dist.all_gather_into_tensor(found, mine, group=group)
    return [found]


def reduce_scatter(mine, group):
    found = torch.empty_like(mine)
    dist.reduce_scatter_tensor(found, mine.repeat(dist.get_world_size()), group=group)
    return [found]


def gather_and_scatter(mine, group):
    root, size = dist.get_rank() == 0, dist.get_world_size()
    found = [torch.empty_like(mine) for _ in range(size)] if root else None
    dist.gather(mine, found, group=group)
    dist.scatter(mine, found[::-1] if root else None, group=group)
    return [mine]


def all_to_all(mine, group):
    found = torch.empty_like(mine)
    dist.all_to_all_single(found, mine, group=group)
    return [found]


def send_and_receive(mine, group):
    rank, size = dist.get_rank(), dist.get_world_size()
    found = torch.empty_like(mine)
    sent = dist.isend(mine, (rank + 1) % size, group=group)
    dist.recv(found, (rank - 1) % size, group=group)
    sent.wait()
    return [found]


def batched_sends(mine, group):
    rank, size = dist.get_rank(), dist.get_world_size()
    found = torch.empty_like(mine)
    there = dist.P2POp(dist.isend, mine, (rank + 1) % size, group)
    here = dist.P2POp(dist.irecv, found, (rank - 1) % size, group)
    for work in dist.batch_isend_irecv([there, here]):
        work.wait()
    return [found]


def objects(mine, group):
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, {"rank": dist.get_rank(), "values": mine.tolist()}, group=group)
    told = [found if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(told, 0, group=group)
    assert told[0] == found
    return [torch.tensor([part["values"] for part in found], dtype=torch.float64)]


def barriers(mine, group):
    dist.barrier(group=group)
    group.monitored_barrier()
    return []


CALLS = {
    **{op: reduced(getattr(dist.ReduceOp, op)) for op in ("SUM", "MIN", "MAX", "PRODUCT")},
    **{
        call.__name__: call
        for call in (
            all_reduce_async, coalesced, broadcast, reduce, all_gather, all_gather_into_tensor, reduce_scatter,
            gather_and_scatter, all_to_all, send_and_receive, batched_sends, objects, barriers,
        )
    },
}  # fmt: skip


def alike(call: str) -> None:
    """A call has the bits that it has over Gloo, even if a layer that DDP compresses has the tensor's size."""
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8):
        mine = torch.randn(12, generator=torch.Generator().manual_seed(dist.get_rank())).mul(9).to(dtype)
        ended = [CALLS[call](mine.clone(), group(name)) for name in ("gradcomp", "gloo")]
        assert bits_of(ended[0]) == bits_of(ended[1]), dtype


@two_ranks
@pytest.mark.parametrize("call", CALLS)
def test_a_call_between_two_ranks_is_gloos_bit_for_bit(call):
    alike(call)


@three_ranks
@pytest.mark.parametrize("call", CALLS)
def test_a_call_among_three_ranks_is_gloos_bit_for_bit(call):
    alike(call)


@two_ranks
def test_a_tensor_of_a_buckets_size_is_summed_exactly():
    model = build()
    ddp = compressed(model)
    train(ddp, 3)
    for sizes in ([sum(p.numel() for p in model.parameters())], [p.numel() for p in model.parameters()]):
        for size in sizes:
            mine = torch.randn(size, generator=torch.Generator().manual_seed(size + dist.get_rank()))
            both = [reduced(dist.ReduceOp.SUM)(mine.clone(), group(name)) for name in ("gradcomp", "gloo")]
            assert bits_of(both[0]) == bits_of(both[1])


# ------------------------------------------------------------------------------------------ DistributedDataParallel


def with_hook(model, compression=FOUR_BITS, **arguments):
    ddp = DistributedDataParallel(model, process_group=group("gloo"), **arguments)
    state, hook = gc.ddp_comm_hook(ddp, compression)
    ddp.register_comm_hook(state, hook)
    return ddp, state


DDP = {
    "by default": {},
    "many DDP buckets": {"bucket_cap_mb": 0.005},
    "gradients are views": {"gradient_as_bucket_view": True},
    "static graph": {"static_graph": True},
    "unused parameters are searched for": {"find_unused_parameters": True},
}


def equal_to_the_hook(**arguments):
    mine = compressed(build(), **arguments)
    hooked, state = with_hook(build(), **arguments)
    plain = DistributedDataParallel(build(), process_group=group("gloo"), **arguments)
    ends = [train(ddp) for ddp in (mine, hooked, plain)]
    assert ends[0] == ends[1]
    assert ends[0] != ends[2]
    found = backend.hook_state(mine).statistics()
    assert (found.steps, found.wire_bytes) == (STEPS, state.statistics().wire_bytes)
    assert found.wire_bytes < found.dense_bytes / 3
    assert_same_on_all_ranks(mine.parameters())


@two_ranks
@pytest.mark.parametrize("case", DDP)
def test_parameters_and_bytes_of_two_ranks_are_those_of_the_hook(case):
    equal_to_the_hook(**DDP[case])


@three_ranks
@pytest.mark.parametrize("case", ["by default", "many DDP buckets"])
def test_parameters_and_bytes_of_three_ranks_are_those_of_the_hook(case):
    equal_to_the_hook(**DDP[case])


@three_ranks
def test_a_model_over_a_group_of_some_ranks_is_exchanged_among_them():
    pair = dist.new_group([0, 2], backend="gradcomp")
    if dist.get_rank() == 1:
        return
    ddp = DistributedDataParallel(build(), process_group=pair)
    mine = train(ddp)
    both = [None, None]
    dist.all_gather_object(both, mine, group=pair)
    assert both[0] == both[1]
    assert backend.hook_state(ddp).statistics().steps == STEPS


@two_ranks
def test_join_lets_a_rank_without_batches_end():
    ddp = compressed(build())
    with ddp.join():
        train(ddp, 3 * dist.get_rank())
    assert_same_on_all_ranks(ddp.parameters())


@two_ranks
def test_a_model_over_gloo_has_no_hook():
    plain = DistributedDataParallel(build(), process_group=group("gloo"))
    assert "comm_hook" not in plain._get_ddp_logging_data()
    for one in (plain, build()):
        with pytest.raises(gc.ConfigError, match="DistributedDataParallel over a group of backend"):
            backend.hook_state(one)


@two_ranks
def test_a_second_hook_is_refused_by_name_and_collectives_still_work():
    ddp = compressed(build())
    with pytest.raises(gc.ConfigError, match=r'exchange_bucket is registered.*backend="gradcomp"'):
        ddp.register_comm_hook(None, test_a_second_hook_is_refused_by_name_and_collectives_still_work)
    train(ddp, 1)
    assert backend.hook_state(ddp).statistics().steps == 1


# ------------------------------------------------------------------------------------------ registered layers


def register(model):
    group("gradcomp")
    backend.register_model(model)


@on_ranks(2, "registered", backend_compression=FOUR_BITS)
def test_excluded_layers_are_exact_and_others_have_their_own_bits():
    model = build(40)
    register(model)
    backend.exclude_layer("bn")
    backend.exclude_layer("last")
    backend.compress_layer("middle.weight", TWO_BITS)
    ddp = compressed(model)
    plain = DistributedDataParallel(build(40), process_group=group("gloo"))
    for one in (ddp, plain):
        one(data(0)).square().mean().backward()
    for (name, mine), exact in zip(model.named_parameters(), plain.module.parameters(), strict=True):
        assert torch.equal(mine.grad, exact.grad) == (name != "middle.weight"), name
    plan = {
        entry.layer: (entry.compressor, entry.level)
        for entry in backend.hook_state(ddp).exchanger.pipeline.plan.assignments
    }
    assert plan["middle.weight"][1] == 2
    assert plan["last.weight"] == plan["bn.weight"] == plan["first.weight"]
    assert "quantize" not in plan["last.weight"][0]


@on_ranks(2, "registered", backend_compression=FOUR_BITS)
def test_fewer_bits_of_a_layer_are_fewer_bytes():
    bytes_sent = []
    for model, bits in ((build(56), 4), (torch.nn.Sequential(build(56)), 2)):
        register(model)
        backend.compress_layer("middle.weight", f"quantize:bits={bits},bucket_size=64")
        ddp = compressed(model)
        train(ddp, 1)
        bytes_sent.append(backend.hook_state(ddp).statistics().wire_bytes)
    saved = bytes_sent[0] - bytes_sent[1]
    assert saved == pytest.approx(
        56 * 56 * 2 / 8, rel=0.05
    )  # each rank sends half of the layer in each of two rounds


@on_ranks(2, "registered", backend_compression=FOUR_BITS)
def test_ranks_that_differ_raise_on_both():
    model, first = build(32), dist.get_rank() == 0
    register(model)
    backend.compress_layer("middle" if first else "last", TWO_BITS)
    with pytest.raises(gc.PlanMismatchError, match=r"'last\.bias': rank 0 has .*rank 1 has .*quantize"):
        compressed(model)
    other = torch.nn.Linear(7, 7 + first)
    if not first:
        backend.register_model(other)
    with pytest.raises(gc.ConfigError if first else gc.PlanMismatchError, match="no registered model"):
        compressed(torch.nn.Linear(7, 7))


def listing():
    """Listing A.1 of Markov 2024, and what happens around it, with no call of gradcomp's ``init``."""
    import copy
    import json
    import os
    import sys

    import pytest
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP

    import gradcomp.torch as gc
    import gradcomp.torch.backend as backend

    with pytest.raises(gc.StateError, match=r"init_process_group.*before register_model"):
        backend.register_model([("weight", 1)])
    names = {"build": lambda: torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.BatchNorm1d(128))}
    (page,) = json.loads(sys.argv[1])
    exec(page, names)
    ddp, state = names["model"], backend.hook_state(names["model"])
    assert dist.get_backend() == "gradcomp"
    ddp(torch.randn(4, 64)).square().mean().backward()
    if dist.get_world_size() > 1:
        plan = state.exchanger.pipeline.plan.assignments
        assert [(one.layer, one.level) for one in plan if "quantize" in one.compressor] == [("0.weight", 8)]
        assert state.statistics().wire_bytes < state.statistics().dense_bytes / 3
    copied = copy.deepcopy(ddp)
    assert torch.equal(copied.module[0].weight, ddp.module[0].weight)
    assert "comm_hook" not in copied._get_ddp_logging_data()
    with pytest.raises(ValueError, match="only implemented for GLOO"):
        dist.monitored_barrier()
    dist.monitored_barrier(dist.new_group(backend="gloo"))
    for pattern in ("bn", "bias"):
        with pytest.raises(gc.StateError if pattern == "bias" else gc.ConfigError):
            backend.exclude_layer(pattern)
    dist.destroy_process_group()

    meeting = f"file:///tmp/gradcomp-backend-{os.environ['MASTER_PORT']}"
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gradcomp", init_method=meeting, rank=rank, world_size=world)
    some = dist.new_group([0])
    if rank == 0 and world > 1:
        with pytest.raises(gc.StateError, match=r"some of the ranks.*gradcomp\.torch\.init\(\) on all"):
            DDP(torch.nn.Linear(64, 64), process_group=some)
    again = DDP(torch.nn.Linear(64, 64))
    again(torch.randn(4, 64)).square().mean().backward()
    assert backend.hook_state(again).statistics().steps == (world > 1)
    dist.destroy_process_group()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_page_runs_ends_and_begins_anew(world):
    (page,) = (code for _, code in blocks(ROOT / "docs/backend.md") if "register_model" in code)
    for rank, end in enumerate(
        run_ranks(listing, world, arguments=(json.dumps([page]),), imported=preloaded.TORCH)
    ):
        assert end.returncode == 0, (rank, end.stderr[-3000:])
        assert "Traceback" not in end.stderr, end.stderr


# ------------------------------------------------------------------------------------------ what is refused, locally

PAIRS = [("conv.weight", (8, 3, 3, 3)), ("conv.bias", 8), ("head.weight", 640)]


def registered(*rules):
    layers = RegisteredLayers()
    layers.add_model(sizes_of(PAIRS))
    for pattern, compression in rules:
        layers.add_rule(pattern, compression)
    return layers


def wrapped():
    layers = registered()
    layers.policy(sizes_of(PAIRS), gc.Policy(gc.Quantize(4)))
    return layers


REFUSED = {
    "not layers": (gc.ConfigError, "got int", lambda: sizes_of(3)),
    "no layers": (gc.ConfigError, "no layer to register", lambda: sizes_of([])),
    "a model without parameters": (gc.ConfigError, "no layer to register", lambda: sizes_of(torch.nn.Tanh())),
    "names alone": (gc.ConfigError, "pair of a name", lambda: sizes_of(["weight"])),
    "a size below zero": (gc.ConfigError, "pair of a name", lambda: sizes_of([("weight", -1)])),
    "a size that is no number": (gc.ConfigError, "pair of a name", lambda: sizes_of([("weight", (2, 2.5))])),
    "one name twice": (gc.ConfigError, "'b' occurs twice", lambda: sizes_of([("b", 1), ("b", 1)])),
    "one model twice": (gc.ConfigError, "registered already", lambda: registered().add_model(sizes_of(PAIRS))),
    "no model": (gc.StateError, "register_model", lambda: RegisteredLayers().add_rule("bn", "none")),
    "an unknown layer": (gc.ConfigError, "did you mean conv.bias", lambda: registered(("conv.bais", "none"))),
    "no pattern": (gc.ConfigError, "not empty", lambda: registered(("", "none"))),
    "no such bits": (gc.ConfigError, "bits", lambda: registered(("head", "quantize:bits=0"))),
    "no such compressor": (gc.ConfigError, "quantise", lambda: registered(("head", "quantise:bits=4"))),
    "no compressor": (gc.ConfigError, "compression must be", lambda: registered(("head", 4))),
    "a rule too late": (gc.StateError, "exchanges the layers", lambda: wrapped().add_rule("head", "none")),
    "another layer": (
        gc.ConfigError, "'tail' is not registered", lambda: registered().policy({"tail": 1}, gc.Policy())
    ),
    "another size": (
        gc.ConfigError, "has 9 elements.*with 8", lambda: registered().policy({"conv.bias": 9}, gc.Policy())
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_registered_is_refused(case):
    error, says, call = REFUSED[case]
    with pytest.raises(error, match=says):
        call()


def test_a_model_that_is_registered_after_it_was_wrapped_is_refused():
    layers = RegisteredLayers()
    default = gc.Policy(gc.Quantize(4))
    assert layers.policy(sizes_of(PAIRS[:2]), default) is default  # nothing registered: all is compressed
    with pytest.raises(gc.StateError, match="before it is wrapped"):
        layers.add_model(sizes_of(PAIRS))  # of which one was frozen


def test_the_last_rule_of_a_layer_applies_and_rules_of_another_model_do_not():
    layers = registered(("conv", "none"), ("*.weight", TWO_BITS), ("head", FOUR_BITS))
    layers.add_model(sizes_of([("tail.bias", 4)]))
    layers.add_rule("tail", "none")
    layers.add_rule("conv", "none")  # again, so it is the last
    policy = layers.policy(sizes_of(PAIRS), gc.Policy(gc.Quantize(8)))
    assert list(policy.overrides) == ["*conv*", "*head*", "*.weight"]
    assert [c.level for c in policy.overrides.values()][1:] == [4, 2]
    assert list(layers.policy({"tail.bias": 4}, gc.Policy()).overrides) == ["*tail*"]
