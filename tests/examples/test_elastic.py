"""The elastic examples survive a kill of rank 0 and take a newcomer in."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from elastic_job import job
from preloaded import TENSORFLOW, TORCH

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.parametrize(
    ("name", "imported"), [("elastic_digits", TORCH), ("tf_elastic", TENSORFLOW)], ids=["torch", "keras"]
)
def test_the_example_survives_a_kill_and_takes_a_newcomer_in(name, imported) -> None:
    program = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    with job(program, imported, GRADCOMP_MIN_RANKS=2) as started:
        for _ in range(3):
            started.start("--epochs", 6, "--pause", 0.05)
        outputs = lambda: [one.stdout.read_text() if one.stdout.exists() else "" for one in started.processes]  # noqa: E731
        deadline = time.monotonic() + 60
        while sum("of 3 trains" in text for text in outputs()) < 3 and time.monotonic() < deadline:
            time.sleep(0.05)
        first = next(number for number, text in enumerate(outputs()) if "rank 0 of 3" in text)
        started.kill(first)
        assert started.wait(first) == -9
        late = started.start("--epochs", 6, "--pause", 0.05)
        ends = started.finish()
        assert ends == [-9 if number == first else 0 for number in range(4)], started.log(late)
        lasting = [text for number, text in enumerate(outputs()) if number != first]
        assert all("of 3: accuracy 0.9" in text for text in lasting), lasting
        places = {text.rpartition("trains from")[2].splitlines()[0] for text in lasting}
        assert len(places) == 1, "a newcomer goes on where the others are"
