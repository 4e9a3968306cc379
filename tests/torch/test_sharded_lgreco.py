"""LGreCo over a sharded model: one budget for the errors of weights and of gradients."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
import torch
from batch import on_ranks
from sharded_models import CASES, COARSE, decoded, go_on, same_everywhere, shards, train

import gradcomp.torch as gc
from gradcomp.core.errors import ConfigError, PlanMismatchError, StateError

RULE = gc.LGreCo(every_steps=4, samples=2)


def controlled(name: str = "by blocks", steps: int = 9, rule: gc.LGreCo = RULE, **options):
    return train(CASES[name], steps, COARSE, controller=rule, **options)


def errors_of_chosen(run, tables: list[np.ndarray]) -> tuple[float, float]:
    """The budgeted error of what was chosen from the last table, of weights and of gradients."""
    lgreco = run.state._settings.lgreco
    found = []
    for kind in ("all_gather", "reduce_scatter"):
        rows = [i for i, row in enumerate(lgreco.rows) if row.kind == kind]
        reference = sum(tables[-1][i, lgreco.rows[i].reference] for i in rows)
        own = sum(
            tables[-1][i, lgreco.rows[i].choices.index(lgreco.chosen[kind, lgreco.rows[i].name])]
            for i in rows
        )
        found.append(own / reference)
    return found[0], found[1]


def watched(monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    """Keep the tables that decisions are made of."""
    from gradcomp.torch.sharded.lgreco import ShardedLGreCo

    tables, decide = [], ShardedLGreCo._decide

    def deciding(self):
        tables.append(self.errors.copy())
        return decide(self)

    monkeypatch.setattr(ShardedLGreCo, "_decide", deciding)
    return tables


@pytest.mark.parametrize("name", ["by blocks", "micro-batches", "frozen"])
@on_ranks(2)
def test_ranks_choose_alike_within_the_common_budget_and_send_less(name: str):
    with pytest.MonkeyPatch.context() as patched:
        tables = watched(patched)
        run = controlled(name)
    assert same_everywhere(repr(run.state._settings.lgreco.state()))
    assert same_everywhere(decoded(run.model))
    assert sum(errors_of_chosen(run, tables)) <= 2 * (1 + 1e-3)
    plan = run.state.plan()
    assert plan["weights"].keys() == plan["gradients"].keys() == dict(run.model.named_parameters()).keys()
    assert plan["weights"]["norm.weight"] == "none"
    assert (
        plan["gradients"]["head.weight"]
        == run.state._settings.lgreco.chosen["reduce_scatter", "head.weight"].to_string()
    )
    before = run.state.statistics()
    go_on(run, CASES[name], range(9, 12))  # no sampled step is among them but the last
    fixed = train(CASES[name], 9, COARSE)
    then = fixed.state.statistics()
    go_on(fixed, CASES[name], range(9, 12))
    now, after = run.state.statistics(), fixed.state.statistics()
    own = now.weight_bytes + now.gradient_bytes - before.weight_bytes - before.gradient_bytes
    assert own < after.weight_bytes + after.gradient_bytes - then.weight_bytes - then.gradient_bytes


@on_ranks(3)
def test_the_table_is_the_error_of_all_shards_of_the_weights():
    """Against one compression of each rank's part, done here."""
    with pytest.MonkeyPatch.context() as patched:
        tables = watched(patched)
        rule = gc.LGreCo(every_steps=2, samples=1, levels=[4, 6, 8])
        coarse = (gc.Quantize(bits=6, bucket_size=64, rounding="nearest", feedback=False), COARSE[1])
        run = train(CASES["by blocks"], 2, coarse, controller=rule)
    lgreco = run.state._settings.lgreco
    for index, row in enumerate(lgreco.rows):
        if row.kind != "all_gather":
            continue
        whole = row.parameter.current.full_tensor().detach().reshape(-1).numpy()
        for choice, found in zip(row.choices, tables[0][index], strict=False):
            expected, borders = 0.0, row.parameter.borders(3)
            for begin, end in itertools.pairwise(borders):
                for at in range(begin, end, 64):
                    values = whole[at : min(at + 64, end)].astype(np.float64)
                    low, high = values.min(), values.max()
                    unit = (high - low) / (2**choice.bits - 1) or 1.0
                    expected += float(((values - low - np.rint((values - low) / unit) * unit) ** 2).sum())
            assert found == pytest.approx(expected, rel=1e-3), (row.name, choice)


@on_ranks(2)
def test_a_resumed_run_is_the_uninterrupted_one():
    """Also from the middle of a period, whose sums are in the state."""
    whole = controlled(steps=11)
    for steps in (4, 6):
        first = controlled(steps=steps)
        saved = json.loads(json.dumps(first.state.state_dict()))
        second = controlled(steps=0)
        second.model.load_state_dict(first.model.state_dict())
        second.optimizer.load_state_dict(first.optimizer.state_dict())
        second.state.load_state_dict(saved)
        go_on(second, CASES["by blocks"], range(steps, 11))
        assert all(torch.equal(a, b) for a, b in zip(shards(second.model), shards(whole.model), strict=True))
        assert second.state.state_dict() == whole.state.state_dict()


@on_ranks(2)
def test_codes_that_are_kept_count_once():
    """With reuse weights of a block are sent once a step, and else twice, so that their bits are cheaper."""
    for reuse, times in ((None, 2), ("codes", 1)):
        run = controlled(steps=3, reuse=reuse)
        counted = {(kind, unit): count for kind, unit, count in run.state.state_dict()["lgreco"]["runs"]}
        assert counted["all_gather", "blocks.0"] == 3 * times
        assert counted["all_gather", "the root module"] == 3
        assert counted["reduce_scatter", "blocks.0"] == 3


WRONG = {
    "Bayes": (lambda: gc.Bayes(every_steps=4), "LGreCo as its controller"),
    "time": (lambda: gc.LGreCo(objective="time"), "objective must have the default"),
    "loss": (lambda: gc.LGreCo(metric="loss"), "metric must have"),
    "sparse": (lambda: gc.LGreCo(levels=["topk:density=0.1"]), "no codes that a rank could decode alone"),
    "residual": (lambda: gc.LGreCo(levels=["quantize:bits=4,feedback=true"]), "keeps a residual"),
}


@pytest.mark.parametrize("wrong", WRONG)
@on_ranks(2)
def test_what_cannot_be_controlled_is_refused_on_all_ranks(wrong: str):
    make, words = WRONG[wrong]
    with pytest.raises(ConfigError, match=words):
        train(CASES["by blocks"], 0, COARSE, controller=make())
    with pytest.raises(ConfigError, match="pass optimizer="):
        train(CASES["by blocks"], 0, COARSE, controller=RULE, with_optimizer=False)


@on_ranks(2)
def test_ranks_with_other_controllers_and_states_of_other_runs_are_refused():
    with pytest.raises(PlanMismatchError, match="controller"):
        controlled(steps=0, rule=gc.LGreCo(every_steps=4 + gc.rank()))
    plain, run = train(CASES["by blocks"], 1, COARSE), controlled(steps=1)
    with pytest.raises(StateError, match="both with"):
        run.state.load_state_dict(plain.state.state_dict())
    with pytest.raises(StateError, match="both with"):
        plain.state.load_state_dict(run.state.state_dict())
    saved = run.state.state_dict()
    saved["lgreco"]["levels"][0] = "quantize:bits=13"
    with pytest.raises(StateError, match="not a state of LGreCo"):
        run.state.load_state_dict(saved)
