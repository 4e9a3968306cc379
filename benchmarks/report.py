"""How the benchmarks show what they measured: an aligned Markdown table, and JSON with the machine beside it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

NOTHING = "–"

Run = dict[str, Any]


def table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table; the first column is aligned left, the others right. None is an empty cell."""
    cells = [[NOTHING if cell is None else str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in [list(headers), *cells]) for i in range(len(headers))]

    def line(row: Sequence[str]) -> str:
        padded = [
            c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ]
        return f"| {' | '.join(padded)} |"

    rule = [("-" * w) if i == 0 else ("-" * (w - 1) + ":") for i, w in enumerate(widths)]
    return "\n".join([line(headers), f"|{'|'.join(f' {r} ' for r in rule)}|", *map(line, cells)])


def by_row(runs: Iterable[Run], key: str = "row") -> dict[str, dict[int, Run]]:
    """The runs by row and seed."""
    found: dict[str, dict[int, Run]] = {}
    for run in runs:
        found.setdefault(run[key], {})[run["seed"]] = run
    return found


def pairs(own: Iterable[Run], base: Iterable[Run]) -> list[tuple[Run, Run]]:
    """Runs beside the base's of the same seed on the same machine, since arithmetic differs between machines."""
    found = {(run["seed"], run["machine"]): run for run in base}
    keys = [(run, (run["seed"], run["machine"])) for run in own]
    return [(run, found[key]) for run, key in keys if key in found]


def kept(path: Path, about: dict[str, Any]) -> list[Run]:
    """The runs of a file, if it has any; SystemExit where they are of other settings."""
    if not path.is_file():
        return []
    found = json.loads(path.read_text(encoding="utf-8"))
    if any(found.get(key) != value for key, value in about.items()):
        raise SystemExit(f"{path} has runs of other settings")
    runs: list[Run] = found["runs"]
    return runs


def check_machine(path: Path | None, runs: Iterable[Run]) -> None:
    """SystemExit if any of a file's runs are of another machine, since none that is trained here compares with them."""
    if elsewhere := {run["machine"] for run in runs} - {processor()}:
        raise SystemExit(
            f"{path} lacks runs, and has some of another machine ({', '.join(sorted(elsewhere))}), with which runs of "
            f"this one ({processor()}) do not compare: go on there, or write another file"
        )


def machine() -> dict[str, Any]:
    """What the figures depend on, without naming the machine."""
    model, flags = platform.processor() or platform.machine(), ""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        fields = dict(
            (part.strip() for part in line.split(":", 1))
            for line in info.read_text().splitlines()
            if ":" in line
        )
        model, flags = fields.get("model name", model), fields.get("flags", "")
    return {
        "cpu": model,
        "isa": "avx512" if "avx512bw" in flags else "avx2" if "avx2" in flags else "baseline",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load_at_start": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "numpy", "gradcomp")},
    }


def processor() -> str:
    """What a run's arithmetic depends on."""
    found = machine()
    return f"{found['cores']} cores of {found['cpu']}, {found['isa']}"


def describe(found: dict[str, Any]) -> str:
    """One line about :func:`machine`."""
    versions = ", ".join(f"{name} {found[name]}" for name in ("python", "torch", "gradcomp") if found[name])
    return (
        f"{found['cpu']}, {found['cores']} cores, {found['isa']}; load {found['load_at_start']}; {versions}"
    )


def write_json(path: Path | None, data: dict[str, Any]) -> None:
    """Write the figures, if a path was given: all of them or nothing, for a run may end at any time."""
    if path is not None:
        _replace(path, json.dumps(data, indent=1))


def write_runs(path: Path | None, data: dict[str, Any], runs: Iterable[Run]) -> None:
    """Write as ``write_json`` does, with the runs last and a line for each, so that a new run is a new line."""
    if path is not None:
        head = json.dumps({**data, "runs": []})[: -len("]}")]
        lines = ",\n".join(json.dumps(run) for run in runs)
        _replace(path, f"{head}\n{lines}\n]}}")


def _replace(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text + "\n", encoding="utf-8")
    partial.replace(path)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
