"""What the ranks of the step benchmark found, as figures, verdicts and a table."""

from __future__ import annotations

import itertools
import statistics
from typing import Any

import report
from roofline import busiest_bytes, roofline
from step_rows import AUTO, DDP, FINE, FORWARD, HOOK, IDEAL, IDENTITY, POWERSGD, TOPK, UNTRAINED, Row

BYTES_TOLERANCE = 0.02
LOSS_TOLERANCE = 0.01
#: By link: a row's median step over another row's, at most.
BARS = {
    "1gbit": (
        ("4bit", DDP, 0.22),
        ("4bit-feedback", DDP, 0.22),
        (POWERSGD, HOOK, 0.55),
        (TOPK, DDP, 0.16),
        ("lgc-1", FINE, 1.15),
        ("lgc-1-all", FINE, 1.15),
    ),
    "unshaped": ((IDENTITY, DDP, 1.05),),
}

#: On any link: of which steps have unlike lengths, a row's mean step over another row's, at most.
MEAN_BARS = ((AUTO, UNTRAINED, 1.05),)
#: By model: the paired blocks of a row with finish="forward" over those of finish="backward", at most.
FORWARD_BARS = {"deep": 0.90, "lstm": 1.02}
#: Blocks that means leave out: in the first steps a share is measured.
UNSETTLED = 2


def evaluate(row: Row, timed: list[dict[str, Any]], verified: list[dict[str, Any]]) -> dict[str, Any]:
    """One row's figures, over all ranks: seconds and bytes."""
    own = [found["rows"][row.key] for found in timed]
    result: dict[str, Any] = {"title": row.title, "kind": row.kind, "how": row.how, "finish": row.finish}
    result["step_seconds"] = max(median_step(rank) for rank in own)
    quartiles = [statistics.quantiles(all_seconds(rank), n=4) for rank in own]
    result["quartiles_seconds"] = [max(q[0] for q in quartiles), max(q[2] for q in quartiles)]
    result["block_medians_seconds"] = [
        max(statistics.median(block) for block in blocks)
        for blocks in zip(*(rank["block_seconds"] for rank in own), strict=True)
    ]
    if settled := [
        rank["block_seconds"][UNSETTLED:] for rank in own if len(rank["block_seconds"]) > UNSETTLED
    ]:
        result["mean_seconds"] = max(
            statistics.mean(itertools.chain.from_iterable(blocks)) for blocks in settled
        )
    rate = min(found["link"]["bytes_per_second"] for found in timed)
    result["resent_bytes"] = statistics.mean(rank["resent_bytes"] for rank in own)
    for name in ("interface_bytes", "interface_total_bytes"):
        result[name] = statistics.mean(rank[name] for rank in own)
    for name in ("forward_seconds", "backward_seconds"):
        result[name] = max(rank[name] for rank in own)
    if row.kind == "none":
        return result

    travels = busiest_bytes([rank["rounds"] for rank in own])
    result["wire_bytes"] = statistics.mean(rank.get("wire_bytes", sum(travels)) for rank in own)
    result["bucket_bytes"] = travels
    result["buckets"] = len(travels)
    quarter = len(own[0]["losses"]) * 3 // 4
    result["loss"] = statistics.mean(statistics.mean(rank["losses"][quarter:]) for rank in own)
    ideal = [found["rows"].get(IDEAL) for found in timed]
    if all(ideal):
        result["exposed_seconds"] = result["step_seconds"] - max(median_step(free) for free in ideal)
    if all(ideal) and row.finish != FORWARD:  # whose buckets may travel while the next forward pass runs
        result["roofline_seconds"] = max(
            roofline(
                list(zip(travels, rank["buckets"], strict=True)),
                free["ready_seconds"],
                free["after_seconds"],
                rate,
            )
            for rank, free in zip(own, ideal, strict=True)
        )
        result["distance_seconds"] = result["step_seconds"] - result["roofline_seconds"]
    if row.kind == "gradcomp":
        result["rounds"] = max(len(bucket) for step in own[0]["rounds"] for bucket in step)
        result["waited_seconds"] = max(rank["exposed_seconds"] for rank in own)
        result["codec_seconds"] = max(rank["codec_seconds"] for rank in own)
        result["in_flight_seconds"] = max(rank["wire_seconds"] for rank in own)
        result["bytes_difference"] = result["interface_bytes"] / result["wire_bytes"] - 1
        digests = {rank["digest"] for rank in own} | {found["rows"][row.key]["digest"] for found in verified}
        result["bits_equal"] = len(digests) == 1 if verified else None
        result["digest"] = own[0]["digest"]
    return result


def median_step(found: dict[str, Any]) -> float:
    return statistics.median(all_seconds(found))


def all_seconds(found: dict[str, Any]) -> list[float]:
    return list(itertools.chain.from_iterable(found["block_seconds"]))


def judge(rows: dict[str, dict[str, Any]]) -> None:
    """Compare with DDP, and say for each gradcomp row which condition it breaks."""
    reference = rows.get(DDP)
    for row in rows.values():
        if reference is not None:
            row["to_ddp"] = row["step_seconds"] / reference["step_seconds"]
            if "loss" in row:
                row["loss_difference"] = row["loss"] / reference["loss"] - 1
        if row["kind"] == "gradcomp":
            broken = []
            if not row["bits_equal"]:
                broken.append("bits" if row["bits_equal"] is False else "bits not checked")
            if row["finish"] == FORWARD and row["digest"] != backward_of(rows, row)["digest"]:
                broken.append("bits of backward")
            if not abs(row["bytes_difference"]) <= BYTES_TOLERANCE:
                broken.append("bytes")
            if reference is None:
                broken.append("loss not checked")
            elif not abs(row["loss_difference"]) <= LOSS_TOLERANCE:
                broken.append("loss")
            row["invalid"] = broken


def show(rows: dict[str, dict[str, Any]]) -> str:
    def milliseconds(value: float | None) -> str | None:
        return None if value is None else f"{value * 1e3:.1f}"

    def megabytes(value: float | None) -> str | None:
        return None if value is None else f"{value / 1e6:.3f}"

    def percent(value: float | None) -> str | None:
        return None if value is None else f"{value * 100:+.2f}%"

    headers = ["row", "step ms", "x DDP", "roofline ms", "distance ms", "exposed ms", "waited ms", "buckets", "rounds",
               "wire MB", "interface MB", "bytes", "bits", "loss", "valid"]  # fmt: skip
    cells = []
    for row in rows.values():
        bits = row.get("bits_equal")
        invalid = row.get("invalid")
        cells.append(
            [
                row["title"],
                milliseconds(row["step_seconds"]),
                f"{row['to_ddp']:.3f}" if "to_ddp" in row else None,
                milliseconds(row.get("roofline_seconds")),
                milliseconds(row.get("distance_seconds")),
                milliseconds(row.get("exposed_seconds")),
                milliseconds(row.get("waited_seconds")),
                row.get("buckets"),
                row.get("rounds"),
                megabytes(row.get("wire_bytes")),
                megabytes(row["interface_bytes"]),
                percent(row.get("bytes_difference")),
                None if bits is None else "equal" if bits else "DIFFER",
                percent(row.get("loss_difference")),
                None if invalid is None else f"NO: {', '.join(invalid)}" if invalid else "yes",
            ]
        )
    return report.table(headers, cells)


def backward_of(rows: dict[str, dict[str, Any]], forward: dict[str, Any]) -> dict[str, Any]:
    """The row that differs from this one in ``finish`` only."""
    return next(row for row in rows.values() if row["how"] == forward["how"] and row["finish"] != FORWARD)


def forward_bars(rows: dict[str, dict[str, Any]], model: str) -> list[str]:
    """Of each row with ``finish="forward"``, the ratio of its blocks to those of the other ``finish``."""
    lines = []
    for row in (row for row in rows.values() if row["finish"] == FORWARD):
        medians = row["block_medians_seconds"], backward_of(rows, row)["block_medians_seconds"]
        ratios = [a / b for a, b in zip(*medians, strict=True)]
        row["to_backward"] = ratio = statistics.median(ratios)
        quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratio] * 3
        line = f'{row["title"]}: {ratio:.3f} x finish="backward" (quartiles {quartiles[0]:.3f}, {quartiles[2]:.3f})'
        if (bar := FORWARD_BARS.get(model)) is not None:
            line = f"bar: {line}, at most {bar:.2f}: {'met' if ratio <= bar else 'NOT met'}"
        lines.append(line)
    return lines


def bars(rows: dict[str, dict[str, Any]], link: str) -> list[str]:
    """What was asked for on this link, and whether it was reached."""
    lines = []
    for key, other, bar in BARS.get(link, ()):
        if key not in rows or other not in rows:
            continue
        row, reference = rows[key], rows[other]
        ratio = row["step_seconds"] / reference["step_seconds"]
        verdict = "met" if ratio <= bar else "NOT met"
        if row["invalid"]:
            verdict = f"does not count ({', '.join(row['invalid'])}); else {verdict}"
        lines.append(
            f"bar: {row['title']}: {ratio:.3f} x the median step of {reference['title']}, at most {bar}: {verdict}"
        )
    for key, other, bar in MEAN_BARS:
        means = [rows.get(name, {}).get("mean_seconds") for name in (key, other)]
        if None in means:
            continue
        ratio = means[0] / means[1]
        lines.append(
            f"bar: {rows[key]['title']}: {ratio:.3f} x the mean step of {rows[other]['title']}, at most {bar}: "
            f"{'met' if ratio <= bar else 'NOT met'}"
        )
    return lines
