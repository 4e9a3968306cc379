"""Time of a training step under other libraries, beside gradcomp's form of the same method. Needs root.

    python benchmarks/peers.py --grace PATH --powersgd PATH          # links of 1 Gbit/s
    python benchmarks/peers.py --link 10gbit --blocks 6 --json peers.json

The model, the hosts and the processes are those of the step benchmark (step.py): one rank per host, one thread and one
core per rank, all rows from one initial model over the same batches, alternating in blocks of steps.

PATH is a copy of the library's repository: GRACE's has the package grace_dl.dist, epfml's the package powersgd. Rows
of a library that is not given are listed as such. So are Horovod's where it is not installed
(scripts/install_horovod.sh). Horovod's rows have a launch of their own, with DDP beside them.

A row that fails says how. The launch then begins anew without it, so a figure never comes from a launch in which a row
has failed.

Columns
    step ms    median over all steps but the first of each block, of the slowest rank
    x DDP      median step over that of DistributedDataParallel in the same launch
    exposed    median step - median step without exchange in the same launch
    MB         bytes that a rank sends in a step, by the interface's counters, without headers (see step.py)
    loss       mean of the last quarter of the steps, over ranks
    ranks      whether all ranks ended with equal parameters, bit for bit
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hosts
import report
from options import positive
from peers_libraries import host_name
from peers_rank import FAILURE, PeersTask, run_rank
from peers_rows import HOROVOD, PATHS, ROWS, PeerRow, is_reference, split, wrong_path
from step_rank import BATCH, LENGTH
from step_results import median_step

Found = list[dict[str, Any]]


@dataclass(frozen=True)
class Failure:
    """How a launch failed: the row that it was at, the type of the error, and its first line."""

    row: str
    type: str
    message: str

    def __str__(self) -> str:
        return f"{self.type}: {self.message}"


def launch(task: PeersTask, link: str, count: int) -> Found | Failure:
    """Run the task's rows on hosts of their own; what each rank found."""
    with tempfile.TemporaryDirectory(prefix="gradcomp-peers-") as name, hosts.Hosts(count, link) as made:
        directory = Path(name)
        command = [sys.executable, __file__, "--task", json.dumps(dataclasses.asdict(task)),
                   "--out", str(directory / "out")]  # fmt: skip
        if any(row.kind == HOROVOD for row in task.rows):
            command = [*named(directory, made.addresses), *command]
        codes = made.run(command, pin=True)
        if any(codes):
            return read_failure(directory, codes)
        return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(count)]


def named(directory: Path, addresses: Sequence[str]) -> list[str]:
    """What runs a command on a host that has a name. Horovod's Gloo listens where the host's own name leads."""
    table = directory / "hosts"
    lines = ["127.0.0.1 localhost", *(f"{address} {host_name(i)}" for i, address in enumerate(addresses))]
    table.write_text("\n".join(lines) + "\n")
    script = f'mount --bind {table} /etc/hosts && hostname {host_name("$RANK")} && exec "$@"'
    return ["unshare", "--uts", "--mount", "sh", "-c", script, "sh"]


def read_failure(directory: Path, codes: Sequence[int]) -> Failure:
    """The failure that was written first. If none was, a rank died: of what, its exit code says."""
    written = [json.loads(path.read_text()) for path in directory.glob(f"*.{FAILURE}")]
    if written:
        first = min(written, key=lambda found: found["time"])
        return Failure(first["row"], first["type"], first["message"])
    failed = [rank for rank, code in enumerate(codes) if code]
    # The others were killed in the end.
    rank = next((rank for rank in failed if codes[rank] != -signal.SIGKILL), failed[0])
    code = codes[rank]
    row = directory / f"{rank}.row"
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return Failure(row.read_text() if row.exists() else "", "ProcessDied", f"rank {rank} died by {how}")


def measure_launch(
    rows: Sequence[PeerRow], run: Callable[[tuple[PeerRow, ...]], Found | Failure]
) -> tuple[Found | None, dict[str, Failure]]:
    """Run rows together; the launch begins anew without a row that fails. What was found, and failures by row."""
    left, failures = list(rows), {}
    while any(not is_reference(row) for row in left):
        found = run(tuple(left))
        if not isinstance(found, Failure):
            return found, failures
        print(f"row {found.row or '(none)'} failed: {found}", file=sys.stderr, flush=True)
        guilty = next((row for row in left if row.key == found.row), None)
        if guilty is None or is_reference(guilty):
            # Without its references no row of this launch can be compared.
            return None, failures | {row.key: found for row in left}
        failures[guilty.key] = found
        left.remove(guilty)
    return None, failures | {row.key: Failure(row.key, "NotRun", "no row to compare is left") for row in left}


def evaluate(rows: Sequence[PeerRow], found: Found) -> dict[str, dict[str, Any]]:
    """Figures of one launch by row: seconds, bytes and ratios to the launch's own references."""
    measured = [row for row in rows if row.key in found[0]["rows"]]
    own = {row.key: [rank["rows"][row.key] for rank in found] for row in measured}
    seconds = {key: max(map(median_step, ranks)) for key, ranks in own.items()}
    free = next((seconds[row.key] for row in measured if row.kind == "none"), None)
    ddp = next((seconds[row.key] for row in measured if is_reference(row) and row.kind == "ddp"), None)
    results: dict[str, dict[str, Any]] = {}
    for row in measured:
        ranks = own[row.key]
        quarter = len(ranks[0]["losses"]) * 3 // 4
        exchanges = row.kind != "none"
        results[row.key] = {
            "step_seconds": seconds[row.key],
            "to_ddp": None if ddp is None else seconds[row.key] / ddp,
            "exposed_seconds": seconds[row.key] - free if exchanges and free is not None else None,
            "interface_bytes": statistics.mean(rank["interface_bytes"] for rank in ranks),
            "loss": statistics.mean(statistics.mean(rank["losses"][quarter:]) for rank in ranks),
            "equal": len({rank["digest"] for rank in ranks}) == 1 if exchanges else None,
        }
    return results


def show(results: dict[str, dict[str, Any]]) -> str:
    """The table; a row without figures says why."""

    def figure(value: float | None, digits: int, factor: float = 1.0) -> str | None:
        return None if value is None else f"{value * factor:.{digits}f}"

    headers = ["row", "method", "step ms", "x DDP", "exposed ms", "MB", "loss", "ranks"]
    cells = []
    for row in ROWS:
        found = results[row.key]
        equal = found.get("equal")
        cells.append(
            [
                row.title,
                row.method,
                figure(found.get("step_seconds"), 1, 1e3),
                figure(found.get("to_ddp"), 3),
                figure(found.get("exposed_seconds"), 1, 1e3),
                figure(found.get("interface_bytes"), 3, 1e-6),
                figure(found.get("loss"), 3),
                found.get("why") if equal is None else "equal" if equal else "DIFFER",
            ]
        )
    failures = [
        f"{row.title} failed: {Failure(**results[row.key]['failure'])}"
        for row in ROWS
        if "failure" in results[row.key]
    ]
    return "\n".join([report.table(headers, cells), *failures])


def verdict(results: dict[str, dict[str, Any]]) -> int:
    """The exit status: 1 if a row of gradcomp's has no figures, or its ranks differ.

    Another library's failure is a finding: DDP's bf16 hook, for one, refuses to work on CPUs.
    """
    return int(not all(results[row.key].get("equal") for row in ROWS if row.kind == "gradcomp"))


def measure(options: argparse.Namespace) -> int:
    paths = {kind: str(path) for kind in PATHS if (path := getattr(options, kind)) is not None}
    launches, missing = split(paths)
    machine = report.machine()
    print(report.describe(machine), flush=True)
    results: dict[str, dict[str, Any]] = {key: {"why": reason} for key, reason in missing.items()}
    links: dict[str, Any] = {}
    initial: set[str] = set()
    task = PeersTask(
        (), options.blocks, options.steps, options.warmup, options.seed, None, {}, True, None,
        paths=paths, limit_seconds=options.limit,
    )  # fmt: skip
    for name, rows in launches.items():
        found, failures = measure_launch(
            rows, lambda rows: launch(dataclasses.replace(task, rows=rows), options.link, options.hosts)
        )
        results |= {
            key: {"why": f"failed: {failure.type}", "failure": dataclasses.asdict(failure)}
            for key, failure in failures.items()
        }
        if found is not None:
            results |= evaluate(rows, found)
            links[name] = found[0]["link"]
            initial |= {rank["initial"] for rank in found}
            print(
                f"{name}: {options.hosts} hosts, {options.link} links: "
                f"{links[name]['bytes_per_second'] * 8e-6:.0f} Mbit/s measured; {found[0]['parameters']:,} parameters, "
                f"batch {BATCH} x {LENGTH}, {found[0]['text']}; {task.blocks} blocks of {task.steps} steps after "
                f"{task.warmup}",
                flush=True,
            )
    if len(initial) > 1:
        raise SystemExit("launches and ranks began with different models: their rows cannot be compared")
    print(show(results))
    report.write_json(
        options.json,
        {
            "benchmark": "peers",
            "machine": machine,
            "link": {"name": options.link, **links},
            "hosts": options.hosts,
            "task": {name: getattr(task, name) for name in ("blocks", "steps", "warmup", "seed")},
            "horovod": None if HOROVOD not in launches else importlib.metadata.version("horovod"),
            "rows": {row.key: {"method": row.method, "title": row.title, **results[row.key]} for row in ROWS},
        },
    )
    return verdict(results)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--grace", type=Path, metavar="PATH", help="a copy of GRACE's repository")
    parser.add_argument("--powersgd", type=Path, metavar="PATH", help="a copy of epfml's powersgd repository")
    parser.add_argument(
        "--link", choices=hosts.LINKS, default="1gbit", help="rate of the links (default: 1gbit)"
    )
    parser.add_argument("--hosts", type=positive, default=2, help="hosts, one rank each (default: 2)")
    parser.add_argument("--blocks", type=positive, default=4, help="blocks per row (default: 4)")
    parser.add_argument("--steps", type=positive, default=6, help="timed steps per block (default: 6)")
    parser.add_argument("--warmup", type=positive, default=2, help="untimed steps before them (default: 2)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--limit", type=float, default=120.0, help="a row whose block takes more seconds fails (default: 120)"
    )
    parser.add_argument("--json", type=Path, help="write all figures here")
    options = hosts.parse(parser, lambda task, out: run_rank(PeersTask.from_json(task), out))
    for kind in PATHS:
        if (path := getattr(options, kind)) is not None:
            setattr(options, kind, path.resolve())
            if (wrong := wrong_path(kind, path)) is not None:
                parser.error(f"--{kind}: {wrong}")
    return hosts.exit_code(lambda: measure(options))


if __name__ == "__main__":
    sys.exit(main())
