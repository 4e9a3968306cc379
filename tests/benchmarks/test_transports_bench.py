"""The benchmark of the transports: its bars, and one short run."""

from __future__ import annotations

import pytest
import transports
from transport_engines import no_mpi

KB, MB = 1 << 10, 1 << 20


@pytest.mark.parametrize(
    ("nbytes", "bare_ms", "gradcomp_ms", "missed"),
    [
        (KB, 0.1, 0.35, False), (KB, 0.1, 0.45, True), (64 * KB, 0.1, 9.0, False),
        (4 * MB, 10.0, 10.4, False), (4 * MB, 10.0, 10.6, True), (4 * MB, None, 99.0, False),
    ],
)  # fmt: skip
def test_a_bar_is_missed_by_ratio_or_by_milliseconds(nbytes, bare_ms, gradcomp_ms, missed):
    assert transports.Row("mpi", "alltoall", nbytes, bare_ms, gradcomp_ms).missed is missed


@pytest.mark.full
@pytest.mark.skipif(bool(no_mpi()), reason=no_mpi())
def test_a_run_measures_both_collectives(run_json):
    arguments = ("--transports", "mpi", "--rounds", "1", "--sizes", "1024")
    found = run_json("benchmarks/transports.py", *arguments, check=False)  # a busy machine misses bars
    assert [row["collective"] for row in found["rows"]] == ["alltoall", "allreduce"]
    assert all(row["bare_ms"] > 0 and row["gradcomp_ms"] > 0 for row in found["rows"])
    bare, polled = found["waiting_shares"]["mpi"]
    assert 0 < polled < bare
