"""Controllers decide as when ``golden/controllers.json`` was written, and go on from checkpoints of that code."""

from __future__ import annotations

import importlib.util
import json

import pytest
from control.golden_runs import CASES, GOLDEN, Run, fixed_rates, whole, with_control

from gradcomp.compress import at_level
from gradcomp.control import auto

SAVED = json.loads(GOLDEN.read_text(encoding="utf-8"))
HERE = [name for name in CASES if name != "bayes" or importlib.util.find_spec("optuna") is not None]
ONE_OF_EACH_KIND = {"accordion", "lgreco", "schedule", "gravac", "gravac_norm", "auto"}
"""Of the states that controllers keep: of windows, tables, plans by step, a search, and measured links."""
ADDED = {"overhead"}
"""What states have today and had not when the file was written: it gets its default value."""


@pytest.fixture(autouse=True)
def speeds(monkeypatch):
    monkeypatch.setattr(auto, "measure_rates", fixed_rates)


@pytest.mark.parametrize("name", HERE)
def test_plans_are_those_of_before(name):
    assert read(whole(name)[0]) == read(SAVED[name]["plans"])


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ONE_OF_EACH_KIND else pytest.mark.full) for name in HERE]
)
def test_checkpoints_of_before_have_todays_form_and_lead_to_the_plans_of_before(name):
    now = whole(name)[1]
    assert now.keys() == SAVED[name]["checkpoints"].keys()
    for kind, saved in SAVED[name]["checkpoints"].items():
        at, states = now[kind]
        assert at == saved["at"]
        for state, old in zip(states, saved["ranks"], strict=True):
            assert form(json.loads(json.dumps(state.shared.control))) == form(old["shared"])
            assert {k: set(v) for k, v in state.control.items()} == {k: set(v) for k, v in old["own"].items()}
        again = Run(name)
        again.resume(with_control(states, saved["ranks"]))
        assert getattr(again.runs[0], "phase", None) is None or again.runs[0].phase.name == kind
        assert read(again.plans(at)) == read(saved["plans"]), kind


def read(plans):
    """Compressors for their strings, which name fields that they did not have before."""
    return {step: [at_level(family, level) for family, level in plan] for step, plan in plans.items()}


def form(value):
    """Keys but those that were added, lengths and types; of a float or an int what it is, and no more."""
    if isinstance(value, dict):
        return {key: form(one) for key, one in value.items() if key not in ADDED}
    if isinstance(value, list):
        return [form(one) for one in value]
    return type(value).__name__
