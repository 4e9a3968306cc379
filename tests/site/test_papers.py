"""The rows of "The papers, item by item" name files and definitions that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/papers/index.md").read_text()
HEADLINES, ROWS = [
    [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in part.splitlines()
        if line.startswith("| ") and not line.startswith(("| item", "| abstract"))
    ]
    for part in PAGE.split("\n## The thesis", 1)
]
CODE = re.compile(r"`([\w/]+\.(?:py|cpp|h|cu|cuh|css|js))`(?: `(\w+))?")


def test_every_abstract_has_whole_headlines():
    papers = ("CGX", "QSDP", "L-GreCo", "LGC", "GraVAC", "PowerSGD")
    assert all(len(row) == 4 and all(row) for row in HEADLINES)
    assert [name for name in papers if not any(name in row[0] for row in HEADLINES)] == []


def test_rows_are_whole_and_files_and_definitions_exist():
    assert len(ROWS) > 400
    wrong = []
    for row in ROWS:
        assert len(row) == 5, row
        assert all(row), row
        item, _, code, tests, figure = row
        if len(re.sub(r"\]\(.*?\)", "", figure).split()) > 40:
            wrong.append(f"{item}: the last column is long")
        for name, definition in CODE.findall(code):
            path = ROOT / name if name.startswith(("benchmarks/", "native/")) else ROOT / "gradcomp" / name
            if not path.is_file():
                wrong.append(f"{item}: {name} does not exist")
            elif definition and not re.search(rf"\b{definition}\b", path.read_text()):
                wrong.append(f"{item}: {name} has no {definition}")
        names = re.findall(r"`(tests/[\w/]+\.py)`", tests)
        wrong += [f"{item}: {name} does not exist" for name in names if not (ROOT / name).is_file()]
    assert not wrong, "\n".join(wrong)
