"""The contract suite for compressors, also your own: no framework, no network, ranks simulated in one thread.

    from gradcomp.testing import Row, check_compressor

    check_compressor(Row(MyCompressor()))

For a test of each promise, parametrise by the names in ``CHECKS`` and call ``CHECKS[name](Row(MyCompressor()))``.
"""

from gradcomp.testing import feedback, forms_and_means, wire
from gradcomp.testing.cases import CHECKS, Check, Row
from gradcomp.testing.simulation import Simulation

__all__ = ["CHECKS", "Check", "Row", "Simulation", "check_compressor", "feedback", "forms_and_means", "wire"]


def check_compressor(row: Row) -> None:
    """Raises AssertionError for the first promise that a compressor breaks. It takes some seconds.

    ``python -O`` leaves assertions out, so it finds nothing.
    """
    for check in CHECKS.values():
        check(row)
