"""The compressors' contract under every reduction: a row of each family that reduces, through the suite's own tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from configurations import ROWS
from reduce.schemes import PARTIAL, REDUCTIONS
from tiers import every_value

from gradcomp.core.topology import Topology
from gradcomp.testing import Simulation, cases, feedback, forms_and_means, wire

#: One of each kind of message, rounding and residual; which class makes the message decides nothing more.
CHOSEN = (
    "bf16",
    "fp16-feedback",
    "minmax-5-feedback",
    "minmax-4-shift",
    "nuqsgd-5-feedback",
    "onebit",
    "signum-odd",
    "momentum-correction",
)
#: Scatter-reduce-allgather runs through all rows.
OTHERS = [r for r in REDUCTIONS if r != "sra"]


@pytest.fixture
def under(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts every simulation of the suite under a reduction, on two hosts."""

    def use(reduction: str) -> None:
        def simulation(layers, compression, world: int = 2, **options) -> Simulation:
            options.setdefault("topology", Topology(tuple(r % 2 for r in range(world))))
            return Simulation(layers, compression, world, **{"reduction": reduction} | options)

        monkeypatch.setattr(cases, "Simulation", simulation)

    return use


def every_pair(condition=lambda row: True) -> pytest.MarkDecorator:
    """Reductions and rows, but for what is refused: votes in partial sums.

    The default run has every reduction, and every class under one that makes partial sums and under one that does not.
    """
    pairs = {
        f"{name}-{reduction}": (ROWS[name], reduction)
        for name in CHOSEN
        for reduction in OTHERS
        if condition(ROWS[name]) and not (name.startswith("signum") and reduction in PARTIAL)
    }
    cases = every_value(
        pairs.values(), lambda pair: [(type(pair[0].compressor), pair[1] in PARTIAL), pair[1]]
    )
    return pytest.mark.parametrize(("row", "reduction"), cases, ids=pairs)


@every_pair()
def test_means(row, reduction: str, under):
    under(reduction)
    forms_and_means.ranks_hold_the_same_bytes(row, 5)
    forms_and_means.zeros_give_zeros(row)
    if row.error is not None:
        forms_and_means.error_is_bounded(_slack(reduction, row), 3)
    if row.constants:
        forms_and_means.equal_values_come_back_as_they_were(row, -3.0)
    forms_and_means.the_seed_decides_every_draw(row)
    feedback.a_loss_scale_that_is_a_power_of_two_changes_no_bit(row)


def _slack(reduction: str, row):
    """A value is encoded up to three times on its way around three ranks, as a sum of up to three."""
    return type(row)(**{**vars(row), "error": 3 * row.error if reduction in PARTIAL else row.error})


@every_pair(lambda row: row.telescopes and row.steady)
def test_residuals(row, reduction: str, under):
    under(reduction)
    feedback.error_feedback_telescopes(row, 3)
    feedback.error_feedback_telescopes_through_everything_that_moves_state(row, 1)
    feedback.residuals_do_not_depend_on_the_loss_scale(row, (1000.0, 500.0, 3.0))


@every_pair(lambda row: row.steady)
def test_state(row, reduction: str, under):
    under(reduction)
    feedback.a_layer_absent_everywhere_is_not_written_and_keeps_its_state(row)
    feedback.a_discarded_step_leaves_no_trace_in_the_state(row)
    forms_and_means.a_non_finite_gradient_is_seen_by_all_and_poisons_nothing(row, cases.LARGE, float("nan"))
    if row.overflows:
        forms_and_means.a_sum_that_overflows_is_seen_by_all(row)
    feedback.a_run_goes_on_from_its_files_bit_for_bit(row)


@every_pair()
def test_bytes(row, reduction: str, under):
    under(reduction)
    wire.every_byte_that_is_sent_is_counted(row, 4)
