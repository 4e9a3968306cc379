"""Time of a training step of a 10.6 M-parameter word LSTM, on hosts made of network namespaces. Needs root.

    python benchmarks/step.py                        # links of 1 Gbit/s
    python benchmarks/step.py --link 100mbit --blocks 3
    python benchmarks/step.py --link unshaped
    python benchmarks/step.py --rows ddp,4bit --compression quantize:bits=3 --json step.json

One rank per host, one thread per rank, one core per rank. All rows live in the same processes, each with its own copy
of the same model, and alternate in blocks of steps: A B C A B C ... A figure is the median over all steps of a row but
the first of each block, for the slowest rank.

Columns
    x DDP      median step over that of DistributedDataParallel in the same run
    roofline   max over buckets k of (t_k + wire time of buckets k ... last) + time after backward. t_k, when the last
               gradient of bucket k is there, and the time after backward come from the row without exchange; the wire
               time from the row's own bytes at the link's measured rate
    distance   median step - roofline
    exposed    median step - median step without exchange: communication and its work that nothing hides
    waited     what gradcomp counts itself: time the training thread waited for the exchange
    wire       bytes a rank sends in a step, by gradcomp's counter; for DDP 2 d (N-1)/N of its buckets
    interface  the same by the interface's counters, without headers, whose size in each packet a bare transfer
               measures before, and without what TCP sent again. Acknowledgements are packets without anything else.
               Both are the median over blocks: gradcomp's one probe of the wire, after 50 steps, is no step's

A speed counts only if three conditions hold, each a column; a row that breaks one is marked.
    bits       parameters equal, bit for bit, on all ranks and to those of a second run with overlap=False
    bytes      wire and interface agree within 2%
    loss       mean of the last quarter of the steps within 1% of DDP's on the same batches
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import hashlib
import itertools
import json
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hosts
import models
import report

BATCH, LENGTH = 4, 14  # a step without exchange takes about 38 ms on one thread
LEARNING_RATE, MOMENTUM = 0.2, 0.9
COUNTERS = ("exposed_seconds", "codec_seconds", "wire_seconds")
BYTES_TOLERANCE = 0.02
LOSS_TOLERANCE = 0.01
BAR_4_BITS, BAR_IDENTITY = 0.22, 1.05
IDEAL, DDP, IDENTITY = "ideal", "ddp", "identity"


@dataclass(frozen=True)
class Row:
    """A way to exchange. ``kind``: none, ddp or gradcomp; ``how``: the hook or the compression."""

    key: str
    title: str
    kind: str
    how: str = ""


ROWS = (
    Row(IDEAL, "no exchange", "none"),
    Row(DDP, "DDP", "ddp"),
    Row("ddp-fp16", "DDP, fp16 hook", "ddp", "fp16"),
    Row(IDENTITY, "gradcomp none", "gradcomp", "none"),
    Row("bf16", "gradcomp bf16", "gradcomp", "bf16"),
    Row("8bit", "gradcomp 8 bits", "gradcomp", "quantize:bits=8"),
    Row("4bit", "gradcomp 4 bits, stochastic", "gradcomp", "quantize:bits=4"),
    Row(
        "4bit-feedback", "gradcomp 4 bits, nearest, feedback", "gradcomp", "quantize:bits=4,rounding=nearest"
    ),
)


@dataclass(frozen=True)
class Task:
    """What every rank is told to do."""

    rows: tuple[Row, ...]
    blocks: int
    steps: int
    warmup: int
    seed: int
    data: str | None
    settings: dict[str, Any]
    measure_link: bool
    traces: str | None

    @property
    def total_steps(self) -> int:
        """Steps of one row."""
        return self.blocks * (self.steps + self.warmup)

    @staticmethod
    def from_json(text: str) -> Task:
        data = json.loads(text)
        return Task(**{**data, "rows": tuple(Row(**row) for row in data["rows"])})


# ------------------------------------------------------------------------------------------------- one rank


@dataclass
class Trainer:
    """One row's model and optimizer, and what was measured of them."""

    row: Row
    model: Any
    module: Any
    optimizer: Any
    batches: Iterator[tuple[Any, Any]]
    block_seconds: list[list[float]] = field(default_factory=list)
    backward_seconds: list[float] = field(default_factory=list)
    after_seconds: list[float] = field(default_factory=list)
    counted_seconds: dict[str, list[float]] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    ready_seconds: dict[str, list[float]] = field(default_factory=dict)
    block_traffic: list[hosts.Traffic] = field(default_factory=list)
    block_wire_bytes: list[int] = field(default_factory=list)
    began: float = 0.0

    def step(self) -> tuple[float, float]:
        """One step; (seconds until backward returned, seconds after it)."""
        tokens, targets = next(self.batches)
        self.began = time.perf_counter()
        self.optimizer.zero_grad()
        loss = self.module(tokens, targets)
        loss.backward()
        returned = time.perf_counter()
        self.optimizer.step()
        ended = time.perf_counter()
        self.losses.append(loss.item())
        return returned - self.began, ended - returned

    def wire_bytes(self) -> int:
        """What gradcomp has counted so far; 0 for other rows."""
        return self.optimizer.statistics().wire_bytes if self.row.kind == "gradcomp" else 0

    def counters(self) -> list[float]:
        """What gradcomp has counted so far, in the order of COUNTERS; nothing for other rows."""
        if self.row.kind != "gradcomp":
            return []
        counted = self.optimizer.statistics()
        return [getattr(counted, name) for name in COUNTERS]

    def watch_readiness(self) -> None:
        """Note when each gradient is there, counted from the beginning of the step."""
        for name, parameter in self.model.named_parameters():
            times = self.ready_seconds.setdefault(name, [])
            parameter.register_post_accumulate_grad_hook(
                lambda _, times=times: times.append(time.perf_counter() - self.began)
            )

    def digest(self) -> str:
        """Of all parameters' bytes."""
        sha = hashlib.sha256()
        for parameter in self.model.parameters():
            sha.update(parameter.detach().contiguous().numpy().tobytes())
        return sha.hexdigest()


def make_trainer(row: Row, initial: Any, text: models.Text, rank: int, seed: int) -> Trainer:
    import torch

    model = copy.deepcopy(initial)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    module: Any = model
    if row.kind == "ddp":
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        module = torch.nn.parallel.DistributedDataParallel(model)
        if row.how == "fp16":
            module.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif row.kind == "gradcomp":
        import gradcomp.torch as gc

        gc.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = gc.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), compression=row.how
        )
    trainer = Trainer(row, model, module, optimizer, text.batches(rank, BATCH, LENGTH, seed))
    if row.kind == "none":
        trainer.watch_readiness()
    return trainer


def buckets_of(trainer: Trainer, world: int) -> list[tuple[int, list[str]]]:
    """The row's buckets in the order in which they travel: bytes one rank sends, and whose gradients are in it."""
    if trainer.row.kind == "ddp":
        parameters = list(trainer.model.named_parameters())
        # The order after DDP rebuilt its buckets in the first step.
        composition = trainer.module._get_ddp_logging_data()["rebuilt_per_bucket_param_indices"]
        item_bytes = 2 if trainer.row.how == "fp16" else 4
        found = []
        for bucket in composition.split(","):
            members = [parameters[int(i)] for i in bucket.split()]
            nbytes = sum(p.numel() for _, p in members) * item_bytes
            found.append((2 * nbytes * (world - 1) // world, [name for name, _ in members]))
        return found
    if trainer.row.kind == "gradcomp":
        return [(2 * nbytes * (world - 1) // world, names) for names, nbytes in trainer.optimizer.buckets()]
    return []


def run_rank(task: Task, out: Path) -> None:
    """Everything one rank does; writes what it found to a file."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    found: dict[str, Any] = {"link": measure_link(rank, world)} if task.measure_link else {}
    use_gradcomp = any(row.kind == "gradcomp" for row in task.rows)
    if use_gradcomp:
        import gradcomp.torch as gc

        gc.init(seed=task.seed, **task.settings)
    torch.manual_seed(task.seed)
    initial = models.WordLSTM()
    text = models.load_text(Path(task.data) if task.data else None)
    trainers = [make_trainer(row, initial, text, rank, task.seed) for row in task.rows]
    for _ in range(task.blocks):
        for trainer in trainers:
            run_block(trainer, task, dist.barrier)
    packet_bytes = found["link"]["packet_bytes"] if task.measure_link else 0.0
    found["text"] = text.source
    found["parameters"] = sum(p.numel() for p in initial.parameters())
    found["rows"] = {trainer.row.key: findings(trainer, task, world, packet_bytes) for trainer in trainers}
    if task.traces:
        for trainer in trainers:
            if trainer.row.kind == "gradcomp":
                trainer.optimizer.write_trace(Path(task.traces) / f"{trainer.row.key}-{rank}.trace.json")
    out.with_name(f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    if use_gradcomp:
        gc.shutdown()
    if dist.is_initialized():
        dist.destroy_process_group()


def run_block(trainer: Trainer, task: Task, barrier: Callable[[], None]) -> None:
    barrier()
    wire, sent = trainer.wire_bytes(), hosts.Traffic.now()
    times, counters = [], [trainer.counters()]
    for _ in range(task.warmup + task.steps):
        times.append(trainer.step())
        counters.append(trainer.counters())
    barrier()  # everything sent before it has passed the interface now
    trainer.block_traffic.append(hosts.Traffic.now() - sent)
    trainer.block_wire_bytes.append(trainer.wire_bytes() - wire)
    kept = times[task.warmup :]
    trainer.block_seconds.append([a + b for a, b in kept])
    trainer.backward_seconds += [a for a, _ in kept]
    trainer.after_seconds += [b for _, b in kept]
    for then, now in itertools.pairwise(counters[task.warmup :]):
        for name, a, b in zip(COUNTERS, then, now, strict=False):
            trainer.counted_seconds.setdefault(name, []).append(b - a)


def findings(trainer: Trainer, task: Task, world: int, packet_bytes: float) -> dict[str, Any]:
    block_steps = task.warmup + task.steps
    found: dict[str, Any] = {
        "block_seconds": trainer.block_seconds,
        "backward_seconds": statistics.median(trainer.backward_seconds),
        "after_seconds": statistics.median(trainer.after_seconds),
        "losses": trainer.losses,
        "interface_bytes": median_block(
            [t.payload_bytes(packet_bytes) for t in trainer.block_traffic], block_steps
        ),
        "interface_total_bytes": median_block([t.sent_bytes for t in trainer.block_traffic], block_steps),
        "resent_bytes": sum(t.resent_bytes for t in trainer.block_traffic) / task.total_steps,
        "buckets": buckets_of(trainer, world),
        "ready_seconds": {name: statistics.median(t) for name, t in trainer.ready_seconds.items()},
        "digest": trainer.digest(),
    }
    if trainer.row.kind == "gradcomp":
        found["wire_bytes"] = median_block(trainer.block_wire_bytes, block_steps)
        found |= {name: statistics.median(times) for name, times in trainer.counted_seconds.items()}
    return found


def median_block(values: Sequence[float], steps: int) -> float:
    return statistics.median(values) / steps


def measure_link(rank: int, world: int, nbytes: int = 16 << 20, repeats: int = 3) -> dict[str, float]:
    """A bare transfer, every rank to the next and all at once: bytes per second, header bytes per packet."""
    own = hosts.addresses()
    with socket.create_server((own[rank], hosts.PORT + 1)) as server:
        import torch.distributed as dist

        dist.barrier()
        outgoing = socket.create_connection((own[(rank + 1) % world], hosts.PORT + 1))
        incoming, _ = server.accept()
    payload, buffer = bytes(nbytes), bytearray(1 << 20)
    rates, headers, overheads = [], [], []
    with outgoing, incoming:
        for _ in range(repeats):
            dist.barrier()
            before, began = hosts.Traffic.now(), time.perf_counter()
            sender = threading.Thread(target=outgoing.sendall, args=(payload,))
            sender.start()
            left = nbytes
            while left:
                left -= incoming.recv_into(buffer, min(left, len(buffer)))
            rates.append(nbytes / (time.perf_counter() - began))
            sender.join()
            dist.barrier()
            traffic = hosts.Traffic.now() - before
            headers.append((traffic.payload_bytes(0) - nbytes) / traffic.sent_packets)
            overheads.append(traffic.payload_bytes(0) / nbytes - 1)
    return {
        "bytes_per_second": statistics.median(rates),
        "packet_bytes": statistics.median(headers),
        "overhead": statistics.median(overheads),
    }


# ------------------------------------------------------------------------------------------------- the whole


def launch(task: Task, link: str, ranks: int) -> list[dict[str, Any]]:
    """Run a task on hosts of its own; what each rank found."""
    with tempfile.TemporaryDirectory(prefix="gradcomp-step-") as directory:
        out = Path(directory) / "out"
        command = [
            sys.executable,
            __file__,
            "--task",
            json.dumps(dataclasses.asdict(task)),
            "--out",
            str(out),
        ]
        with hosts.Hosts(ranks, link) as made:
            codes = made.run(command, pin=True)
        if any(codes):
            raise SystemExit(f"a rank failed; exit codes {codes}")
        return [json.loads((Path(directory) / f"{rank}.json").read_text()) for rank in range(ranks)]


def evaluate(row: Row, timed: list[dict[str, Any]], verified: list[dict[str, Any]]) -> dict[str, Any]:
    """One row's figures, over all ranks: seconds and bytes."""
    own = [found["rows"][row.key] for found in timed]
    result: dict[str, Any] = {"title": row.title, "kind": row.kind, "how": row.how}
    result["step_seconds"] = max(median_step(rank) for rank in own)
    quartiles = [statistics.quantiles(all_seconds(rank), n=4) for rank in own]
    result["quartiles_seconds"] = [max(q[0] for q in quartiles), max(q[2] for q in quartiles)]
    result["block_medians_seconds"] = [
        max(statistics.median(block) for block in blocks)
        for blocks in zip(*(rank["block_seconds"] for rank in own), strict=True)
    ]
    rate = min(found["link"]["bytes_per_second"] for found in timed)
    result["resent_bytes"] = statistics.mean(rank["resent_bytes"] for rank in own)
    for name in ("interface_bytes", "interface_total_bytes"):
        result[name] = statistics.mean(rank[name] for rank in own)
    if row.kind == "none":
        return result

    result["wire_bytes"] = statistics.mean(
        rank.get("wire_bytes", sum(nbytes for nbytes, _ in rank["buckets"])) for rank in own
    )
    result["buckets"] = len(own[0]["buckets"])
    quarter = len(own[0]["losses"]) * 3 // 4
    result["loss"] = statistics.mean(statistics.mean(rank["losses"][quarter:]) for rank in own)
    ideal = [found["rows"].get(IDEAL) for found in timed]
    if all(ideal):
        result["roofline_seconds"] = max(
            roofline(rank["buckets"], free["ready_seconds"], free["after_seconds"], rate)
            for rank, free in zip(own, ideal, strict=True)
        )
        result["distance_seconds"] = result["step_seconds"] - result["roofline_seconds"]
        result["exposed_seconds"] = result["step_seconds"] - max(median_step(free) for free in ideal)
    if row.kind == "gradcomp":
        result["waited_seconds"] = max(rank["exposed_seconds"] for rank in own)
        result["codec_seconds"] = max(rank["codec_seconds"] for rank in own)
        result["in_flight_seconds"] = max(rank["wire_seconds"] for rank in own)
        result["bytes_difference"] = result["interface_bytes"] / result["wire_bytes"] - 1
        digests = {rank["digest"] for rank in own} | {found["rows"][row.key]["digest"] for found in verified}
        result["bits_equal"] = len(digests) == 1 if verified else None
    return result


def median_step(found: dict[str, Any]) -> float:
    return statistics.median(all_seconds(found))


def all_seconds(found: dict[str, Any]) -> list[float]:
    return list(itertools.chain.from_iterable(found["block_seconds"]))


def roofline(
    buckets: list[tuple[int, list[str]]], ready: dict[str, float], after: float, bytes_per_second: float
) -> float:
    """max over k of (t_k + wire time of buckets k ... last) + time after backward, in seconds."""
    ends = max(ready.values())
    rest = 0
    for nbytes, names in reversed(buckets):
        rest += nbytes
        ends = max(ends, max(ready[name] for name in names) + rest / bytes_per_second)
    return ends + after


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

    headers = ["row", "step ms", "x DDP", "roofline ms", "distance ms", "exposed ms", "waited ms", "wire MB",
               "interface MB", "bytes", "bits", "loss", "valid"]  # fmt: skip
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
                megabytes(row.get("wire_bytes")),
                megabytes(row["interface_bytes"]),
                percent(row.get("bytes_difference")),
                None if bits is None else "equal" if bits else "DIFFER",
                percent(row.get("loss_difference")),
                None if invalid is None else f"NO: {', '.join(invalid)}" if invalid else "yes",
            ]
        )
    return report.table(headers, cells)


def bars(rows: dict[str, dict[str, Any]], link: str) -> list[str]:
    """What was asked for on this link, and whether it was reached."""
    if link == "1gbit":
        asked = [(key, BAR_4_BITS) for key in ("4bit", "4bit-feedback")]
    elif link == "unshaped":
        asked = [(IDENTITY, BAR_IDENTITY)]
    else:
        asked = []
    lines = []
    for key, bar in asked:
        row = rows.get(key)
        if row is None or "to_ddp" not in row:
            continue
        verdict = "does not count" if row["invalid"] else "met" if row["to_ddp"] <= bar else "NOT met"
        lines.append(
            f"bar: {row['title']}: {row['to_ddp']:.3f} x DDP's median step, at most {bar}: {verdict}"
        )
    return lines


def measure(options: argparse.Namespace) -> None:
    rows = choose(options.rows, options.compression)
    settings = dict(parse_setting(text) for text in options.set)
    task = Task(rows, options.blocks, options.steps, options.warmup, options.seed, options.data and str(options.data),
                settings, True, options.traces and str(options.traces))  # fmt: skip
    if options.traces:
        options.traces.mkdir(parents=True, exist_ok=True)
    found_machine = report.machine()
    print(report.describe(found_machine))
    timed = launch(task, options.link, options.ranks)
    link = timed[0]["link"]
    print(
        f"{options.ranks} hosts, {options.link} links: {link['bytes_per_second'] * 8e-6:.0f} Mbit/s measured, headers "
        f"of {link['packet_bytes']:.1f} bytes per packet add {link['overhead'] * 100:.2f}% to a bare transfer\n"
        f"{timed[0]['parameters']:,} parameters, batch {BATCH} x {LENGTH}, {timed[0]['text']}; "
        f"{task.blocks} blocks of {task.steps} steps after {task.warmup}"
    )
    verified: list[dict[str, Any]] = []
    compressed = tuple(row for row in rows if row.kind == "gradcomp")
    if compressed and not options.skip_verification:
        # No byte of the mean depends on the link, so the second run need not wait for a slow one.
        again = dataclasses.replace(
            task, rows=compressed, settings={**settings, "overlap": False}, measure_link=False, traces=None
        )
        verified = launch(again, "unshaped", options.ranks)
    results = {row.key: evaluate(row, timed, verified) for row in rows}
    judge(results)
    print(show(results))
    print("\n".join(bars(results, options.link)))
    report.write_json(
        options.json,
        {
            "benchmark": "step",
            "machine": found_machine,
            "link": {"name": options.link, **link},
            "ranks": options.ranks,
            "task": {
                k: v for k, v in dataclasses.asdict(task).items() if k not in ("rows", "data", "traces")
            },
            "text": timed[0]["text"],
            "batch": [BATCH, LENGTH],
            "rows": results,
        },
    )


def choose(keys: str | None, compressions: list[str]) -> tuple[Row, ...]:
    known = {row.key: row for row in ROWS}
    if keys is None:
        chosen = list(ROWS)
    else:
        wanted = keys.split(",")
        if unknown := [key for key in wanted if key not in known]:
            raise SystemExit(f"--rows: unknown {', '.join(unknown)}; there are {', '.join(known)}")
        chosen = [known[key] for key in dict.fromkeys([IDEAL, DDP, *wanted])]
    return (*chosen, *(Row(text, f"gradcomp {text}", "gradcomp", text) for text in compressions))


def parse_setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise SystemExit(f"--set: expected name=value, got {text!r}")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--link", choices=hosts.LINKS, default="1gbit", help="rate of the links (default: 1gbit)"
    )
    parser.add_argument("--ranks", type=positive, default=2, help="hosts, one rank each (default: 2)")
    parser.add_argument("--blocks", type=positive, default=10, help="blocks per row (default: 10)")
    parser.add_argument("--steps", type=positive, default=8, help="timed steps per block (default: 8)")
    parser.add_argument("--warmup", type=positive, default=2, help="untimed steps before them (default: 2)")
    parser.add_argument(
        "--rows", help=f"comma-separated: {', '.join(row.key for row in ROWS)} (default: all)"
    )
    parser.add_argument("--compression", action="append", default=[], help="a further row, in string form")
    parser.add_argument("--set", action="append", default=[], help="a setting of gc.init, as name=value")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--data", type=Path, help="a text file (default: the text of Python's standard library)"
    )
    parser.add_argument(
        "--skip-verification", action="store_true", help="no second run; no row is valid then"
    )
    parser.add_argument("--traces", type=Path, help="directory for Chrome traces of gradcomp's rows")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--task", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.task:
        run_rank(Task.from_json(options.task), options.out)
        return 0
    if options.data is not None:
        options.data = options.data.resolve()
        if not options.data.is_file():
            parser.error(f"--data: there is no file {options.data}")
    hosts.exit_on_termination()
    try:
        measure(options)
    except hosts.HostsError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
