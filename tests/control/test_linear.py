"""Linear: the smaller the norm for the size, the more compression, in equal distances."""

from __future__ import annotations

import numpy as np
import pytest
from control.observed import chosen, seen_by

from gradcomp import ConfigError, PowerSGD
from gradcomp.control.grouped import Linear
from gradcomp.control.levels import total_error


def test_levels_follow_the_order_of_norm_by_size():
    rule = Linear(5, levels=[2, 3, 4, 5, 6], alpha=None)
    observed = seen_by(rule, [64, 640, 64, 6400, 64], [3.0, 1.0, 2.0, 1.0, 9.0])
    assert chosen(observed, rule.decide(observed).choices) == [5, 3, 4, 2, 6]


def test_levels_are_interpolated():
    rule = Linear(5, levels=[2, 4, 8], alpha=None)
    observed = seen_by(rule, [64] * 7, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0])
    assert chosen(observed, rule.decide(observed).choices) == [2, 2, 4, 4, 4, 8, 8]


def test_more_levels_than_layers_are_skipped():
    rule = Linear(5, levels=list(range(1, 9)), alpha=None)
    observed = seen_by(rule, [64] * 3, [1.0, 2.0, 3.0])
    found = chosen(observed, rule.decide(observed).choices)
    assert found[0] == 1
    assert found[2] == 8
    assert found[1] in (4, 5)


def test_equal_layers_keep_their_order():
    rule = Linear(5, levels=[2, 4, 8], alpha=None)
    observed = seen_by(rule, [64] * 3, [1.0] * 3)
    assert chosen(observed, rule.decide(observed).choices) == [2, 4, 8]


def test_one_layer_takes_the_reference():
    rule = Linear(5, levels=[2, 4, 8], alpha=None)
    observed = seen_by(rule, [64], [1.0], current=[0])
    assert chosen(observed, rule.decide(observed).choices) == [4]


def test_one_level_leaves_nothing_to_choose():
    rule = Linear(5, levels=[4])
    observed = seen_by(rule, [64] * 3, [1.0, 2.0, 3.0])
    assert chosen(observed, rule.decide(observed).choices) == [4, 4, 4]


def test_silent_layers_do_not_count():
    rule = Linear(5, levels=[2, 4, 8], alpha=None)
    observed = seen_by(rule, [64] * 4, [0.0, 1.0, 2.0, 3.0], current=[2, 0, 0, 0])
    assert chosen(observed, rule.decide(observed).choices) == [8, 2, 4, 8]


def test_extreme_norms_keep_their_order():
    rule = Linear(5, levels=[2, 4, 8], alpha=None)
    observed = seen_by(rule, [64] * 3, [1e300, 1e-300, 1.0])
    assert chosen(observed, rule.decide(observed).choices) == [8, 2, 4]


def test_errors_are_measured_only_for_a_budget():
    assert Linear(5).alpha == 1.0
    assert Linear(5).needs_errors
    assert not Linear(5, alpha=None).needs_errors


def test_a_budget_is_kept():
    rule = Linear(5, levels=[2, 4, 8])
    observed = seen_by(rule, [64] * 6, np.linspace(1.0, 1.5, 6))
    without = Linear(5, levels=[2, 4, 8], alpha=None).decide(observed)
    budget = total_error(observed, observed.candidates.reference)
    assert total_error(observed, without.choices) > budget
    assert total_error(observed, rule.decide(observed).choices) <= budget


@pytest.mark.parametrize("alpha", [0.6, 1.0, 1.7, 100.0])
def test_layers_with_fewer_choices_take_part(alpha):
    # A matrix of 8 by 8 is sent as it is at rank 4 already: one choice.
    rule = Linear(5, levels=[2, 4, 8, 16], alpha=alpha)
    observed = seen_by(rule, [64, 640, 6400, 64], [1.0, 2.0, 3.0, 0.1], own=PowerSGD(4))
    assert [len(choices) for choices in observed.candidates.choices] == [2, 3, 3, 2]
    decision = rule.decide(observed)
    assert not decision.memory[0]
    assert total_error(observed, decision.choices) <= alpha * total_error(
        observed, observed.candidates.reference
    )


def test_nothing_within_the_budget_is_warned_about(caplog):
    rule = Linear(5, levels=[2, 4], alpha=0.5)
    observed = seen_by(rule, [64] * 2, [1.0, 2.0])
    decision = rule.decide(observed)
    assert chosen(observed, decision.choices) == [4, 4]
    assert decision.memory.tolist() == [1.0]
    assert "linear: no choice of levels has at most 0.5 times" in caplog.text


@pytest.mark.parametrize("bad", [{"levels": []}, {"alpha": 0.0}, {"alpha": float("inf")}, {"alpha": "1"}])
def test_bad_input(bad):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        Linear(5, **bad)
