"""Sparse compressors, wrappers and schedules under an optimizer: ranks stay alike, and state comes back."""

from __future__ import annotations

import io

import pytest
import torch
from batch import on_ranks
from small_torch import assert_same_on_all_ranks, bits_of, shared_folder

import gradcomp.torch as gc
from gradcomp import TopK

KINDS = {
    "topk": "topk:density=0.05",
    "topk coded": "topk:density=0.1,indices=deflate,values=[quantize:bits=4]",
    "momentum": "local_clip[momentum_correction[topk:density=0.05]:factor=0.5]:max_norm=5",
    "warmup": "warmup[momentum_correction[topk:density=0.05]]:steps=3",
    "densities": "warmup[density_schedule[topk:density=0.02]:levels=0.5/0.1,steps_per_level=1]:steps=2",
    "lgc": "lgc:density=0.05,warmup_steps=2,train_steps=2,ends=false,least_parameters=0",
    "feedback": "error_feedback[topk:density=0.05]:decay=0.9,follow_rate=true",
}


def net(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(12, 40), torch.nn.Tanh(), torch.nn.Linear(40, 30))


def wrap(model, kind: str, **arguments):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    policy = gc.Policy(KINDS.get(kind, kind), filter=gc.Filter(min_elements=100))
    return gc.DistributedOptimizer(optimizer, model.named_parameters(), policy, **arguments)


def data(step: int, rows: int = 8) -> torch.Tensor:
    return torch.randn(rows, 12, generator=torch.Generator().manual_seed(1000 * step + gc.rank()))


def train(model, opt, first: int, last: int) -> None:
    for step in range(first, last):
        opt.param_groups[0]["lr"] = 0.05 / (1 + step // 2)
        opt.zero_grad()
        model(data(step)).square().mean().backward()
        opt.step()


def state_bits(opt) -> dict[str, list[bytes]]:
    state = opt.compression_state()
    fields = {f"{k} {n}": v for k, values in state["fields"].items() for n, v in values.items()}
    return {name: bits_of([value]) for name, value in {**state["residuals"], **fields}.items()}


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_ranks_hold_the_same_bytes_and_a_saved_run_goes_on_bit_for_bit(kind: str):
    whole, folder, models = net(), shared_folder(), {}
    uninterrupted = wrap(whole, kind)
    for step in range(7):
        if step in (2, 3, 4):
            gc.save(folder / str(step), uninterrupted)
            models[step] = {name: value.clone() for name, value in whole.state_dict().items()}
        train(whole, uninterrupted, step, step + 1)
        assert_same_on_all_ranks(whole.parameters())
    plain = net()
    train(plain, wrap(plain, kind), 0, 7)
    assert bits_of(plain.parameters()) == bits_of(whole.parameters())  # a save changes nothing
    for stop, weights in models.items():
        other = net(seed=9)
        other.load_state_dict(weights)
        again = wrap(other, kind)
        gc.load(folder / str(stop), again)
        train(other, again, stop, 7)
        assert bits_of(other.parameters()) == bits_of(whole.parameters())
        assert state_bits(again) == state_bits(uninterrupted)


@pytest.mark.parametrize("old", [False, True])
@on_ranks(2)
def test_a_local_state_goes_through_torch_save_also_from_before_there_were_fields(old: bool):
    (model, opt), (_, other) = ((m, wrap(m, "topk" if old else "momentum")) for m in (net(), net()))
    train(model, opt, 0, 3)
    state = opt.compression_state()
    if old:
        del state["fields"], state["rate"]
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    other.load_compression_state(torch.load(file, weights_only=True))
    assert state_bits(other) == state_bits(opt)
    assert old or any("momentum" in name for name in state_bits(other))


@on_ranks(2)
def test_residuals_follow_the_optimizers_learning_rate():
    parameter = torch.nn.Parameter(torch.zeros(2, 2))
    opt = gc.DistributedOptimizer(
        torch.optim.SGD([parameter], lr=0.5),
        [("w", parameter)],
        gc.Policy("error_feedback[topk:density=0.25]:follow_rate=true", filter=gc.Filter(min_elements=0)),
    )
    means = []
    for lr, gradient in ((0.5, [4.0, 2, 1, 0]), (0.25, [0.0, 1, 0, 0]), (0.25, [0.0, 0, 0, 1])):
        opt.param_groups[0]["lr"] = lr
        opt.zero_grad()
        (parameter * torch.tensor(gradient).view(2, 2)).sum().backward()
        means.append(parameter.grad.reshape(-1).tolist())
        opt.step()
    assert means == [[4, 0, 0, 0], [0, 5, 0, 0], [0, 0, 2, 0]]


@on_ranks(2)
def test_a_hook_does_not_know_the_learning_rate():
    with pytest.raises(gc.ConfigError, match="use DistributedOptimizer"):
        gc.ddp_comm_hook(net(), KINDS["feedback"])


@pytest.mark.parametrize(
    "others", ["warmup[topk:density=0.05]:steps=4", "warmup[topk:density=0.06]:steps=3", "none"]
)
@on_ranks(2)
def test_schedules_that_differ_are_refused_by_all(others: str):
    with pytest.raises(gc.PlanMismatchError, match=r"schedule|compress"):
        wrap(net(), others if gc.rank() else "warmup[topk:density=0.05]:steps=3")


@on_ranks(2)
def test_layers_that_come_after_a_warmup_have_none_of_their_own():
    model = net()
    opt = wrap(model, "warmup")
    train(model, opt, 0, 5)
    extra = torch.nn.Parameter(torch.randn(20, 20, generator=torch.Generator().manual_seed(1)))
    opt.add_param_group({"params": [extra], "names": ["extra"]})
    plan = opt.plan()
    assert {a.compressor.split(":")[0] for a in plan.assignments if a.level} == {
        plan.by_layer["extra"].compressor.split(":")[0]
    }
    assert plan.by_layer["extra"].level == 0.05
    opt.zero_grad()
    (model(data(5)).square().mean() + (extra * gc.rank()).square().sum()).backward()
    opt.step()
    assert_same_on_all_ranks([*model.parameters(), extra])


@on_ranks(2)
def test_layers_that_come_during_a_warmup_end_it_with_the_others():
    model = net()
    opt = wrap(model, "warmup")
    train(model, opt, 0, 1)
    extra = torch.nn.Parameter(torch.ones(20, 20))
    opt.add_param_group({"params": [extra], "names": ["extra"]})
    levels = []
    for step in range(1, 5):
        levels.append({a.level for a in opt.plan().assignments})
        train(model, opt, step, step + 1)
    assert levels == [{None}, {None}, {0.05, None}, {0.05, None}]


@pytest.mark.parametrize("op", ["Average", "Sum"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@on_ranks(2)
def test_everything_sent_is_the_mean_or_the_sum(op: str, dtype: str):
    parameter = torch.nn.Parameter(torch.zeros(3, 5, dtype=getattr(torch, dtype)))
    policy = gc.Policy(TopK(1.0), filter=gc.Filter(min_elements=0))
    opt = gc.DistributedOptimizer(
        torch.optim.SGD([parameter], lr=0.1), [("w", parameter)], policy, op=getattr(gc, op)
    )
    gradient = torch.arange(15, dtype=parameter.dtype).view(3, 5)
    for _ in range(2):
        opt.zero_grad()
        (parameter * gradient * (1 + 2 * gc.rank())).sum().backward()
        assert torch.equal(parameter.grad, gradient * (2 if op == "Average" else 4))
        opt.step()


@pytest.mark.parametrize("kind", ["topk", "momentum", "densities", "lgc", "feedback"])
@pytest.mark.parametrize("as_dense", [False, True])
@on_ranks(2)
def test_sparse_gradients_travel_beside_or_as_dense_ones(as_dense: bool, kind: str):
    torch.manual_seed(0)
    embedding, linear = torch.nn.Embedding(50, 12, sparse=True), torch.nn.Linear(12, 30)
    model = torch.nn.Sequential(embedding, linear)
    opt = wrap(model, kind, sparse_as_dense=as_dense)
    for step in range(5):
        opt.zero_grad()
        model(torch.tensor([step, 7 + gc.rank()])).square().mean().backward()
        assert embedding.weight.grad.is_sparse
        opt.step()
        assert_same_on_all_ranks(model.parameters())
