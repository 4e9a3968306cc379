"""LocalSteps: what ranks do is what one process computes for all of them, and resumes, joins and refusals."""

from __future__ import annotations

import copy
import hashlib
import io
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from batch import on_ranks
from elastic_job import job
from small_torch import bits_of, small, unsent

import gradcomp.torch as gc
from gradcomp.compress.sparse.chunks import Chunks


class Net(torch.nn.Module):
    """Odd sizes; parameters that are tied, frozen, scalar or empty."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(31, 13)
        self.inner = torch.nn.Linear(13, 17)
        self.frozen = torch.nn.Linear(17, 13).requires_grad_(False)
        self.scale, self.empty = torch.nn.Parameter(torch.tensor(1.5)), torch.nn.Parameter(torch.zeros(0, 3))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        x = self.embedding(tokens)
        x = x + self.frozen(torch.tanh(self.inner(x))) * self.scale + self.empty.sum()
        return torch.nn.functional.linear(x, self.embedding.weight)


def loss_of(model: torch.nn.Module, step: int, rank: int) -> torch.Tensor:
    tokens = torch.randint(31, (4, 5), generator=torch.Generator().manual_seed(100 * step + rank))
    return torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1).flatten())


def inner_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)


def train(model: torch.nn.Module, opt: Any, steps: range, rank: int) -> None:
    for step in steps:
        opt.zero_grad()
        loss_of(model, step, rank).backward()
        opt.step()


def trained(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def digests(tensors: list[torch.Tensor]) -> list[str]:
    """Those of all ranks' tensors."""
    return gc.allgather_object(hashlib.sha256(b"".join(bits_of(tensors))).hexdigest())


def assert_same_on_all_ranks(tensors: list[torch.Tensor]) -> None:
    assert len(set(digests(tensors))) == 1


class Reference:
    """All ranks of a job in one process, from the papers' equations.

    ``mean`` makes the mean of the ranks' pseudo-gradients: of those of one parameter, by its number.
    """

    def __init__(
        self,
        world: int,
        every: int,
        outer: Callable[[list[torch.Tensor]], torch.optim.Optimizer],
        mean: Callable[[int, list[torch.Tensor]], torch.Tensor],
        parts: list[list[int]] | None = None,
        delay: int = 0,
        mixing: float = 0.5,
    ) -> None:
        self.models = [Net() for _ in range(world)]
        self.inner = [inner_of(model) for model in self.models]
        self.anchors = [torch.nn.Parameter(p.detach().clone()) for p in trained(self.models[0])]
        self.parts = parts or [list(range(len(self.anchors)))]
        self.outer = [outer([self.anchors[i] for i in part]) for part in self.parts]
        self.every, self.mean, self.delay, self.mixing = every, mean, delay, mixing if delay else 0.0
        self.under_way: dict[int, tuple[int, list[torch.Tensor]]] = {}

    def run(self, steps: int) -> Reference:
        for step in range(steps):
            for rank, (model, inner) in enumerate(zip(self.models, self.inner, strict=True)):
                train(model, inner, range(step, step + 1), rank)
            for number in range(len(self.parts)):
                self.apply(number, step + 1)
                if (step + 1) % self.every == (number + 1) * self.every // len(self.parts) % self.every:
                    self.under_way[number] = step + 1 + self.delay, self.means(number)
                self.apply(number, step + 1)
        return self

    def means(self, number: int) -> list[torch.Tensor]:
        with torch.no_grad():
            own = [trained(model) for model in self.models]
            return [self.mean(i, [self.anchors[i] - p[i] for p in own]) for i in self.parts[number]]

    @torch.no_grad()
    def apply(self, number: int, step: int) -> None:
        if number not in self.under_way or self.under_way[number][0] != step:
            return
        _, means = self.under_way.pop(number)
        for i, mean in zip(self.parts[number], means, strict=True):
            self.anchors[i].grad = mean
        self.outer[number].step()
        for i, model in itertools.product(self.parts[number], self.models):
            own = trained(model)[i]
            own.copy_(self.mixing * own + (1 - self.mixing) * self.anchors[i])


def exact_mean(_: int, given: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(given).mean(0)


class SparseMean:
    """Sarfi et al. 2025: e <- d e + D; S = Q(TopK of each chunk of e); e <- e - S; the mean of S."""

    def __init__(self, world: int, density: float, chunk: int, bits: int, decay: float) -> None:
        self.kept: list[dict[int, np.ndarray]] = [{} for _ in range(world)]
        self.density, self.chunk, self.bits, self.decay = density, chunk, bits, decay

    def __call__(self, number: int, given: list[torch.Tensor]) -> torch.Tensor:
        total = np.zeros(given[0].numel())
        for kept, d in zip(self.kept, given, strict=True):
            e = np.float32(self.decay) * kept.get(number, np.float32(0)) + d.numpy().reshape(-1)
            sent = self.sent(e)
            kept[number] = e - sent
            total += sent
        return torch.from_numpy((total / len(given)).astype(np.float32)).reshape(given[0].shape)

    def sent(self, e: np.ndarray) -> np.ndarray:
        n = len(e)
        k = min(max(round(self.density * n), 1), n)
        places = []
        for a in range(0, n, self.chunk):
            b = min(a + self.chunk, n)
            most = k * b // n - k * a // n
            places += sorted(a + np.argsort(-np.abs(e[a:b]), kind="stable")[:most])
        out = np.zeros(n, np.float32)
        for at in range(0, len(places), 64):
            bucket = places[at : at + 64]
            low, high = e[bucket].min(), e[bucket].max()
            unit = (high - low) / (2**self.bits - 1)
            out[bucket] = low + unit * (np.round((e[bucket] - low) / unit) if unit else 0)
        return out


def numbers_in(opt: gc.LocalSteps) -> list[list[int]]:
    """The parameters of each fragment, by their numbers."""
    at = itertools.count()
    return [[next(at) for _ in fragment.names] for fragment in opt.fragments]


def assert_as(ours: torch.nn.Module, opt: gc.LocalSteps, reference: Reference, **close: float) -> None:
    """This rank's parameters, the anchors and the outer state are those of the reference."""
    assert_same_on_all_ranks([anchor for fragment in opt.fragments for anchor in fragment.anchors])
    momenta = [state for f in opt.fragments for s in f.optimizer.state.values() for state in s.values()]
    assert_same_on_all_ranks([m for m in momenta if isinstance(m, torch.Tensor)])
    anchors = [anchor for fragment in opt.fragments for anchor in fragment.anchors]
    torch.testing.assert_close(anchors, reference.anchors, **close)
    torch.testing.assert_close(trained(ours), trained(reference.models[gc.rank()]), **close)


NEAR = {"rtol": 1e-4, "atol": 1e-5}


def nesterov(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


def check_diloco(every: int, fragments: int, delay: int, mixing: float = 0.5) -> None:
    model = Net()
    opt = gc.DiLoCo(model, inner_of(model), every, fragments=fragments, delay=delay, mixing=mixing)
    steps = 3 * every + 1
    parts = numbers_in(opt)
    reference = Reference(gc.size(), every, nesterov, exact_mean, parts, delay, mixing).run(steps)
    train(model, opt, range(steps), gc.rank())
    opt.settle()
    for number in reference.under_way:
        for i, mean in zip(parts[number], reference.under_way[number][1], strict=True):
            reference.anchors[i].grad = mean
        reference.outer[number].step()
    assert_as(model, opt, reference, **NEAR)


@on_ranks(1)
def test_diloco_alone():
    check_diloco(3, 1, 0)
    check_diloco(4, 2, 1)


@on_ranks(2)
def test_diloco_on_two():
    check_diloco(3, 1, 0)
    check_diloco(4, 2, 1)
    check_diloco(2, 1, 2, 0.25)
    check_diloco(1, 1, 0)


@on_ranks(3)
def test_diloco_on_three():
    check_diloco(3, 1, 0)
    check_diloco(5, 3, 5)


@on_ranks(4)
def test_diloco_on_four():
    check_diloco(4, 4, 2)


@on_ranks(2)
def test_without_fragments_and_delay_parameters_are_equal_after_every_round():
    model = Net()
    opt = gc.LocalSteps(model, inner_of(model), 3, compression=gc.Quantize(4, bucket_size=64))
    for step in range(7):
        train(model, opt, range(step, step + 1), gc.rank())
        every = digests(trained(model))
        assert (every[0] == every[1]) == (step % 3 == 2)
    assert opt.statistics().steps == 2
    assert opt.statistics().wire_bytes > 0


@on_ranks(2)
def test_the_mean_of_parameters_is_the_default():
    model = Net()
    opt = gc.LocalSteps(model, inner_of(model), 2)
    reference = Reference(2, 2, lambda p: torch.optim.SGD(p, lr=1.0), exact_mean).run(4)
    train(model, opt, range(4), gc.rank())
    assert_as(model, opt, reference, **NEAR)


def check_sparse(bits: int, chunk: int, density: float, rounds: int = 4) -> None:
    every, model = 2, Net()
    opt = gc.SparseLoCo(model, inner_of(model), every, density=density, bits=bits, chunk=chunk, decay=0.9)
    mean = SparseMean(gc.size(), density, chunk, bits, 0.9)
    reference = Reference(gc.size(), every, lambda p: torch.optim.SGD(p, lr=1.0), mean)
    train(model, opt, range(every * rounds), gc.rank())
    reference.run(every * rounds)
    assert_as(model, opt, reference, **NEAR)


@on_ranks(2)
def test_sparse_loco_on_two():
    check_sparse(2, 4096, 0.02)
    check_sparse(4, 32, 0.1)
    check_sparse(8, 7, 0.5)


@on_ranks(3)
def test_sparse_loco_on_three():
    check_sparse(2, 64, 0.05)


@on_ranks(4)
def test_sparse_loco_on_four():
    check_sparse(3, 100, 0.2)


def test_a_chunk_has_its_share():
    for n, k, chunk in itertools.product((1, 5, 63, 64, 1000), (0, 1, 3, 50), (1, 7, 64, 4096)):
        limits = np.array([min(k, n), 0])
        chunks = Chunks.of(np.array([n, 0]), limits, chunk)
        assert (chunks.limits <= chunks.lengths).all()
        assert np.bincount(chunks.rows, chunks.limits, 2).tolist() == limits.tolist()
        assert np.bincount(chunks.rows, chunks.lengths, 2).tolist() == [n, 0]
        whole = chunks.limits[chunks.lengths == chunk]
        assert not len(whole) or whole.max() - whole.min() <= 1


COMPRESSIONS = {
    "4 bits": gc.Quantize(4, bucket_size=64, rounding="nearest"),
    "powersgd": gc.PowerSGD(rank=2),
    "topk": gc.TopK(density=0.1),
}


@pytest.mark.parametrize("compression", COMPRESSIONS)
@on_ranks(2)
def test_feedback_telescopes_over_rounds(compression: str):
    """What was applied is the sum of the means of pseudo-gradients, but for the residuals."""
    model = Net()
    opt = gc.LocalSteps(model, inner_of(model), 2, compression=small(COMPRESSIONS[compression]))
    names, anchors = opt.fragments[0].names, opt.fragments[0].anchors
    start = [anchor.detach().clone() for anchor in anchors]
    total = [torch.zeros_like(anchor) for anchor in start]
    for step in range(6):
        before = [anchor.detach().clone() for anchor in anchors]
        loss_of_step = copy.deepcopy((model, opt.inner))
        train(*loss_of_step, range(step, step + 1), gc.rank())
        train(model, opt, range(step, step + 1), gc.rank())
        if step % 2:  # what this rank had before the exchange is what it has when it steps alone
            for sum_of, anchor, own in zip(total, before, trained(loss_of_step[0]), strict=True):
                sum_of.add_(anchor - own.detach())
    owed = unsent(opt.fragments[0].optimizer)
    assert sum(float(value.abs().sum()) for value in owed.values()) > 0
    for name, first, anchor, sum_of in zip(names, start, anchors, total, strict=True):
        left = owed.get(name, torch.zeros(1)).reshape(-1) / 2
        applied = (first - anchor.detach()).reshape(-1)
        torch.testing.assert_close(applied + left, gc.allreduce(sum_of).reshape(-1), rtol=1e-3, atol=1e-4)


@on_ranks(2)
def test_schedules_of_both_optimizers_are_followed():
    model = Net()
    inner = inner_of(model)
    outer = torch.optim.SGD(model.parameters(), lr=1.0)
    opt = gc.LocalSteps(model, inner, 2, outer)
    rates = [torch.optim.lr_scheduler.ExponentialLR(one, 0.5) for one in (opt, outer)]
    for step in range(4):
        train(model, opt, range(step, step + 1), gc.rank())
        for each in rates:
            each.step()
    assert opt.param_groups[0]["lr"] == inner.param_groups[0]["lr"] == 0.02 / 16
    assert opt.fragments[0].optimizer.param_groups[0]["lr"] == 1 / 8, "that of the step of the second round"


@on_ranks(2)
def test_a_state_that_is_taken_changes_nothing():
    """Also while an exchange is under way, and the outer rate changes before its mean is applied."""
    ended = []
    for takes in (False, True):
        model = Net()
        outer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
        opt = gc.LocalSteps(model, inner_of(model), 4, outer, delay=2, fragments=2)
        rates = torch.optim.lr_scheduler.ExponentialLR(outer, 0.7)
        for step in range(14):
            train(model, opt, range(step, step + 1), gc.rank())
            if takes:
                opt.state_dict()
            rates.step()
        opt.settle()
        ended.append(bits_of([*model.parameters(), *(a for f in opt.fragments for a in f.anchors)]))
    assert ended[0] == ended[1]


@on_ranks(2)
def test_a_scaler_may_skip_a_step_on_one_rank():
    model = Net()
    opt = gc.LocalSteps(model, inner_of(model), 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(4):
        opt.zero_grad()
        loss = loss_of(model, step, gc.rank())
        scaler.scale(loss * (float("inf") if step == gc.rank() else 1.0)).backward()
        if step == 3:
            scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()
    assert opt.steps == 4
    assert next(int(s["step"]) for s in opt.inner.state.values()) == 3
    assert_same_on_all_ranks(trained(model))
    assert torch.stack([p.detach().sum() for p in trained(model)]).isfinite().all()


def check_resume(**arguments: Any) -> None:
    """A job that is saved in the middle of a round, with an exchange under way, goes on bit for bit."""

    def make() -> tuple[torch.nn.Module, gc.LocalSteps]:
        model = Net()
        return model, gc.SparseLoCo(model, inner_of(model), 4, density=0.1, chunk=64, **arguments)

    model, opt = make()
    train(model, opt, range(9), gc.rank())
    file = io.BytesIO()
    torch.save([model.state_dict(), opt.state_dict()], file)
    train(model, opt, range(9, 17), gc.rank())
    again, resumed = make()
    file.seek(0)
    states = torch.load(file, weights_only=True)
    again.load_state_dict(states[0])
    resumed.load_state_dict(states[1])
    train(again, resumed, range(9, 17), gc.rank())
    assert bits_of(again.parameters()) == bits_of(model.parameters())
    theirs = [bits_of(f.anchors) for f in resumed.fragments]
    assert theirs == [bits_of(f.anchors) for f in opt.fragments]


@on_ranks(2)
def test_a_resumed_job_goes_on_bit_for_bit():
    check_resume()
    check_resume(fragments=2, delay=2)


@on_ranks(1)
def test_a_resumed_process_goes_on_bit_for_bit():
    check_resume(fragments=2, delay=3)


def check_join(delay: int, divide: Any) -> None:
    """Ranks have 3, 8, ... batches, of rounds of 2. All end with the state of one that trained last, but residuals."""
    model = Net()
    opt = gc.SparseLoCo(model, inner_of(model), 2, density=0.1, chunk=64, delay=delay)
    schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)
    with gc.join(opt, schedule, divide=divide) as context:
        for step in range(3 + 5 * gc.rank()):
            train(model, opt, range(step, step + 1), gc.rank())
            schedule.step()
    assert context.last == gc.size() - 1
    assert_same_on_all_ranks(list(model.parameters()))
    assert_same_on_all_ranks([anchor for fragment in opt.fragments for anchor in fragment.anchors])
    assert_same_on_all_ranks([v for state in opt.inner.state.values() for v in state.values()])
    assert (
        gc.allgather_object([opt.steps, schedule.last_epoch]) == [[3 + 5 * (gc.size() - 1)] * 2] * gc.size()
    )
    train(model, opt, range(100, 104), gc.rank())
    assert_same_on_all_ranks([anchor for fragment in opt.fragments for anchor in fragment.anchors])


@on_ranks(2)
def test_ranks_with_fewer_batches_join():
    check_join(0, "all")
    check_join(1, "active")


@on_ranks(3)
def test_three_ranks_join_one_after_the_other():
    check_join(2, "all")


#: Commits after every round of 3 steps. Once three train, the process with DIE kills itself in the middle of a round.
ELASTIC = """
    import hashlib, json, os, signal
    import torch
    import gradcomp.torch as gc

    most, dies = int(os.environ["MOST"]), "DIE" in os.environ
    gc.init(timeout_seconds=40)
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Linear(30, 5))
    opt = gc.SparseLoCo(model, torch.optim.AdamW(model.parameters(), lr=0.01), 3, density=0.1, delay=1, fragments=2)
    state = gc.elastic.TorchState(model=model, optimizer=opt, step=0, sizes=[])
    drawn = torch.Generator().manual_seed(os.getpid())


    @gc.elastic.run
    def train(state):
        state.sizes = [*state.sizes, gc.size()]
        print(json.dumps({"size": gc.size(), "begun": state.step, "steps": opt.steps}), flush=True)
        while state.step < 12 or most not in state.sizes:
            opt.zero_grad()
            model(torch.randn(8, 20, generator=drawn)).square().sum().backward()
            opt.step()
            state.step += 1
            if dies and gc.size() == 3 and state.step % 3 == 2 and state.step > 3:
                os.kill(os.getpid(), signal.SIGKILL)
            if state.step % 3 == 0:
                state.commit()


    train(state)
    anchors = [anchor for fragment in opt.fragments for anchor in fragment.anchors]
    digest = hashlib.sha256(b"".join(a.detach().numpy().tobytes() for a in anchors)).hexdigest()
    print(json.dumps({"digest": digest, "steps": opt.steps, "step": state.step, "sizes": state.sizes}), flush=True)
"""


def test_a_rank_that_dies_costs_its_round():
    with job(ELASTIC, GRADCOMP_MIN_RANKS=1, MOST=3) as run:
        for number in range(3):
            run.start(**({"DIE": 1} if number == 0 else {}))
        assert [end == 0 for end in run.finish()] == [False, True, True]
        finished = [said for number in range(3) for said in run.said(number) if "digest" in said]
        assert len(finished) == 2
        assert finished[0] == finished[1]
        assert finished[0]["steps"] == finished[0]["step"] >= 12
        assert finished[0]["sizes"][-1] == 2
        again = [run.said(number)[-2] for number in (1, 2)]
        assert [said["size"] for said in again] == [2, 2]
        assert again[0]["begun"] == again[1]["begun"] == again[0]["steps"]
        assert again[0]["begun"] % 3 == 0


def test_a_newcomer_takes_over_anchors_and_the_place_in_the_round():
    with job(ELASTIC, GRADCOMP_MIN_RANKS=1, MOST=2) as run:
        run.start()
        run.until(lambda: bool(run.said(0)))
        run.start()
        assert run.finish() == [0, 0]
        finished = [run.said(number)[-1] for number in range(2)]
        assert finished[0]["digest"] == finished[1]["digest"]
        assert finished[0]["steps"] == finished[1]["steps"]
        joined = run.said(1)[0]
        assert joined["size"] == 2
        assert joined["steps"] == joined["begun"]


@on_ranks(3)
def test_others_of_the_job_step_by_themselves():
    """A process set exchanges; a rank outside trains alone, with rounds of its own."""
    some = gc.ProcessSet([0, 2])
    model = Net()
    if gc.rank() == 1:
        train(model, inner_of(model), range(4), 1)
    else:
        opt = gc.LocalSteps(model, inner_of(model), 2, process_set=some)
        train(model, opt, range(4), gc.rank())
    held = digests(trained(model))
    assert held[0] == held[2] != held[1]


@on_ranks(2)
def test_a_controller_chooses_levels_between_rounds():
    model = Net()
    policy = small(gc.Quantize(4, bucket_size=64))
    opt = gc.LocalSteps(model, inner_of(model), 2, compression=policy, controller=gc.LGreCo(3, alpha=3))
    train(model, opt, range(20), gc.rank())
    assert opt.fragments[0].optimizer.compression_metrics()["gradcomp/plan_version"] > 0
    assert_same_on_all_ranks(trained(model))


@on_ranks(2)
def test_all_ranks_begin_with_the_first_ones_parameters_and_keep_their_own_buffers():
    model = Net()
    if gc.rank() == 1:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
    opt = gc.LocalSteps(model, inner_of(model), 2)
    assert bits_of(model.parameters()) == bits_of(Net().parameters())
    train(model, opt, range(2), gc.rank())
    assert model.seen == 2


def given_of() -> dict[str, Any]:
    model = Net()
    return {"model": model, "inner_optimizer": inner_of(model)}


def refused(what: str) -> tuple[dict[str, Any], str]:
    given = given_of()
    model = given["model"]
    stranger = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=1.0)
    stepped = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    stepped.state[model.scale]["momentum_buffer"] = torch.zeros(())
    cases: dict[str, tuple[dict[str, Any], str]] = {
        "every": ({"every": 0}, "every must be a whole number"),
        "delay": ({"every": 4, "delay": 5}, "delay must be a whole number from 0 to 4"),
        "mixing": ({"mixing": 1.0}, "mixing must be in"),
        "fragments": ({"fragments": 9}, "5 trainable parameters, too few for 9 fragments"),
        "fragments of a round": (
            {"every": 2, "fragments": 3},
            "fragments must be a whole number from 1 to 2",
        ),
        "no module": ({"model": [model]}, "torch.nn.Module"),
        "no optimizer": ({"inner_optimizer": model}, "inner_optimizer must be a torch.optim.Optimizer"),
        "a stranger": ({"inner_optimizer": stranger}, "a parameter that the model has not"),
        "an outer stranger": ({"outer": stranger}, "outer has a parameter that the model has not"),
        "too little": ({"outer": torch.optim.SGD([model.scale], lr=1.0)}, "lacks 'empty'"),
        "stepped": ({"outer": stepped}, "stepped already"),
        "meta": ({"model": torch.nn.Linear(2, 2, device="meta")}, "meta device"),
        "compression": ({"compression": "quantize:bits=9"}, "bits"),
    }
    arguments, says = cases[what]
    return {**given, **arguments}, says


REFUSED = [
    "every", "delay", "mixing", "fragments", "fragments of a round", "no module", "no optimizer", "a stranger",
    "an outer stranger", "too little", "stepped", "meta", "compression",
]  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
@on_ranks(2)
def test_what_cannot_work_is_refused_on_every_rank(what: str):
    arguments, says = refused(what)
    with pytest.raises(gc.ConfigError, match=says):
        gc.LocalSteps(**arguments)


@on_ranks(2)
def test_ranks_that_differ_are_an_error_on_every_rank():
    given = given_of()
    with pytest.raises(gc.PlanMismatchError, match="every"):
        gc.LocalSteps(**given, every=2 + gc.rank())
    with pytest.raises(gc.PlanMismatchError, match="lr"):
        gc.LocalSteps(**given, outer=torch.optim.SGD(given["model"].parameters(), lr=1.0 + gc.rank()))
    outer = torch.optim.SGD(given["model"].parameters(), lr=1.0)
    if gc.rank() == 1:
        outer.state[given["model"].scale]["step"] = 1
    with pytest.raises(gc.ConfigError, match="rank 1: outer has stepped already"):
        gc.LocalSteps(**given, outer=outer)


@on_ranks(2)
def test_wrapped_optimizers_added_parameters_and_other_states_are_refused():
    model = Net()
    wrapped = gc.DistributedOptimizer(inner_of(model), model.named_parameters())
    with pytest.raises(gc.ConfigError, match="exchanges by itself"):
        gc.LocalSteps(model, wrapped)
    model = Net()
    opt = gc.LocalSteps(model, inner_of(model))
    with pytest.raises(gc.StateError, match="no further parameters"):
        opt.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})
    with pytest.raises(gc.StateError, match="not a state of LocalSteps"):
        opt.load_state_dict(opt.inner.state_dict())
    other = torch.nn.Linear(3, 3)
    with pytest.raises(gc.StateError, match="other parameters"):
        gc.LocalSteps(other, torch.optim.SGD(other.parameters(), lr=1.0)).load_state_dict(opt.state_dict())
    model.frozen.requires_grad_(True)
    with pytest.raises(gc.StateError, match="unfreezing"):
        opt.step()
