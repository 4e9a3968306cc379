"""Toward thousands of ranks: a model of one exchange, and what simulated ranks measure. A few minutes.

    python benchmarks/scaling.py [--part exchange|start] [--given JSON] [--png docs/scaling.png] [--json PATH]

exchange: bytes of every family and reduction are compared with the formulas, to the byte. Then this core's coding and
    handling are measured, and with them and `--alpha`, `--local-alpha` and `--local-rate` the time of an exchange is
    predicted (:mod:`scaling_model`). Tables: the best reduction of every family, and the ranks from which on each
    combination takes longer than the uncompressed exchange, with the term that grew most.
start: calls at the store in a start-up of simulated ranks, Gloo's own, time of a change of plan, memory of a rank.

The network is never measured. 50 microseconds of latency between hosts is what a bare MPI all-to-all of 1 KB takes
between two processes of one host (0.06 ms, docs/benchmarks/reductions.md); Gloo takes 0.38 there. `--given` takes the
constants of an earlier run from its JSON instead of measuring them; those of the documentation are in
`benchmarks/scaling_constants.json`.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import report
from scaling_model import (
    FAMILIES,
    GBITS,
    MODELS,
    OF_EACH,
    RANKS,
    REDUCED,
    REDUCTIONS,
    SLICE,
    WORLDS,
    Constants,
    Time,
    exchange,
    hosts_of,
    limit,
    uncompressed,
)
from scaling_simulation import measure, sizes_of, verify

from gradcomp.contrib.figures import drawing, look

#: A combination: family, reduction, ranks on a host, Gbit/s of a host's link.
Row = tuple[str, str, int, int]
BASELINE = "uncompressed"


def predict(model: str, given: Constants, worlds: Sequence[int] = WORLDS) -> dict[Row, dict[int, Time]]:
    """The times of every combination by the number of ranks; those of the baseline have no reduction."""
    sizes = {name: sizes_of(family) for name, family in FAMILIES.items()}
    buckets = -(-MODELS[model] // SLICE)
    found: dict[Row, dict[int, Time]] = {}
    for of_each in (1, OF_EACH):
        for gbits in GBITS:
            for world in worlds:
                topology = hosts_of(world, of_each)
                times = {(BASELINE, "-"): uncompressed(sizes, buckets, topology, gbits, given)}
                for name, reduction in combinations(of_each):
                    times[name, reduction] = exchange(
                        name, reduction, sizes[name], buckets, topology, gbits, given
                    )
                for (name, reduction), time in times.items():
                    found.setdefault((name, reduction, of_each, gbits), {})[world] = time
    return found


def combinations(of_each: int) -> list[tuple[str, str]]:
    """Families with the reductions that they can use; those that are not reduced have the transport's own."""
    found = []
    for name, family in FAMILIES.items():
        for reduction in REDUCTIONS if family.travels == REDUCED else ("-",):
            refused = family.votes and reduction in ("ring", "tree", "hierarchical")
            if not refused and (reduction != "hierarchical" or of_each > 1):
                found.append((name, reduction))
    return found


def best(times: Mapping[Row, Mapping[int, Time]], of_each: int, gbits: int) -> dict[str, dict[int, Time]]:
    """For every family and the baseline, the least time of any reduction, by ranks."""
    found: dict[str, dict[int, Time]] = {}
    for (name, _, each, rate), by_world in times.items():
        if (each, rate) == (of_each, gbits):
            known = found.setdefault(name, dict(by_world))
            for world, time in by_world.items():
                known[world] = min(known[world], time, key=lambda t: t.total)
    return found


def best_table(times: Mapping[Row, Mapping[int, Time]], of_each: int) -> str:
    """Milliseconds of the best reduction by link and ranks."""
    names = [name for name in best(times, of_each, GBITS[0]) if name != "none"]
    rows = []
    for name in names:
        cells: list[str] = []
        for gbits in GBITS:
            by_world = best(times, of_each, gbits)[name]
            cells += [f"{1e3 * by_world[world].total:,.0f}" for world in RANKS]
        rows.append([name, *cells])
    return report.table(["ms", *(f"{g} G: {n}" for g in GBITS for n in RANKS)], rows)


def limit_table(times: Mapping[Row, Mapping[int, Time]]) -> str:
    """The ranks from which on each combination is slower than the baseline, and why; then those that always are."""
    rows, hopeless = [], []
    columns = [(of_each, gbits) for of_each in (1, OF_EACH) for gbits in GBITS]
    for name, reduction in combinations(OF_EACH):
        title = name if reduction == "-" else f"{name}, {reduction}"
        cells: list[str | None] = []
        for of_each, gbits in columns:
            mine = times.get((name, reduction, of_each, gbits))
            found = None if mine is None else limit(mine, times[BASELINE, "-", of_each, gbits])
            cells.append(None if mine is None else in_words(found))
        if all(cell is None or cell.startswith("always") for cell in cells):
            hopeless.append(title)
        elif name not in ("none", "float32"):
            rows.append([title, *cells])
    heads = ["", *(f"{'flat' if e == 1 else '8 a host'}, {g} G" for e, g in columns)]
    always = f"Slower for every number of ranks from {WORLDS[0]} on: {'; '.join(hopeless)}"
    return f"{report.table(heads, rows)}\n\n{always}"


def in_words(found: tuple[int, str] | None) -> str:
    """A limit as a cell."""
    if found is None:
        return f"not up to {WORLDS[-1]:,}"
    world, term = found
    return f"always: {term}" if world == WORLDS[0] else f"{world:,}: {term}"


def digest(times: Mapping[Row, Mapping[int, Time]]) -> str:
    """Of the times of 8 and 64 ranks, to four digits; the figure carries it in its metadata."""
    drawn = [
        (of_each, gbits, name, [f"{by_world[world].total:.4g}" for world in RANKS[:2]])
        for of_each in (1, OF_EACH)
        for gbits in GBITS
        for name, by_world in best(times, of_each, gbits).items()
    ]
    return hashlib.sha256(repr(drawn).encode()).hexdigest()


def draw(times: Mapping[Row, Mapping[int, Time]], out: Path) -> None:
    """One chart for each link and topology: every family under its best reduction."""
    with drawing(out, 13, 8, note=digest(times)) as figure:
        axes = figure.subplots(2, 3, sharex=True, sharey=True)
        for row, of_each in enumerate((1, OF_EACH)):
            for column, gbits in enumerate(GBITS):
                axis = axes[row][column]
                lines = {k: v for k, v in best(times, of_each, gbits).items() if k not in ("none", "float32")}
                for number, (name, by_world) in enumerate(lines.items()):
                    seconds = [1e3 * time.total for time in by_world.values()]
                    axis.plot(list(by_world), seconds, **look(number), label=name)
                axis.set_xscale("log")
                axis.set_yscale("log")
                axis.set_xticks([8, 64, 512, 4096], ["8", "64", "512", "4096"])
                axis.minorticks_off()
                axis.set_title(f"{gbits} Gbit/s, {of_each} rank{'s' * (of_each > 1)} a host")
                axis.set_xlabel("ranks")
                axis.set_ylabel("ms per exchange, predicted")
        axes[0][2].legend(loc="upper left", bbox_to_anchor=(1, 1))


def read(path: Path) -> Constants:
    """The constants of an earlier run."""
    stored = json.loads(path.read_text(encoding="utf-8"))["constants"]
    pairs = {name: {k: tuple(v) for k, v in stored[name].items()} for name in ("rates", "work")}
    return Constants(**{**stored, **pairs})


def say(given: Constants) -> None:
    """Print the constants."""
    for name in ("alpha", "local_alpha", "message", "round", "bucket"):
        print(f"{name}: {1e6 * getattr(given, name):,.1f} us")
    rates = [[name, *(f"{rate / 1e9:.2f}" for rate in pair)] for name, pair in given.rates.items()]
    print("\n" + report.table(["GB/s of float32, one core", "encode", "decode"], rows=rates))
    work = [[name, f"{1e3 * once:.2f}", f"{1e6 * each:.1f}"] for name, (once, each) in given.work.items()]
    print("\n" + report.table(["work for a full bucket", "ms", "us more per payload"], work))


def start_up() -> dict[str, Any]:
    """Measure, and print."""
    import scaling_gloo
    import scaling_start

    found: dict[str, Any] = {}
    phases = {size: scaling_start.start(size) for size in (8, 32, 256)}
    print("\nCalls at the store, simulated ranks: measured\n")
    rows = [
        [f"{size}: {p.name}", p.first, f"{p.others:.1f}", p.total, p.polls, p.bytes, f"{p.seconds:.2f}"]
        for size, (those, _) in phases.items()
        for p in those
    ]
    print(report.table(["ranks: phase", "rank 0", "others", "all", "polls", "bytes", "s, all ranks"], rows))
    for size, (_, keys) in phases.items():
        print(f"keys of {size} ranks: {dict(keys)}")
    meshes = [scaling_gloo.mesh(size) for size in (4, 8, 16, 32)]
    print("\nOne Gloo group: counted\n")
    print(
        report.table(
            ["ranks", "keys", "bytes of a value", "calls of a rank", "bytes of a rank", "descriptors"],
            [
                [m.ranks, m.keys, m.value_bytes, f"{m.calls:.0f}", f"{m.bytes:.0f}", f"{m.descriptors:.0f}"]
                for m in meshes
            ],
        )
    )
    call = scaling_gloo.call_seconds()
    print(f"\na call at a TCPStore: {1e6 * call:.0f} us of a core, client and server")
    changes = [scaling_start.change(size) for size in (8, 64, 256)]
    print("\nWork of one rank, ms: measured\n")
    heads = ["ranks", "make a pipeline", "a step", "a step that changes the plan", "more bytes sent"]
    cells = [[c.ranks, f"{c.make:.1f}", f"{c.step:.1f}", f"{c.change:.1f}", f"{c.bytes:,}"] for c in changes]
    print(report.table(heads, cells))
    sizes = (8, 256, 1024, 4096)
    built = [
        scaling_start.build(r, n)
        for r in ("sra", "ring", "tree", "hierarchical", "all_to_all")
        for n in sizes
        if n <= 256 or r != "all_to_all"
    ]
    print("\nOne rank's side of a full bucket, 4 bits: measured\n")
    print(
        report.table(
            ["reduction, ranks", "ms to make", "MB"],
            [[f"{b.reduction}, {b.ranks}", f"{1e3 * b.seconds:.0f}", f"{b.bytes / 1e6:.2f}"] for b in built],
        )
    )
    found["phases"] = {size: [dataclasses.asdict(p) for p in those] for size, (those, _) in phases.items()}
    found["keys"] = {size: keys for size, (_, keys) in phases.items()}
    found["gloo"] = [dataclasses.asdict(m) for m in meshes]
    found["call_seconds"] = call
    found["changes"] = [dataclasses.asdict(c) for c in changes]
    found["built"] = [dataclasses.asdict(b) for b in built]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=("exchange", "start"), help="only this part")
    parser.add_argument("--alpha", type=float, default=50e-6, help="seconds of a round between hosts")
    parser.add_argument("--local-alpha", type=float, default=5e-6, help="seconds of a round inside a host")
    parser.add_argument("--local-rate", type=float, default=5e9, help="bytes a second inside a host")
    parser.add_argument("--given", type=Path, help="JSON of an earlier run, with its constants")
    parser.add_argument("--png", type=Path, help="draw the times of the smaller model there")
    parser.add_argument("--json", type=Path, help="write the figures there")
    arguments = parser.parse_args()
    machine = report.machine()
    print(report.describe(machine), file=sys.stderr)
    figures: dict[str, Any] = {"machine": machine}
    if arguments.part != "start":
        print(f"formulas equal what {verify()} ranks sent, byte for byte", file=sys.stderr)
        network = arguments.alpha, arguments.local_alpha, arguments.local_rate
        given = measure(*network) if arguments.given is None else read(arguments.given)
        say(given)
        figures["constants"] = dataclasses.asdict(given)
        for model in MODELS:
            times = predict(model, given)
            for of_each in (1, OF_EACH):
                print(
                    f"\n{model} parameters, {of_each} rank{'s' * (of_each > 1)} a host, best reduction: PREDICTED\n"
                )
                print(best_table(times, of_each))
            print(f"\n{model} parameters: slower than uncompressed from so many ranks on: PREDICTED\n")
            print(limit_table(times))
            print("\nThe same if headers, rounds and buckets took no work: PREDICTED\n")
            print(limit_table(predict(model, dataclasses.replace(given, message=0.0, round=0.0, bucket=0.0))))
            figures[f"predicted, {model}"] = [
                {"family": f, "reduction": r, "ranks a host": e, "Gbit/s": g, "ranks": n}
                | dataclasses.asdict(time)
                for (f, r, e, g), by_world in times.items()
                for n, time in by_world.items()
            ]
            if arguments.png and model == next(iter(MODELS)):
                draw(times, arguments.png)
    if arguments.part != "exchange":
        figures |= start_up()
    report.write_json(arguments.json, figures)


if __name__ == "__main__":
    main()
