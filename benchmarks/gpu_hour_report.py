"""What benchmarks/gpu_hour.py has found so far, as one page of Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gpu_predictions
import report
from gpu_hour_stages import Stage

_UNKNOWN: Mapping[str, Any] = {"status": "not run yet"}


def markdown(stages: Sequence[Stage], found: Mapping[str, Mapping[str, Any]]) -> str:
    """A table of all stages, one of predictions, then the last lines of each stage's output."""
    headers = ("stage", "what", "piece", "result", "seconds", "limit", "reason")
    rows = []
    for stage in stages:
        facts = found.get(stage.name, _UNKNOWN)
        reason = str(facts.get("reason", "")).replace("|", "\\|")
        rows.append(
            (
                stage.name,
                stage.title,
                stage.piece,
                facts["status"],
                facts.get("seconds"),
                stage.limit_seconds,
                reason,
            )
        )
    parts = ["# What a GPU showed", *_where(found), report.table(headers, rows)]
    parts += [
        "## Predicted and measured",
        report.table(gpu_predictions.HEADERS, gpu_predictions.beside(found)),
    ]
    for stage in stages:
        if output := found.get(stage.name, _UNKNOWN).get("output"):
            parts += [f"## {stage.name}: {stage.title}", "\n".join(["````text", *output, "````"])]
    return "\n\n".join(parts) + "\n"


def _where(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """On which GPUs, from which sources; of each, which stages if there are several."""
    lines = []
    for key, title in (("gpu", "GPU"), ("sources", "digest of the sources")):
        members: dict[str, list[str]] = {}
        for name, facts in found.items():
            if facts.get(key):
                members.setdefault(str(facts[key]), []).append(name)
        for value, names in members.items():
            lines.append(f"{title}: {value}" + (f" ({', '.join(names)})" if len(members) > 1 else ""))
    return lines
