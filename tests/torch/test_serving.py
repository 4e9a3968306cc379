"""Ranks that only serve: the others train as if there were none. How they end: test_serving_ends.py."""

from __future__ import annotations

import tempfile

import pytest
import torch
from batch import on_ranks
from torch.nn.parallel import DistributedDataParallel

import gradcomp.torch as gc

SERVED = "parameter_server:dedicated=true"
served = on_ranks(3, "served", reduction=SERVED, slice_elements=64, timeout_seconds=30)


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8))


def weights(net: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()])


def wrapped(net: torch.nn.Module, compression="quantize:bits=4,bucket_size=32", **options):
    policy = gc.Policy(compression, filter=gc.Filter(min_elements=8))
    sgd = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    return gc.DistributedOptimizer(sgd, net.named_parameters(), policy, **options)


def batches(seed: int, steps: int = 6):
    """Those of one trainer, which are numbered from 1 here: rank 0 serves."""
    data = torch.Generator().manual_seed(seed)
    return [torch.randn(4, 8, generator=data) for _ in range(steps)]


def train(net: torch.nn.Module, opt, update=None, steps: int = 6) -> int:
    """What every script does, with one branch for servers; returns the number of steps."""
    if opt.serves:
        return opt.serve(update)
    for batch in batches(gc.rank(), steps):
        opt.zero_grad()
        (net(batch) - 1).square().mean().backward()
        (update or opt.step)()
    opt.done()
    return steps


def everyones(net: torch.nn.Module) -> torch.Tensor:
    return gc.allgather(weights(net)[None])


def without_server(compression: str, make_update=lambda net, opt: None, **options) -> torch.Tensor:
    """The trainers' parameters where rank 0 has nothing to do with it; on rank 0 those of the start."""
    net = network()
    if gc.rank():
        opt = wrapped(net, compression, process_set=gc.ProcessSet([1, 2]), reduction="sra", **options)
        train(net, opt, make_update(net, opt))
    return weights(net)


@pytest.mark.parametrize(
    "compression",
    [
        "quantize:bits=4,bucket_size=32",
        "quantize:bits=4,bucket_size=32,rounding=nearest,feedback=true",
        "powersgd:rank=2",
        "topk:density=0.1",
        "clt_k:density=0.1",
        "signum:bucket_size=32,momentum=0",
        "none",
    ],
)
@served
def test_all_ranks_end_where_the_trainers_do_without_a_server(compression):
    net = network()
    opt = wrapped(net, compression)
    assert opt.serves == (gc.rank() == 0)
    assert train(net, opt) == 6
    found = everyones(net)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    alone = without_server(compression)
    if not opt.serves:
        assert torch.equal(weights(net), alone)
    assert not torch.equal(weights(net), weights(network()))


@served
def test_the_mean_is_over_those_who_train():
    net = torch.nn.Linear(5, 3, bias=False)
    torch.nn.init.zeros_(net.weight)
    opt = gc.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1.0), net.named_parameters())
    if opt.serves:
        opt.serve()
    else:
        (net.weight.sum() * float(gc.rank())).backward()
        torch.testing.assert_close(net.weight.grad, torch.full((3, 5), 1.5))
        opt.step()
        opt.done()
    torch.testing.assert_close(net.weight.detach(), torch.full((3, 5), -1.5))


@served
def test_a_server_does_what_the_trainers_do_between_backward_and_the_next_batch():
    def make_update(net, opt):
        schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)

        def update():
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.05)
            opt.step()
            schedule.step()

        return update

    net = network()
    opt = wrapped(net)
    train(net, opt, make_update(net, opt))
    found = everyones(net)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    alone = without_server("quantize:bits=4,bucket_size=32", make_update)
    assert opt.serves or torch.equal(weights(net), alone)


@served
def test_trainers_may_be_done_more_than_once():
    net = network()
    opt = wrapped(net)
    assert [train(net, opt, steps=steps) for steps in (2, 0, 3)] == [2, 0, 3]
    found = everyones(net)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@served
def test_layers_that_no_trainer_used_are_left_alone_by_servers_too():
    net = network()
    opt = wrapped(net)
    if opt.serves:
        assert opt.serve() == 4
    else:
        for step in range(4):
            opt.zero_grad()
            used = net if step % 2 else net[0]
            used(torch.ones(2, 8)).square().mean().backward()
            opt.step()
        opt.done()
    found = everyones(net)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    moved = opt.state[net[2].weight]["momentum_buffer"]
    assert torch.equal(gc.allgather(moved.reshape(1, -1))[0], moved.reshape(-1))


@served
def test_rows_of_an_embedding_are_divided_by_those_who_train():
    net = torch.nn.Embedding(10, 4, sparse=True)
    torch.nn.init.zeros_(net.weight)
    opt = gc.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1.0), net.named_parameters())
    if opt.serves:
        assert opt.serve() == 2
    else:
        for _ in range(2):
            opt.zero_grad()
            net(torch.tensor([gc.rank(), 7])).sum().backward()
            opt.step()
        opt.done()
    want = torch.zeros(10, 4)
    want[[1, 2]], want[7] = -1.0, -2.0
    assert torch.equal(net.weight.detach(), want)


@served
def test_a_step_that_overflows_is_skipped_by_all_where_the_server_has_a_scaler_too():
    net = network()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)
    opt = wrapped(net, grad_scaler=scaler)
    scaler.scale(torch.zeros(()))  # which gives it its scale

    def update():
        scaler.step(opt)
        scaler.update()

    if opt.serves:
        assert opt.serve(update) == 5
    else:
        for step, batch in enumerate(batches(gc.rank(), 5)):
            opt.zero_grad()
            loss = (net(batch) - 1).square().mean() * (float("inf") if step == 2 else 1.0)
            scaler.scale(loss).backward()
            update()
        opt.done()
    assert scaler.get_scale() == 4.0
    found = everyones(net)
    assert found.isfinite().all()
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@served
def test_who_serves_has_no_gradients_and_who_trains_does_not_serve():
    net = network()
    opt = wrapped(net)
    if opt.serves:
        with pytest.raises(gc.StateError, match="only serves"):
            net(torch.ones(2, 8)).sum().backward()
        with pytest.raises(gc.StateError, match="only serves"):
            opt.step()
        with pytest.raises(gc.StateError, match="those who train"):
            opt.done()
        net.zero_grad()
    else:
        with pytest.raises(gc.StateError, match="this rank trains"):
            opt.serve()
    train(net, opt)
    found = everyones(net)
    assert torch.equal(found[0], found[1])


@served
def test_what_servers_do_not_answer_is_refused_before_anybody_waits():
    net = network()
    opt = wrapped(net)
    directory = tempfile.mkdtemp() if gc.rank() == 0 else "unused"
    for call in (
        lambda: gc.save(directory, opt),
        lambda: gc.load(directory, opt),
        opt.compression_state,
        lambda: opt.load_compression_state({}),
        lambda: opt.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]}),
    ):
        with pytest.raises(
            (gc.ConfigError, gc.StateError), match=r"dedicated servers|not a compression state"
        ):
            call()
    assert len(opt.param_groups) == 1
    train(net, opt)


@served
def test_what_needs_all_ranks_to_train_is_refused_on_every_rank():
    for options in ({"controller": "lgreco:every_steps=5"}, {"compression": "auto"}):
        with pytest.raises(gc.ConfigError, match=r"a controller, .* dedicated servers"):
            gc.DistributedOptimizer(torch.optim.SGD(network().parameters(), lr=0.1), **options)
    with pytest.raises(gc.ConfigError, match=r'on_skip="agree", .* dedicated servers'):
        wrapped(network(), on_skip="agree")
    with pytest.raises(gc.ConfigError, match="needs 1 to 2 dedicated servers among 3 ranks"):
        wrapped(network(), reduction="parameter_server:servers=3,dedicated=true")
    with pytest.raises(gc.ConfigError, match="all ranks train"):
        gc.ddp_comm_hook(DistributedDataParallel(network()), "quantize:bits=4")


@served
def test_trainers_that_differ_about_scalers_are_called_by_their_ranks():
    net = network()
    scaler = torch.amp.GradScaler("cpu") if gc.rank() == 2 else False
    with pytest.raises(gc.ConfigError, match=r"rank 2 has a GradScaler .* rank 1 has none"):
        train(net, wrapped(net, grad_scaler=scaler))


@on_ranks(4, "two servers", slice_elements=64, timeout_seconds=30)
def test_two_servers_hand_over_what_the_new_order_of_buckets_gives_to_the_other():
    net = network()
    opt = wrapped(
        net,
        "quantize:bits=2,bucket_size=16,rounding=nearest",
        reduction="parameter_server:servers=2,dedicated=true",
    )
    assert opt.serves == (gc.rank() < 2)
    if opt.serves:
        assert opt.serve() == 8
    else:
        for batch in batches(gc.rank() - 1, 8):
            opt.zero_grad()
            (net(batch) - 1).square().mean().backward()
            opt.step()
        opt.done()
    found = everyones(net)
    assert (found == found[0]).all()
    first = opt.buckets()[0][0]
    assert all(name.startswith("2.") for name in first)  # as backward goes
    owned = len(opt._gradcomp.exchange.exchanger.pipeline.residuals.ranges)
    assert (owned > 0) == opt.serves
