"""compress_fsdp with learned levels: what is learned, equal ranks, resumed runs, and what is left alone."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from batch import on_ranks
from sharded_models import CASES, Case, Trained, decoded, go_on, loss_of, same_everywhere, shards, train
from torch.distributed.fsdp import fully_shard

import gradcomp.torch as gc
from gradcomp.compress.quantise.learned import even, learned, normalised
from gradcomp.exchange.request_group import RequestOrder
from gradcomp.torch.sharded import levels as module

WEIGHTS, GRADIENTS = "all_gather", "reduce_scatter"
FEW = (gc.Quantize(3, bucket_size=64, rounding="shift"), gc.Quantize(4, bucket_size=64))
BLOCKS = CASES["by blocks"]
#: Those of the models in sharded_models: 41 x 37 and 37 x 37 elements are small, 70 x 37 are not.
LARGE = sorted(f"blocks.{i}.{name}.weight" for i in range(2) for name in ("expand", "contract"))


def learning(case: Case, steps: int, points: tuple[int, ...] = (1, 3), **options: Any) -> Trained:
    module.SMALL = 2000  # users' layers have to have more than 100,000 elements
    return train(case, steps, FEW, learn_levels=points, **options)


def levels_of(trained: Trained) -> dict[tuple[str, str], tuple[float, ...]]:
    """Kind and layer -> levels."""
    return {key: found[1] for each in trained.state._units for key, found in each.levels.found.items()}


def same_bits(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def check_levels(trained: Trained) -> None:
    found = levels_of(trained)
    assert sorted(found) == [(kind, name) for kind in (WEIGHTS, GRADIENTS) for name in LARGE]
    assert same_everywhere(repr(sorted(found.items())))
    for (kind, _), levels in found.items():
        assert list(levels) == sorted(levels)
        assert len(levels) == (8 if kind == WEIGHTS else 16)
        assert np.float32(levels).tolist() == list(levels) != list(even(3 if kind == WEIGHTS else 4))
        pinned = levels[0] == 0 and levels[-1] == 1
        assert pinned == (kind == GRADIENTS)


def train_on(world: int) -> None:
    case = CASES["micro-batches"] if world == 2 else BLOCKS
    plain, ours = train(case, 6), learning(case, 1)
    assert levels_of(ours) == {}
    for step in range(1, 6):
        go_on(ours, case, range(step, step + 1))
        assert same_everywhere(decoded(ours.model))
        check_levels(ours)
    first = levels_of(learning(case, 3))
    assert {key for key, levels in levels_of(ours).items() if levels != first[key]} == set(first)
    torch.testing.assert_close(torch.tensor(ours.losses), torch.tensor(plain.losses), rtol=0.1, atol=0.1)


@on_ranks(2)
def test_two_ranks_learn_the_same_levels_for_large_layers():
    train_on(2)


@on_ranks(3)
def test_three_ranks_learn_the_same_levels_for_large_layers():
    train_on(3)


@on_ranks(3)
def test_levels_are_the_mean_of_what_ranks_learn_from_their_shards():
    """At step 0 the weights are known before: 70 and 37 rows on three ranks, the last of which has fewer."""
    ours = learning(BLOCKS, 0, points=(0,))
    expected = {}
    for name, parameter in ours.model.named_parameters():
        if name in LARGE:
            values = normalised(parameter.to_local().detach().numpy().reshape(-1), 64)
            counts: list[Any] = [None] * gc.size()
            dist.all_gather_object(counts, (len(values), learned(values, even(3), pinned=False)))
            expected[name] = sum(n * q for n, q in counts) / sum(n for n, _ in counts)
    go_on(ours, BLOCKS, range(1))
    for name, levels in expected.items():
        np.testing.assert_allclose(levels_of(ours)[WEIGHTS, name], levels, rtol=0, atol=1e-7)


def _with_one_row(model: Any, mesh: Any) -> None:
    model.spare = OneRow()
    fully_shard(model, mesh=mesh)


class OneRow(torch.nn.Module):
    """A layer whose only row is on rank 0."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(1, 37 * 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x[..., None] * self.weight.reshape(37, 64).cos()).mean(-1)


@on_ranks(2)
def test_a_shard_without_elements_teaches_nothing():
    ours = learning(Case(shard=_with_one_row), 3)
    assert ours.model.spare.weight.to_local().numel() == (0 if gc.rank() else 37 * 64)
    found = levels_of(ours)
    assert {kind for kind, name in found if name == "spare.weight"} == {WEIGHTS, GRADIENTS}
    assert list(found[WEIGHTS, "spare.weight"]) != list(even(3))
    assert same_everywhere(repr(sorted(found.items())))


@pytest.mark.parametrize("reuse", [None, "codes"])
@on_ranks(2)
def test_predicted_collectives_and_kept_codes_give_the_same_levels_and_bits(reuse: str | None):
    case = CASES["micro-batches"]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(RequestOrder, "predicted", None)
        compared = learning(case, 9, points=(2, 6))
    ours = learning(case, 9, points=(2, 6), reuse=reuse)
    assert levels_of(ours) == levels_of(compared)
    assert ours.losses == compared.losses
    assert same_bits(shards(ours.model), shards(compared.model))


@pytest.mark.parametrize("saved_at", [2, 3])
@on_ranks(2)
def test_a_resumed_run_goes_on_bit_for_bit_with_its_levels(saved_at: int):
    """Also with levels that were learned in the last step before, and are learned again after."""
    whole, first = learning(BLOCKS, saved_at, (1, 4)), learning(BLOCKS, saved_at, (1, 4))
    go_on(whole, BLOCKS, range(saved_at, 7))
    state = json.loads(json.dumps(first.state.state_dict()))
    second = learning(BLOCKS, 0, (1, 4))
    second.model.load_state_dict(first.model.state_dict())
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    second.state.load_state_dict(state)
    assert levels_of(second) == levels_of(first) != {}
    go_on(second, BLOCKS, range(saved_at, 7))
    assert second.losses == whole.losses[saved_at:]
    assert levels_of(second) == levels_of(whole) != levels_of(first)
    assert same_bits(shards(second.model), shards(whole.model))


@on_ranks(2)
def test_levels_that_do_not_fit_are_refused():
    state = learning(BLOCKS, 3).state.state_dict()
    other = train(BLOCKS, 0, (gc.Quantize(2, bucket_size=64), FEW[1]))
    with pytest.raises(gc.StateError, match="levels that do not fit"):
        other.state.load_state_dict(state)
    unit = next(iter(state["levels"]))
    name = next(iter(state["levels"][unit][WEIGHTS]))
    for wrong in ([1, [0.5] * 7], [1, [2.0] * 8], ["1", [0.5] * 8], [1], 5):
        bad = json.loads(json.dumps(state))
        bad["levels"][unit][WEIGHTS][name] = wrong
        with pytest.raises(gc.StateError, match="levels that do not fit"):
            learning(BLOCKS, 0).state.load_state_dict(bad)
    with pytest.raises(gc.StateError, match="no state of"):
        learning(BLOCKS, 0).state.load_state_dict(state | {"levels": []})


@on_ranks(2)
def test_ranks_with_other_levels_are_told():
    ours = learning(BLOCKS, 3)
    state = ours.state.state_dict()
    if gc.rank() == 1:
        for unit in state["levels"].values():
            for levels in unit[WEIGHTS].values():
                levels[1][3] = levels[1][2]
    ours.state.load_state_dict(state)
    with pytest.raises(gc.PlanMismatchError, match="codebook"):
        loss_of(ours.model, 9)


@on_ranks(2)
def test_ranks_that_learn_at_other_steps_are_told():
    with pytest.raises(gc.PlanMismatchError, match="learn_levels"):
        learning(BLOCKS, 0, (1 + gc.rank(),))


@on_ranks(2)
def test_gradients_that_are_not_finite_teach_later():
    ours = learning(BLOCKS, 1, points=(1,))
    loss = loss_of(ours.model, 1)
    (loss * float("inf") if gc.rank() == 1 else loss).backward()
    ours.optimizer.zero_grad()
    go_on(ours, BLOCKS, range(2, 4))
    check_levels(ours)


@on_ranks(2)
def test_small_layers_stay_uniform():
    """100,000 elements are small, as in the paper."""
    module.SMALL = 100_000
    with pytest.raises(gc.ConfigError, match="no layer of more than 100,000 elements"):
        train(BLOCKS, 0, FEW, learn_levels=(1,))
