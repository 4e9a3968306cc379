"""The model of many ranks: verified formulas, and the charts in the documentation are what the command draws."""

from __future__ import annotations

from pathlib import Path

import pytest
import scaling

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture(scope="module")
def panels() -> list[scaling.Panel]:
    return scaling.panels()


def test_ranks_send_what_the_formulas_say():
    assert scaling.verify() == len(scaling.TWO_LEVELS) * (2 + 5 + 16)


def test_the_chart_in_the_documentation_is_of_these_numbers(panels):
    drawn = (DOCS / "scaling.png").read_bytes()
    assert scaling.digest(panels).encode() in drawn
    assert "scaling.png" in (DOCS / "algorithms.md").read_text(encoding="utf-8")


def test_what_is_gathered_grows_with_the_ranks_and_what_is_reduced_does_not(panels):
    lines = {name: dict(points) for name, points in panels[-1].lines.items()}
    assert lines["TopK 1%"][1024] > 100 * lines["TopK 1%"][2]
    assert lines["4 bits"][1024] < 2 * lines["4 bits"][2]
    assert lines["4 bits"][16] < lines["8 bits"][16] < lines["bf16"][16] < lines["float32, summed"][16]
