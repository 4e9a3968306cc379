"""ZeroOptimizer: replicas are equal, masters are those of a plain optimizer, and what a step loses is sent later."""

from __future__ import annotations

import copy
import hashlib
import io
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from batch import on_ranks
from small_torch import bits_of
from torch import nn

import gradcomp.torch as gc
from gradcomp.reduce.header import ByteHeader, padded

EXACT = {"gradients": "none", "weights": "none"}
#: With small buckets, so that a part has several.
COARSE = {
    "gradients": gc.Quantize(bits=8, bucket_size=64),
    "weights": gc.Quantize(bits=4, bucket_size=64, rounding="nearest", feedback=False),
}


class Net(nn.Module):
    """Sizes that no world divides; parameters that are tied, frozen, scalar, empty, transposed or not always used."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(41, 37)
        self.inner = nn.Linear(37, 37)
        self.spare = nn.Linear(37, 37)
        self.turned = nn.Parameter(torch.randn(37, 31).t())
        self.back = nn.Linear(31, 37)
        self.frozen = nn.Linear(37, 37).requires_grad_(False)
        self.scale, self.empty = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.zeros(0, 3))
        self.to(dtype)

    def forward(self, tokens: torch.Tensor, spare: bool) -> torch.Tensor:
        x = self.embedding(tokens)
        x = x + torch.tanh(self.frozen(self.inner(x))) * self.scale + self.empty.sum()
        x = x + self.back(torch.tanh(x @ self.turned.t()))
        return nn.functional.linear(self.spare(x) if spare else x, self.embedding.weight).float()


def loss_of(model: Net, step: int, rank: int, spare: bool = True) -> torch.Tensor:
    tokens = torch.randint(41, (5, 7), generator=torch.Generator().manual_seed(100 * step + rank))
    return nn.functional.cross_entropy(model(tokens, spare).flatten(0, 1), tokens.roll(1).flatten())


@dataclass
class Case:
    """How a model is trained. ``spare`` tells for a step and a rank whether a layer is used."""

    kind: Any = torch.optim.AdamW
    options: Callable[[], dict[str, Any]] = lambda: {"lr": 1e-2}
    dtype: torch.dtype = torch.float32
    passes: int = 1
    max_norm: tuple[float, float] | None = None
    scaled: bool = False
    grouped: bool = False
    scheduled: bool = False
    closure: bool = False
    spare: Callable[[int, int], bool] = lambda step, rank: True
    set_to_none: bool = True


CASES = {
    "AdamW": Case(),
    "SGD": Case(torch.optim.SGD, lambda: {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "scalars in state": Case(torch.optim.NAdam),
    "groups and a schedule": Case(grouped=True, scheduled=True),
    "accumulated": Case(passes=3, set_to_none=False),
    "clipped": Case(torch.optim.SGD, lambda: {"lr": 0.5}, max_norm=(0.5, 2.0)),
    "clipped by the largest": Case(torch.optim.SGD, lambda: {"lr": 0.5}, max_norm=(0.01, float("inf"))),
    "scaled and clipped": Case(torch.optim.SGD, lambda: {"lr": 0.5}, scaled=True, max_norm=(0.5, 2.0)),
    "scaled": Case(scaled=True),
    "closure": Case(closure=True),
    "used on one rank": Case(spare=lambda step, rank: rank == step % 2),
    "not used": Case(
        torch.optim.AdamW, lambda: {"lr": 1e-2, "weight_decay": 0.5}, spare=lambda step, rank: step == 1
    ),
}


class Trained:
    """A model and the optimizer that ``make`` returns for its parameters; it sees the data of ``ranks``."""

    def __init__(self, case: Case, make: Callable[..., Any], ranks: list[int]) -> None:
        self.case, self.ranks, self.model = case, ranks, Net(case.dtype)
        named = list(self.model.named_parameters())
        if case.grouped:
            decayed = [pair for pair in named if pair[1].ndim > 1]
            named = [
                {"params": decayed, "weight_decay": 0.3},
                {"params": [pair for pair in named if pair[1].ndim <= 1], "lr": 3e-3, "weight_decay": 0.0},
            ]
        self.optimizer = make(named, case.kind, **case.options())
        self.scheduler = (
            torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5) if case.scheduled else None
        )
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=case.scaled)

    def backward(self, step: int) -> None:
        for micro in range(self.case.passes):
            for rank in self.ranks:
                loss = loss_of(self.model, 10 * step + micro, rank, self.case.spare(step, rank))
                self.scaler.scale(loss / len(self.ranks)).backward()

    def go_on(self, steps: range) -> Trained:
        for step in steps:
            self.optimizer.zero_grad(self.case.set_to_none)
            if self.case.closure:
                self.optimizer.step(lambda step=step: self.backward(step))
                continue
            self.backward(step)
            if self.case.max_norm is not None:
                if self.case.scaled:
                    self.scaler.unscale_(self.optimizer)
                self.norm = self.clip(*self.case.max_norm)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            if self.scheduler is not None:
                self.scheduler.step()
        return self

    def clip(self, most: float, norm_type: float) -> torch.Tensor:
        if isinstance(self.optimizer, gc.ZeroOptimizer):
            return self.optimizer.clip_grad_norm_(most, norm_type)
        held = [p for p in self.model.parameters() if p.numel()]  # torch has no largest of an empty one
        return nn.utils.clip_grad_norm_(held, most, norm_type)

    @property
    def parameters(self) -> list[torch.Tensor]:
        return [p.detach() for p in self.model.parameters()]


def zero(case: Case = CASES["AdamW"], steps: int = 0, **arguments: Any) -> Trained:
    """Train on this rank's data; ``arguments`` by default those without compression."""
    given = arguments or EXACT
    made = Trained(
        case, lambda named, kind, **options: gc.ZeroOptimizer(named, kind, **given, **options), [gc.rank()]
    )
    return made.go_on(range(steps))


def plain(case: Case, steps: int) -> Trained:
    """Train by the optimizer itself on the data of all ranks."""
    made = Trained(case, lambda named, kind, **options: kind(named, **options), list(range(gc.size())))
    return made.go_on(range(steps))


def assert_same_on_all_ranks(tensors: list[torch.Tensor]) -> None:
    mine = hashlib.sha256(b"".join(bits_of(tensors))).hexdigest()
    assert all(theirs == mine for theirs in gc.allgather_object(mine))


def pending(trained: Trained) -> torch.Tensor:
    """What this rank's replicas lack of its masters, where it is compressed."""
    parts = trained.optimizer._parts
    return torch.cat(
        [p.master.detach() - p.replica for p in parts if p.layer.size >= 1024 and len(p.layer.shape) > 1]
    )


# --- what every way to train must give -------------------------------------------------------------------------


def check_exact(case: Case) -> None:
    """Without compression a run is that of the optimizer itself on the data of all ranks."""
    ours, theirs = zero(case, 4), plain(case, 4)
    torch.testing.assert_close(ours.parameters, theirs.parameters, rtol=2e-5, atol=2e-6)
    assert_same_on_all_ranks(ours.parameters)
    if case.max_norm is not None:
        torch.testing.assert_close(ours.norm, theirs.norm)
    if case.scheduled:
        assert [g["lr"] for g in ours.optimizer.param_groups] == [
            g["lr"] for g in theirs.optimizer.param_groups
        ]
    changed = zip(ours.model.named_parameters(), Net().parameters(), strict=True)
    assert {name for (name, p), q in changed if torch.equal(p, q)} == {
        "empty",
        "frozen.weight",
        "frozen.bias",
    }


def check_quantised(case: Case) -> None:
    """Replicas are equal after every step, and close to the masters; training goes on as without compression."""
    ours, theirs = zero(case, 0, **COARSE), plain(case, 4)
    for step in range(4):
        ours.go_on(range(step, step + 1))
        assert_same_on_all_ranks(ours.parameters)
    assert gc.size() == 1 or pending(ours).abs().max() > 0
    mine, wanted, start = (
        torch.cat([p.flatten() for p in each])
        for each in (ours.parameters, theirs.parameters, Net().parameters())
    )
    assert (mine - wanted).norm() < 0.3 * (wanted - start).norm(), (mine - wanted).norm() / (
        wanted - start
    ).norm()


def check_resumed(case: Case) -> None:
    """A run that was saved and resumed in new objects has the bits of one that was not."""
    ours = zero(case, 5, **COARSE)
    first, file = zero(case, 2, **COARSE), io.BytesIO()
    torch.save([first.model.state_dict(), first.optimizer.state_dict()], file)
    file.seek(0)
    states = torch.load(file, weights_only=True)
    second = zero(case, 0, **COARSE)
    second.model.load_state_dict(states[0])
    second.optimizer.load_state_dict(states[1])
    if second.scheduler is not None:
        second.scheduler.load_state_dict(first.scheduler.state_dict())
    second.go_on(range(2, 5))
    assert bits_of(second.parameters) == bits_of(ours.parameters)
    assert bits_of([pending(second)]) == bits_of([pending(ours)])


def check_full(case: Case) -> None:
    """The full state loads into the optimizer itself and into another ZeroOptimizer, which go on alike."""
    ours = zero(case, 3)
    full = ours.optimizer.full_state_dict()
    assert (ours.optimizer.full_state_dict(root_rank=0) == {}) == (gc.rank() != 0)
    parameters = [p for group in ours.optimizer.param_groups for p in group["params"]]
    for master, parameter in zip(full["masters"], parameters, strict=True):
        assert master is None if not parameter.requires_grad else torch.equal(master, parameter)
    theirs, again = plain(case, 0), zero(case, 0)
    for one in (theirs, again):
        one.model.load_state_dict(ours.model.state_dict())
        one.optimizer.load_state_dict(copy.deepcopy(full))  # torch steps on the tensors that it loads
        if one.scheduler is not None:
            one.scheduler.load_state_dict(ours.scheduler.state_dict())
        one.go_on(range(3, 5))
    ours.go_on(range(3, 5))
    assert bits_of(again.parameters) == bits_of(ours.parameters)
    torch.testing.assert_close(theirs.parameters, ours.parameters, rtol=2e-5, atol=2e-6)


CHECKS = {"exact": check_exact, "quantised": check_quantised, "resumed": check_resumed, "full": check_full}


def cases(**named: str) -> list[tuple[str, str]]:
    return [(check, name) for check, names in named.items() for name in names.split("; ")]


TWO_RANKS = cases(
    exact="; ".join(CASES),
    quantised="AdamW; SGD; used on one rank",
    resumed="AdamW; groups and a schedule",
    full="scalars in state; groups and a schedule; not used",
)
#: Of worlds that no part divides evenly.
MORE_RANKS = cases(
    exact="AdamW; groups and a schedule; scaled and clipped; used on one rank",
    quantised="AdamW",
    resumed="groups and a schedule",
    full="AdamW",
)


@pytest.mark.parametrize(("check", "name"), TWO_RANKS)
@on_ranks(2)
def test_two_ranks_train_as_they_should(check: str, name: str):
    CHECKS[check](CASES[name])


@pytest.mark.parametrize(("check", "name"), MORE_RANKS)
@on_ranks(1)
def test_one_rank_trains_as_it_should(check: str, name: str):
    CHECKS[check](CASES[name])


@pytest.mark.parametrize(("check", "name"), MORE_RANKS)
@on_ranks(3)
def test_three_ranks_train_as_they_should(check: str, name: str):
    CHECKS[check](CASES[name])


@pytest.mark.full
@pytest.mark.parametrize(("check", "name"), MORE_RANKS)
@on_ranks(4)
def test_four_ranks_train_as_they_should(check: str, name: str):
    CHECKS[check](CASES[name])


# --- what differences are for ----------------------------------------------------------------------------------


@on_ranks(2)
def test_what_a_step_loses_is_sent_later():
    """Without new gradients, every step brings the replicas closer to the masters, until they are nearly equal."""
    ours = zero(Case(torch.optim.SGD), 3, **COARSE)
    lacks = [pending(ours).abs().max()]
    masters = bits_of(part.master for part in ours.optimizer._parts)
    for _ in range(10):
        ours.optimizer.zero_grad(set_to_none=False)
        ours.optimizer.step()
        lacks.append(pending(ours).abs().max())
        assert_same_on_all_ranks(ours.parameters)
    assert bits_of(part.master for part in ours.optimizer._parts) == masters
    assert all(after <= 0.1 * before + 2e-7 for before, after in pairwise(lacks))
    assert lacks[-1] <= 2e-7 < 1e-4 < lacks[0]


@on_ranks(2)
def test_replicas_follow_masters_more_closely_than_without_differences():
    with_differences, without = (zero(steps=8, **COARSE, differences=each) for each in (True, False))
    assert_same_on_all_ranks(without.parameters)
    assert 5 * pending(with_differences).square().mean() < pending(without).square().mean()


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
@on_ranks(2)
def test_masters_of_half_precision_replicas_are_float32(name: str):
    """A step that is far less than a replica's spacing is not lost."""
    dtype = getattr(torch, name)
    for arguments in (EXACT, COARSE):
        ours = zero(Case(torch.optim.SGD, lambda: {"lr": 1e-5}, dtype=dtype), 12, **arguments)
        assert_same_on_all_ranks(ours.parameters)
        start = torch.cat([p.flatten() for p in Net(dtype).parameters() if p.requires_grad]).float()
        assert all(part.master.dtype == torch.float32 for part in ours.optimizer._parts)
        full = ours.optimizer.full_state_dict()["masters"]
        moved = (torch.cat([m.flatten() for m in full if m is not None]) - start).abs()
        assert 0 < moved.max() < 1e-3
        assert ((moved > 0) & (moved < 2e-5)).any()


@on_ranks(3)
def test_a_state_goes_to_another_number_of_ranks():
    few, ours, found = gc.ProcessSet([0, 1]), None, {}
    if gc.rank() < 2:
        ours = zero(CASES["scalars in state"], 3, **EXACT, process_set=few)
        found = ours.optimizer.full_state_dict()
    full = gc.broadcast_object([found, ours and ours.model.state_dict()])
    more = zero(CASES["scalars in state"])
    more.model.load_state_dict(full[1])
    more.optimizer.load_state_dict(full[0])
    again = more.optimizer.full_state_dict()
    assert again["state"].keys() == full[0]["state"].keys()
    for place, state in again["state"].items():
        assert bits_of(state.values()) == bits_of(full[0]["state"][place].values())
    more.go_on(range(3, 5))
    assert_same_on_all_ranks(more.parameters)


# --- bytes and memory ------------------------------------------------------------------------------------------


@on_ranks(2)
def test_bytes_are_those_of_codes_and_headers():
    case = Case()
    ours = zero(case, 6, gradients=gc.Quantize(bits=3, bucket_size=64), weights=COARSE["weights"])
    before = ours.optimizer.statistics()
    ours.go_on(range(6, 7))
    after = ours.optimizer.statistics()
    sent = {
        True: 0,
        False: 0,
    }  # by whether they are this rank's parts: weights, at 4 bits, or gradients, at 3
    parts = ours.optimizer._parts
    for part in parts:
        for own, size, bits in ((True, part.size, 4), (False, part.layer.size - part.size, 3)):
            coded = len(part.layer.shape) > 1 and part.layer.size >= 1024
            sent[own] += -(-size * bits // 8) + 8 * -(-size // 64) if coded else 4 * size
    weights, gradients = (padded(sent[own]) + ByteHeader.size(len(parts)) for own in (True, False))
    assert after.weight_bytes - before.weight_bytes == weights
    assert after.gradient_bytes - before.gradient_bytes == gradients
    assert after.dense_bytes - before.dense_bytes == 4 * sum(part.layer.size for part in parts)


@on_ranks(3)
def test_a_rank_holds_a_third_of_masters_and_state():
    ours = zero(steps=1, **COARSE)
    trained = sum(p.numel() for p in ours.model.parameters() if p.requires_grad)
    parts = ours.optimizer._parts
    assert abs(sum(part.size for part in parts) - trained / 3) < len(parts)
    for part in parts:
        held = [v for v in ours.optimizer._inner.state[part.master].values() if v.dim()]
        assert [v.numel() for v in (part.master, *held)] == [part.size] * 3
        assert (part.mean, part.master.grad, part.parameter.grad) == (None, None, None)
    ours.optimizer.zero_grad()
    ours.backward(1)
    ours.optimizer.clip_grad_norm_(1.0)
    for part in parts:  # means take no memory of their own
        inside = part.mean.data_ptr() - part.parameter.grad.data_ptr()
        assert inside == 4 * part.begin or not part.size


# --- what is refused -------------------------------------------------------------------------------------------


class LayerNorms(torch.optim.SGD):
    """SGD whose steps have the norm of the layer, as LARS."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad = p.grad * (p.detach().norm() / p.grad.norm())
        super().step()


def with_gaps() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(40, 80)[:, ::2])]


REFUSED = {
    "norms of layers": ({"optimizer_class": LayerNorms}, "LayerNorms steps otherwise on parts"),
    "factors": ({"optimizer_class": torch.optim.Adafactor}, "Adafactor steps otherwise on parts"),
    "matrices": ({"optimizer_class": torch.optim.Muon}, "Muon cannot step on parts"),
    "closures": ({"optimizer_class": torch.optim.LBFGS}, "LBFGS cannot step on parts"),
    "sparse": ({"optimizer_class": torch.optim.SparseAdam}, "SparseAdam cannot step on parts"),
    "an optimizer": ({"optimizer_class": torch.optim.SGD(with_gaps())}, "must be a class"),
    "auto": ({"weights": "auto"}, "name a compressor"),
    "residuals of weights": ({"weights": gc.Quantize(bits=4, rounding="nearest")}, "feedback=False"),
    "residuals of gradients": ({"gradients": gc.Quantize(bits=4, feedback=True)}, "feedback=False"),
    "no codes": ({"gradients": gc.TopK(density=0.1)}, "no codes"),
    "gaps": ({"params": with_gaps()}, "'group0.param0' has gaps"),
    "float64": ({"params": [nn.Parameter(torch.zeros(3, dtype=torch.float64))]}, "float64"),
    "complex": ({"params": [nn.Parameter(torch.zeros(3, dtype=torch.complex64))]}, "complex"),
    "meta": ({"params": [nn.Parameter(torch.zeros(3, device="meta"))]}, "meta"),
    "frozen": ({"params": [nn.Parameter(torch.zeros(3), requires_grad=False)]}, "no trainable parameter"),
}


@pytest.mark.parametrize("what", REFUSED)
@on_ranks(2)
def test_what_cannot_work_is_refused_on_every_rank(what: str):
    arguments, says = REFUSED[what]
    given = {"params": Net().parameters(), "optimizer_class": torch.optim.Adam, **arguments}
    with pytest.raises(gc.ConfigError, match=says):
        gc.ZeroOptimizer(**given)


DIFFERENT = {
    "weights": {"weights": ["quantize:bits=4,feedback=false", "none"]},
    "gradients": {"gradients": ["none", "quantize:bits=8"]},
    "differences": {"differences": [True, False]},
    "settings": {"lr": [0.1, 0.2]},
    "optimizer": {"optimizer_class": [torch.optim.Adam, torch.optim.AdamW]},
    "parameters": {"params": [[nn.Parameter(torch.zeros(3))], [nn.Parameter(torch.zeros(4))]]},
    "rank 1 failed": {"weights": ["none", "quantize:bits=9"]},
}


@pytest.mark.parametrize("what", DIFFERENT)
@on_ranks(2)
def test_ranks_that_differ_are_an_error_on_every_rank(what: str):
    own = {name: values[gc.rank()] for name, values in DIFFERENT[what].items()}
    given = {"params": Net().parameters(), "optimizer_class": torch.optim.Adam, **own}
    error, says = gc.PlanMismatchError, what
    if what == "rank 1 failed" and gc.rank() == 1:
        error, says = gc.ConfigError, "bits"
    with pytest.raises(error, match=says):
        gc.ZeroOptimizer(**given)


@on_ranks(2)
def test_all_ranks_start_from_the_first_ones_parameters():
    model = Net()
    if gc.rank() == 1:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
    gc.ZeroOptimizer(model.parameters(), torch.optim.SGD)
    assert bits_of(model.parameters()) == bits_of(Net().parameters())


@on_ranks(2)
def test_parameters_that_are_added_thawed_or_of_another_rank_are_refused():
    ours = zero(steps=1)
    with pytest.raises(gc.StateError, match="no further parameters"):
        ours.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    state = ours.optimizer.state_dict()
    state["zero"]["part"][0] = 1 - gc.rank()
    with pytest.raises(
        gc.StateError, match=f"of rank {1 - gc.rank()} of 2, and this is rank {gc.rank()} of 2"
    ):
        ours.optimizer.load_state_dict(state)
    other = gc.ZeroOptimizer([nn.Parameter(torch.zeros(5))], torch.optim.AdamW)
    for full in (other.full_state_dict(), other.state_dict()):
        with pytest.raises(gc.StateError, match=r"of other parameters|groups of"):
            ours.optimizer.load_state_dict(full)


# --- what ranks do between steps -------------------------------------------------------------------------------


@on_ranks(2)
def test_an_overflow_on_one_rank_skips_the_step_on_all():
    ours = zero(CASES["scaled"], 2, **COARSE)
    before, scale = bits_of(ours.parameters), ours.scaler.get_scale()
    ours.optimizer.zero_grad()
    ours.backward(2)
    if gc.rank() == 1:
        ours.model.scale.grad.fill_(torch.inf)  # of one element, which rank 0 owns
    ours.scaler.step(ours.optimizer)
    ours.scaler.update()
    assert bits_of(ours.parameters) == before
    assert ours.scaler.get_scale() == scale / 2
    ours.go_on(range(3, 5))
    assert bits_of(ours.parameters) != before
    assert_same_on_all_ranks(ours.parameters)


@on_ranks(2)
def test_parameters_that_the_script_changes_become_the_masters():
    ours = zero(steps=2, **COARSE)
    state = {name: value * 0.5 for name, value in ours.model.state_dict().items()}
    ours.model.load_state_dict(state)
    ours.optimizer.param_groups[0]["lr"] = 0.0
    ours.optimizer.zero_grad()
    ours.optimizer.step()
    assert bits_of(ours.parameters) == bits_of(state[name] for name, _ in ours.model.named_parameters())


#: What rank 1 does where rank 0 steps once and clears its gradients, and how it is named then.
OTHERWISE = {
    "skips": (lambda ours: ours.optimizer.zero_grad(), "rank 0 applied .*; rank 1 threw the means away"),
    "steps twice": (
        lambda ours: (ours.optimizer.step(), ours.optimizer.step()),
        "rank 0 applied .*; rank 1 stepped more than once",
    ),
}


@pytest.mark.parametrize("steps", [1, pytest.param(5, id="predicted")])
@pytest.mark.parametrize("what", OTHERWISE)
@on_ranks(2, "steps")
def test_a_rank_that_steps_otherwise_is_an_error_on_every_rank(what: str, steps: int):
    does, told = OTHERWISE[what]
    ours = zero(steps=steps)
    ours.optimizer.zero_grad()
    ours.backward(steps)

    def goes_on() -> None:
        does(ours) if gc.rank() == 1 else ours.optimizer.step()
        ours.go_on(range(steps, steps + 3))

    with pytest.raises(gc.StateError, match=told):
        goes_on()


@on_ranks(2, "steps")
def test_a_learning_rate_of_ones_own_is_named_in_the_next_step():
    ours = zero(steps=4)
    if gc.rank() == 1:
        ours.optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(gc.StateError, match=r"learning rate 0\.5 on rank 1, 0\.01 on rank 0"):
        ours.go_on(range(4, 6))


def clipped_by_torch(ours: Trained) -> None:
    ours.optimizer.clip_grad_norm_(1.0)
    nn.utils.clip_grad_norm_(ours.model.parameters(), 1e-3)


def sparse(ours: Trained) -> None:
    weight = ours.model.embedding.weight
    weight.grad = weight.grad.to_sparse(1)


def thawed(ours: Trained) -> None:
    ours.model.frozen.requires_grad_(True)


WRONG = {
    "clipped by torch": (clipped_by_torch, gc.StateError, "changed after they had been reduced"),
    "sparse": (sparse, gc.ConfigError, "'embedding.weight' has a sparse gradient"),
    "thawed": (thawed, gc.StateError, "frozen.weight"),
}


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("what", WRONG)
@on_ranks(2, "wrong")
def test_gradients_that_cannot_be_stepped_on_are_an_error_on_every_rank(what: str, alone: bool):
    does, error, says = WRONG[what]
    ours = zero(steps=1)
    ours.backward(1)
    if alone and gc.rank() == 0:
        error = gc.TransportError
        if what == "clipped by torch":
            ours.optimizer.clip_grad_norm_(1.0)
    else:
        does(ours)
    with pytest.raises(error, match=says):
        ours.optimizer.step()
