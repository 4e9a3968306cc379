"""The line after 50 steps: what it finds, and what it says to do."""

from __future__ import annotations

import pytest

from gradcomp.job.report import Measured, verdict

SLOW = 8e-9  # seconds a byte: 1 Gbit/s

#: Milliseconds of a step, MB sent, milliseconds exposed, MB and milliseconds exposed of bfloat16, seconds per byte;
#: whether it is compressed; what is said.
CASES = {
    "uncompressed on a slow link": (
        (391, 42.3, 355, 21.2, 180, SLOW), False,
        ["uncompressed; 355.0 of 391.0 ms", 'compare with compression="quantize:bits=4"'],
    ),
    "uncompressed, all hidden": (
        (391, 42.3, 1, 21.2, 0.5, SLOW), False,
        ["1.0 of 391.0 ms", "exposed communication: fewer bytes would hardly shorten it, leave it so"],
    ),
    "uncompressed, exposed for another reason": (
        (391, 42.3, 355, 21.2, 180, SLOW / 1000), False,
        ["355.0 of 391.0 ms", "fewer bytes would hardly shorten it, leave it so, and exchange less often",
         ": the bytes take 0.34 of them, the rest is latency (0.25 ms a message) and waiting for other ranks"],
    ),
    "bfloat16 of a small model": (
        (2, 0.01, 1, 0.01, 1, SLOW), True,
        ["1.0 of 2.0 ms", "the bytes take 0.08 of them, the rest is latency (0.25 ms a message)", "leave it so"],
    ),
    "bfloat16 itself": (
        (219, 21.2, 180, 21.2, 180, SLOW), True, ["21.200 MB", 'compare with compression="quantize'],
    ),
    "bfloat16 itself, hidden": ((219, 21.2, 2, 21.2, 2, SLOW), True, ["leave it so"]),
    "compressed, for nothing": (
        (90, 5.5, 3, 21.2, 1, SLOW), True,
        ["compression gains nothing against it here", "0.25 ms of latency",
         'compare with compression="bf16" and "none"'],
    ),
    "compressed, and worth it": (
        (81, 0.2, 3, 21.2, 180, SLOW), True, ["about 177.0 ms a step are gained", "1.00 Gbit/s", ": keep it"],
    ),
    "compressed, with more to gain": (
        (81, 5.5, 40, 21.2, 180, SLOW), True, ["140.0 ms", "a higher ratio may gain more"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_verdict_says_what_was_found_and_what_to_do(case: str):
    numbers, compressed, says = CASES[case]
    step_ms, sent_mb, exposed_ms, half_mb, half_exposed_ms, rate = numbers
    measured = Measured(
        step_ms / 1e3, sent_mb * 1e6, exposed_ms / 1e3, half_mb * 1e6, half_exposed_ms / 1e3, rate, 0.25e-3
    )
    line = verdict(measured, compressed)
    assert all(part in line for part in says), line
    assert "\n" not in line
    assert ("bfloat16" in line) == compressed
