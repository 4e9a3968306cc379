"""The run log of a job: what it says of steps, ranks and layers, on real ranks."""

from __future__ import annotations

import time

import pytest
import torch
from batch import on_ranks
from small_torch import initialised, shared_folder

import gradcomp.torch as gc
from gradcomp.core.journal import read

EVERYTHING = gc.Filter(min_elements=0, min_dimensions=2, exclude_kinds=())
#: Larger than an exchange bucket of 1,024 elements, so that it travels in slices, and smaller.
SHAPES = (40, 64), (64, 5)


def make(compression: gc.Compressor, **arguments):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(*shape) for shape in SHAPES]
    model = torch.nn.Sequential(layers[0], torch.nn.Tanh(), layers[1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    policy = gc.Policy(compression, filter=EVERYTHING)
    return model, gc.DistributedOptimizer(optimizer, model.named_parameters(), policy, **arguments)


def backward(model: torch.nn.Module, step: int, factor: float = 1.0) -> None:
    draw = torch.Generator().manual_seed(1000 * step + gc.rank())
    x, y = torch.randn(16, 40, generator=draw), torch.randint(0, 5, (16,), generator=draw)
    (torch.nn.functional.cross_entropy(model(x), y) * factor).backward()


@on_ranks(3)
def test_times_of_all_ranks_skipped_steps_and_samples_of_layers():
    path = shared_folder() / "run.jsonl"
    with initialised(run_log=str(path), run_log_every_steps=4, slice_elements=1024):
        model, optimizer = make(gc.TopK(0.1))
        for step in range(14):
            optimizer.zero_grad()
            if gc.rank() == 2 and step > 4:
                time.sleep(0.05)
            backward(model, step)
            if step == 9:  # thrown away
                continue
            optimizer.step()
        sent = optimizer.statistics().wire_bytes
    if gc.rank():
        assert not list(path.parent.glob("*rank*"))
        return
    (run,) = read(path)
    assert [(each.step, each.steps) for each in run.windows] == [(0, 4), (4, 4), (8, 4), (12, 2)]
    *whole, rest = run.windows
    for each in whole:
        for rank in range(3):
            assert each.backward[rank] + each.exposed[rank] <= each.seconds[rank] + 1e-6
            assert each.waited[rank] <= each.exposed[rank] + 1e-6
            assert each.sent_bytes[rank] > 0
            assert each.wire[rank] > 0
            assert each.codec[rank] > 0
        assert max(each.seconds) - min(each.seconds) < 0.02
    late = whole[2]
    assert late.last == (0.0, 0.0, 4.0)
    assert min(late.waited[:2]) > 0.02 > late.waited[2]
    assert [each.discarded for each in run.windows] == [0, 0, 1, 0]
    assert rest.exposed[0] > 0
    assert (rest.exposed[1:], rest.last) == ((None, None), (None, None, None))
    steps_of = sum(each.sent_bytes[0] * each.steps for each in run.windows)
    assert steps_of == pytest.approx(sent, rel=0.01)
    (plan,) = run.plans
    assert sum(plan.layer_bytes) == pytest.approx(plan.predicted_bytes, abs=2)
    assert plan.layer_bytes[0] > plan.layer_bytes[2] > 0
    assert run.samples
    for each in run.samples:
        assert run.layers[each.layer].name in ("0.weight", "2.weight")
        assert 0 < each.error < 1
        assert each.norm > 0
        assert each.residual is not None


@on_ranks(3)
def test_steps_that_are_not_applied_are_named():
    path = shared_folder() / "run.jsonl"
    with initialised(run_log=str(path), run_log_every_steps=2):
        model, optimizer = make(gc.Quantize(4, 64))
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.zeros(()))
        for step in range(5):
            optimizer.zero_grad()
            backward(model, step, scaler.get_scale() * (float("inf") if step == 1 else 1.0))
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
    if gc.rank() == 0:
        (run,) = read(path)
        assert [skipped for each in run.windows for skipped in each.skipped] == [(1, 0)]


@on_ranks(3)
def test_a_step_that_the_ranks_agree_to_skip_has_no_layer():
    path = shared_folder() / "run.jsonl"
    with initialised(run_log=str(path), run_log_every_steps=2):
        model, optimizer = make(gc.Quantize(4, 64), on_skip="agree")
        for step in range(5):
            optimizer.zero_grad()
            backward(model, step)
            if step != 2 or gc.rank() != 1:
                optimizer.step()
        optimizer.zero_grad()
        skipped = optimizer.statistics().skipped_steps
    assert skipped == (0 if gc.rank() == 1 else 1)
    if gc.rank() == 0:
        (run,) = read(path)
        assert [skipped for each in run.windows for skipped in each.skipped] == [(2, None)]
        assert sum(each.discarded for each in run.windows) == 0


@on_ranks(3)
def test_plans_only_and_no_log():
    path = shared_folder() / "run.jsonl"
    for settings in ({"run_log": str(path), "run_log_every_steps": 0}, {}):
        with initialised(**settings):
            model, optimizer = make(gc.Quantize(4, 64))
            for step in range(3):
                optimizer.zero_grad()
                backward(model, step)
                optimizer.step()
    if gc.rank() == 0:
        (run,) = read(path)
        assert (len(run.plans), run.windows, run.samples) == (1, (), ())


@on_ranks(3)
def test_rank_0_alone_has_the_path():
    """The others take part in its gathers all the same."""
    path = shared_folder() / "run.jsonl"
    with initialised(run_log=str(path) if gc.rank() == 0 else "", run_log_every_steps=1):
        model, optimizer = make(gc.Quantize(4, 64))
        for step in range(4):
            optimizer.zero_grad()
            backward(model, step)
            optimizer.step()
    if gc.rank() == 0:
        (run,) = read(path)
        assert [(each.step, each.steps) for each in run.windows] == [(1, 1), (2, 1), (3, 1)]
        assert None not in run.windows[0].seconds


@on_ranks(3)
def test_controllers_log_what_they_have_measured():
    path = shared_folder() / "run.jsonl"
    with initialised(run_log=str(path), run_log_every_steps=5, deterministic=True):
        model, optimizer = make(gc.Quantize(4, 64), controller=gc.LGreCo(8, alpha=3))
        for step in range(24):
            optimizer.zero_grad()
            backward(model, step)
            optimizer.step()
    gains = path.with_name("gravac.jsonl"), path.with_name("by-layer.jsonl")
    for per_layer, file in enumerate(gains):
        with initialised(run_log=str(file), run_log_every_steps=5):
            controller = gc.GraVAC(minimum=4, maximum=16, window=6, per_layer=bool(per_layer))
            model, optimizer = make(gc.ErrorFeedback(gc.TopK(0.25)), controller=controller)
            for step in range(24):
                optimizer.zero_grad()
                backward(model, step)
                optimizer.step()
    if gc.rank():
        return
    (run,) = read(path)
    periods = [each for each in run.samples if each.over == "period"]
    assert {run.layers[each.layer].name for each in periods} == {"0.weight", "2.weight"}
    assert all(0 < each.error < 0.5 for each in periods)
    (run,) = read(gains[0])
    steps = [each.step for each in run.gains]
    assert steps == sorted(set(steps))
    assert len(steps) > 4  # in every window of the log, and at the end of every window of the controller
    last = run.gains[-1]
    assert last.row == "*"
    assert [factor.factor for factor in last.factors] == [1.0, 4.0, 8.0, 16.0]
    assert sum(factor.steps for factor in last.factors) == last.step + 1
    assert all(each.prior > 0 and each.corrected >= each.post[0] >= each.post[1] > 0 for each in run.gains)
    known = [factor.gain for each in run.gains for factor in each.factors if factor.gain is not None]
    assert max(known) == 1  # of the dense factor
    assert min(known) > 0
    (run,) = read(gains[1])
    assert {each.row for each in run.gains} == {"0.weight", "2.weight"}
    assert {each.step for each in run.gains} <= {5, 11, 17, 23}
