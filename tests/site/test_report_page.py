"""The page of a report in a headless Chromium: what is drawn, on a phone and on a desk, in the light and in the dark.

``make site-check`` fetches Chromium and runs this with ``GRADCOMP_CHROMIUM``.
"""

from __future__ import annotations

import functools
import importlib
import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import gradcomp as gc
from gradcomp.cli import main
from gradcomp.core.journal import Journal
from gradcomp.core.run_lines import Sample, Window

CHROMIUM = os.environ.get("GRADCOMP_CHROMIUM", "")

pytestmark = pytest.mark.skipif(
    not (CHROMIUM and find_spec("vl_convert")), reason="needs Chromium and the extra report: make site-check"
)

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
report_page = importlib.import_module("report_page")

SECTIONS = [
    "Where a step's time goes", "Who is waited for", "Bytes and error by layer", "Levels, and why they changed",
    "Gains of GraVAC", "Residuals", "Skipped steps",
]  # fmt: skip
#: By chart, texts that its axes and legend have.
DRAWN = {
    "parts": {"ms a step", "step", "backward", "waiting for the last rank", "communication"},
    "last": {"rank 3", "steps in which it was waited for"},
    "last-along": {"rank 3", "step"},
    "bytes": {"bytes a step"},
    "errors": {"one step", "controller's period"},
    "levels": {"elements by level", "quantize 4 bits"},
    "layer-levels": {"step", "quantize 4 bits"},
    "norms": {"before compression", "at the candidate", "sum of norms"},
    "gains": {"1x", "10x", "20x", "compression gain"},
    "factors": {"minimum", "candidate"},
    "density": {"10x", "40x", "steps"},
    "throughput": {"10x", "20x"},
    "residuals": {"median layer", "largest"},
}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run of 1,000 steps with 160 layers on 8 ranks, which is compared with itself."""
    folder = tmp_path_factory.mktemp("report")
    report_page.long_run(folder / "run.jsonl")
    log = str(folder / "run.jsonl")
    assert main(["report", log, "-o", str(folder / "report.html")]) == 0
    assert main(["report", log, log, "-o", str(folder / "both.html")]) == 0
    return folder / "report.html"


def luminance(colour: str) -> float:
    channels = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return float(sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True)))


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@functools.cache
def looked_at(page: Path, width: int, scheme: str) -> dict:
    return report_page.look(page, CHROMIUM, width, scheme)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1366])
def test_every_chart_is_drawn_and_readable(page: Path, width: int, scheme: str):
    found = looked_at(page, width, scheme)
    assert (found["failed"], found["console"], found["loaded"]) == (None, [], [])
    assert found["headings"] == SECTIONS
    assert found["width"] <= width
    assert found["outside"] == []
    assert found["charts"].keys() == DRAWN.keys()
    back = found["back"]
    assert luminance(back) > 0.8 if scheme == "light" else luminance(back) < 0.05
    assert min(contrast(ink, back) for ink in found["inks"]) >= 4.5
    for name, texts in DRAWN.items():
        chart = found["charts"][name]
        assert texts <= set(chart["texts"]), (name, chart["texts"])
        assert chart["marks"] > 0
        assert chart["right"] <= width
        assert min(contrast(ink, back) for ink in chart["inks"]) >= 4.5
    parts = found["charts"]["parts"]
    assert parts["marks"] == 4 * 100
    assert min(contrast(fill, back) for fill in parts["fills"]) >= 3
    assert found["charts"]["last"]["marks"] == 8
    assert found["charts"]["bytes"]["marks"] == 2 * 30
    named = [text for text in found["charts"]["bytes"]["texts"] if text.endswith("weight")]
    assert len(set(named)) == 30  # none is cut off at its end


def test_the_page_says_what_the_run_was(page: Path):
    text = looked_at(page, 1366, "light")["text"]
    assert re.search(
        r"Of a step's 64\.\d ms, .* are exposed communication, .* waiting for the last rank; rank 3 was", text
    )
    assert "130 more layers" in text
    assert "2 of 1,000 steps were skipped." in text
    assert "blocks.1.part3.weight was not finite" in text
    assert "1 exchanges were thrown away" in text
    assert "more of the errors fit the budget" in text


def test_a_click_sorts_a_table(page: Path):
    found = looked_at(page, 1366, "light")
    seconds = [float(text.split()[0]) for text in found["before"]]
    assert [float(text.split()[0]) for text in found["falling"]] == sorted(seconds, reverse=True)
    assert [float(text.split()[0]) for text in found["rising"]] == sorted(seconds)


def test_two_runs_are_drawn_over_each_other(page: Path):
    found = looked_at(page.with_name("both.html"), 390, "dark")
    assert (found["failed"], found["console"], found["outside"]) == (None, [], [])
    assert found["headings"] == ["Two runs", *SECTIONS]
    for name in ("both-seconds", "both-exposed", "both-bytes"):
        assert {"run.jsonl (first)", "run.jsonl (second)"} <= set(found["charts"][name]["texts"])
    assert re.search(r"a step\s+64\.\d ms\s+64\.\d ms\s+1\.00", found["text"])


HOSTILE = "</script><script>document.title='x'</script><img src=x onerror=console.log(1)>&quot;\"'`${1}"


def test_names_from_the_log_are_text(tmp_path: Path):
    """Layers, compressors, controllers and reasons come from a file that anybody may have written."""
    layers = [gc.LayerSpec(HOSTILE, (64, 64)), gc.LayerSpec("datum.x = signal('width')\u2028", (64,))]
    journal = Journal(tmp_path / "<b>run.jsonl")
    journal.run(2, HOSTILE, HOSTILE, layers)
    for version in range(2):
        journal.choice(5 * version, HOSTILE)
        rows = tuple(gc.Assignment(layer.name, HOSTILE, version + 1) for layer in layers)
        journal.plan(5 * version, gc.Plan(version, rows), [64, 16])
    journal.line(Window(0, 10, *(((0.25, 0.25),) * 8), skipped=((3, 0),)))
    journal.line(Sample(2, 0, 1.0, 0.5, 0.25))
    journal.close()
    out = tmp_path / "report.html"
    assert main(["report", str(tmp_path / "<b>run.jsonl"), "-o", str(out)]) == 0
    found = looked_at(out, 390, "light")
    assert (found["failed"], found["console"], found["loaded"], found["outside"]) == (None, [], [], [])
    assert not {"script", "img", "b"} & set(found["elements"])
    assert f"compression {HOSTILE}; controller {HOSTILE};" in found["text"]
