"""The line after 50 steps: what it finds, and what it says to do."""

from __future__ import annotations

import pytest

from gradcomp.job.report import Measured, verdict

#: 1 Gbit/s.
SLOW = 8e-9


def measured(
    step_ms: float,
    sent_mb: float,
    exposed_ms: float,
    half_mb: float,
    half_exposed_ms: float,
    rate: float = SLOW,
):
    milli = 1e-3
    return Measured(
        step_ms * milli,
        sent_mb * 1e6,
        exposed_ms * milli,
        half_mb * 1e6,
        half_exposed_ms * milli,
        rate,
        0.25 * milli,
    )


CASES = {
    "uncompressed on a slow link": (
        measured(391, 42.3, 355, 21.2, 180),
        False,
        ["uncompressed; 355.0 of 391.0 ms", 'compare with compression="quantize:bits=4"'],
    ),
    "uncompressed, all hidden": (
        measured(391, 42.3, 1, 21.2, 0.5),
        False,
        ["1.0 of 391.0 ms", "exposed communication: fewer bytes would hardly shorten it, leave it so"],
    ),
    "uncompressed, exposed for another reason": (
        measured(391, 42.3, 355, 21.2, 180, SLOW / 1000),
        False,
        [
            "355.0 of 391.0 ms",
            ": the bytes take 0.34 of them, the rest is latency (0.25 ms a message) and waiting for other ranks",
            "fewer bytes would hardly shorten it, leave it so, and exchange less often",
        ],
    ),
    "bfloat16 of a small model": (
        measured(2, 0.01, 1, 0.01, 1),
        True,
        [
            "1.0 of 2.0 ms",
            "the bytes take 0.08 of them, the rest is latency (0.25 ms a message)",
            "leave it so",
        ],
    ),
    "bfloat16 itself": (
        measured(219, 21.2, 180, 21.2, 180),
        True,
        ["21.200 MB", 'compare with compression="quantize'],
    ),
    "bfloat16 itself, hidden": (measured(219, 21.2, 2, 21.2, 2), True, ["leave it so"]),
    "compressed, for nothing": (
        measured(90, 5.5, 3, 21.2, 1),
        True,
        [
            "compression gains nothing against it here",
            "0.25 ms of latency",
            'compare with compression="bf16" and "none"',
        ],
    ),
    "compressed, and worth it": (
        measured(81, 0.2, 3, 21.2, 180),
        True,
        ["about 177.0 ms a step are gained", "1.00 Gbit/s", ": keep it"],
    ),
    "compressed, with more to gain": (
        measured(81, 5.5, 40, 21.2, 180),
        True,
        ["140.0 ms", "a higher ratio may gain more"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_verdict_says_what_was_found_and_what_to_do(case: str):
    numbers, compressed, says = CASES[case]
    line = verdict(numbers, compressed)
    assert all(part in line for part in says), line
    assert "\n" not in line
    assert ("bfloat16" in line) == compressed
