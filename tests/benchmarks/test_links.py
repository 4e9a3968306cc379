"""The step over several links: the table by hand, and that one table never mixes machines or days."""

from __future__ import annotations

import argparse
import json

import links
import pytest
from step_rows import DDP, IDEAL


def measured(name: str, bytes_per_second: float, ddp: float, date: str = "2026-11-28", cpu: str = "one"):
    seconds = {IDEAL: 0.05, DDP: ddp, links.HOOK: ddp / 2, links.FOUR: ddp / 4}
    rows = {key: {"step_seconds": each, "wire_bytes": 1e6 * ddp} for key, each in seconds.items()}
    return {
        "link": {"name": name, "bytes_per_second": bytes_per_second},
        "rows": rows,
        "date": date,
        "machine": {**dict.fromkeys(links.SAME, ""), "cpu": cpu, "load_at_start": 0.1},
    }


def test_the_table_has_ratios_and_the_rates_that_are_not_those_of_the_names():
    text = links.table([measured("1gbit", 121e6, 0.4), measured("10gbit", 1e9, 0.1)])
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[2:]]
    assert rows == [
        ["1 Gbit/s", "50 ms", "400 ms", "200 ms (0.50)", "100 ms (0.25)"],
        ["10 Gbit/s (8.0 Gbit/s measured)", "50 ms", "100 ms", "50 ms (0.50)", "25 ms (0.25)"],
        ["sent per step and rank", "–", "0.4 MB", "0.4 MB", "0.4 MB"],
    ]


def test_a_figure_that_does_not_count_is_marked():
    one = measured("unshaped", 1e9, 0.4)
    one["rows"][links.FOUR]["invalid"] = ["bits"]
    assert "100 ms (0.25) (does not count)" in links.table([one])


@pytest.mark.parametrize(("change", "code"), [({}, 0), ({"date": "2026-11-27"}, 1), ({"cpu": "another"}, 1)])
def test_what_the_file_holds_is_of_one_machine_and_day(tmp_path, monkeypatch, capsys, change, code):
    file = tmp_path / "links.json"
    held = [measured("100mbit", 12e6, 4.0, **change), measured("1gbit", 121e6, 0.3)]
    file.write_text(json.dumps({"links": held}))
    monkeypatch.setattr(links, "measure", lambda name: measured(name, 121e6, 0.4))
    options = argparse.Namespace(links=["1gbit"], json=file, plot=None)
    assert links.run(options) == code
    now = json.loads(file.read_text())["links"]
    assert [(each["link"]["name"], each["rows"][DDP]["step_seconds"]) for each in now] == [
        ("100mbit", 4.0),
        ("1gbit", 0.4),
    ]
    assert ("| 1 Gbit/s" in capsys.readouterr().out) == (code == 0)
