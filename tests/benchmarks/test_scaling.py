"""The model of many ranks: verified formulas, and the charts in the documentation are what the command draws."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import plot
import pytest
import scaling

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture(scope="module")
def panels() -> list[plot.Panel]:
    return scaling.panels()


def test_ranks_send_what_the_formulas_say():
    assert scaling.verify() == len(scaling.TWO_LEVELS) * (2 + 5 + 16)


def test_the_chart_in_the_documentation_is_this_one(panels):
    assert (DOCS / "scaling.svg").read_text(encoding="utf-8") == plot.document(panels)
    assert "scaling.svg" in (DOCS / "algorithms.md").read_text(encoding="utf-8")


def test_the_chart_is_a_drawing_of_all_lines(panels):
    root = ElementTree.fromstring(plot.document(panels))
    lines = root.findall(".//{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == sum(len(panel.lines) for panel in panels)
    for line in lines:
        points = [tuple(map(float, point.split(","))) for point in line.get("points").split()]
        assert all(plot.LEFT <= x <= plot.WIDTH - plot.RIGHT for x, _ in points)
        assert all(plot.TOP <= y <= plot.HEIGHT - plot.BOTTOM for _, y in points)


def test_what_is_gathered_grows_with_the_ranks_and_what_is_reduced_does_not(panels):
    lines = {name: dict(points) for name, points in panels[-1].lines.items()}
    assert lines["TopK 1%"][1024] > 100 * lines["TopK 1%"][2]
    assert lines["4 bits"][1024] < 2 * lines["4 bits"][2]
    assert lines["4 bits"][16] < lines["8 bits"][16] < lines["bf16"][16] < lines["float32, summed"][16]
