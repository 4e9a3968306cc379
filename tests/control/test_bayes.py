"""Bayes: fewer bytes than the reference within its error, the same for the same seed."""

from __future__ import annotations

import importlib.util
import logging

import numpy as np
import pytest
from control.observed import chosen, seen_by

from gradcomp import ConfigError
from gradcomp.control.bayes import Bayes
from gradcomp.control.levels import total_bytes, total_error

needs_optuna = pytest.mark.skipif(
    importlib.util.find_spec("optuna") is None, reason="needs Optuna: pip install 'gradcomp[bayes]'"
)


def some(rule: Bayes, layers: int = 8, seed: int = 0, **about):
    random = np.random.default_rng(seed)
    sizes = [int(size) for size in np.exp(random.uniform(4, 10, layers))]
    return seen_by(rule, sizes, np.exp(random.uniform(-3, 3, layers)), **about)


@needs_optuna
@pytest.mark.parametrize("layers", [4, 40])
def test_fewer_bytes_within_the_error(layers):
    rule = Bayes(5, trials=100)
    observed = some(rule, layers)
    found, reference = rule.decide(observed).choices, observed.candidates.reference
    assert total_error(observed, found) <= total_error(observed, reference)
    assert total_bytes(observed, found) < 0.99 * total_bytes(observed, reference)


@needs_optuna
def test_the_same_seed_finds_the_same():
    rule = Bayes(5, trials=30, seed=7)
    observed = some(rule)
    assert rule.decide(observed).choices.tolist() == rule.decide(observed).choices.tolist()
    assert (
        rule.decide(observed).choices.tolist()
        != Bayes(5, trials=30, seed=8).decide(observed).choices.tolist()
    )


@needs_optuna
def test_it_is_never_worse_than_the_plan_in_force():
    rule = Bayes(5, trials=1)
    observed = some(rule, current=Bayes(5, trials=100).decide(some(rule)).choices)
    found = rule.decide(observed).choices
    assert (
        total_bytes(observed, found)
        <= total_bytes(observed, observed.current)
        < total_bytes(observed, observed.candidates.reference)
    )


@needs_optuna
def test_nothing_within_the_budget_warns_once(caplog):
    rule = Bayes(5, levels=[2, 4], alpha=0.5, trials=4)
    observed = some(rule)
    decision = rule.decide(observed)
    assert chosen(observed, decision.choices) == [4] * 8
    rule.decide(some(rule, memory=decision.memory))
    assert caplog.text.count("layers use the reference") == 1


@needs_optuna
@pytest.mark.parametrize("levels", [[4], None])
def test_silent_layers_and_layers_without_choice(levels):
    rule = Bayes(5, levels=levels, trials=4)
    observed = seen_by(rule, [64, 640], [0.0, 0.0], current=[0, 0])
    assert rule.decide(observed).choices.tolist() == [0, 0]
    observed = seen_by(rule, [64, 640], [1.0, 0.0], current=[0, 0])
    assert rule.decide(observed).choices[1] == 0


@needs_optuna
def test_errors_of_zero_leave_nothing_to_weigh():
    rule = Bayes(5, levels=[2, 4], trials=8)
    observed = seen_by(rule, [64, 640], [1.0, 1.0], errors=np.zeros((2, 2)))
    assert chosen(observed, rule.decide(observed).choices) == [2, 2]


@needs_optuna
def test_optuna_is_quiet_and_keeps_its_verbosity(capfd):
    import optuna

    optuna.logging.set_verbosity(optuna.logging.INFO)
    rule = Bayes(5, trials=2)
    rule.decide(some(rule))
    assert optuna.logging.get_verbosity() == logging.INFO
    assert "study" not in capfd.readouterr().err


def test_without_optuna_the_error_names_the_extra(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"gradcomp\[bayes\]"):
        Bayes(5)


@pytest.mark.parametrize(
    "bad",
    [
        {"levels": []},
        {"alpha": 0},
        {"trials": 0},
        {"trials": 2.0},
        {"clusters": 0},
        {"seed": -1},
        {"seed": 1 << 32},
        {"seed": None},
    ],
)
def test_bad_input(bad):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        Bayes(5, **bad)
