"""Runs the compressors' contract suite under every reduction, on a row of each kind of message."""

from __future__ import annotations

import pytest
from configurations import ROWS
from reduce.schemes import PARTIAL, REDUCTIONS
from tiers import every_value

from gradcomp.core.topology import Topology
from gradcomp.testing import CHECKS, Row, Simulation, cases

#: One of each kind of rounding, residual and message; which class makes the message decides nothing more.
CHOSEN = ("fp16-feedback", "minmax-5-feedback", "minmax-4-shift", "signum-odd", "momentum-correction")
#: That the mean and the residuals are those of the scheme is in ``test_reductions.py``.
PROMISES = (
    "ranks_hold_the_same_bytes",
    "zeros_give_zeros",
    "equal_values_come_back_as_they_were",
    "the_seed_decides_every_draw",
    "a_loss_scale_that_is_a_power_of_two_changes_no_bit",
    "error_feedback_telescopes_through_everything_that_moves_state",
    "residuals_do_not_depend_on_the_loss_scale",
    "a_layer_absent_everywhere_is_not_written_and_keeps_its_state",
    "a_discarded_step_leaves_no_trace_in_the_state",
    "a_non_finite_gradient_is_seen_by_all_and_poisons_nothing",
    "a_sum_that_overflows_is_seen_by_all",
    "a_run_goes_on_from_its_files_bit_for_bit",
    "every_byte_that_is_sent_is_counted",
)
# Scatter-reduce-allgather runs through all rows. Votes are refused in partial sums.
PAIRS = {
    f"{name}-{reduction}": (ROWS[name], reduction)
    for name in CHOSEN
    for reduction in REDUCTIONS
    if reduction != "sra" and not (name.startswith("signum") and reduction in PARTIAL)
}


@pytest.mark.parametrize(
    ("row", "reduction"),
    # Every reduction, and every class under one that makes partial sums and under one that does not.
    every_value(PAIRS.values(), lambda pair: [(type(pair[0].compressor), pair[1] in PARTIAL), pair[1]]),
    ids=PAIRS,
)
def test_promises_hold_on_two_hosts(row: Row, reduction: str, monkeypatch: pytest.MonkeyPatch):
    def simulation(layers, compression, world: int, **options) -> Simulation:
        hosts = Topology(tuple(r % 2 for r in range(world)))
        return Simulation(layers, compression, world, **{"topology": hosts, "reduction": reduction} | options)

    monkeypatch.setattr(cases, "Simulation", simulation)
    for name in PROMISES:
        CHECKS[name](row)
    CHECKS["ranks_hold_the_same_bytes"].run(row, 5)
    CHECKS["every_byte_that_is_sent_is_counted"].run(row, 4)
