"""The reductions benchmark, seen by one rank: one gradient exchanged by every reduction in turn, timed and counted."""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hosts
import numpy as np
from step_rank import measure_link

#: Sizes of the ping-pong: alpha is the time of the first, beta comes from the difference of the others. A shaped link
#: lets the first 64 KiB of a message pass at once, which would make smaller messages too fast.
PING_BYTES = (1 << 10, 1 << 20, 1 << 22)

#: Small rounds under way together, see `gradcomp.exchange.reports.measure`.
ROUNDS_TOGETHER = 8

#: The row of the engine's own allreduce.
DENSE = "gloo float32"

#: The ranks' own choice of the slices, and slices that are never full.
DEFAULT, ONE_BUCKET = 0, 1 << 30


@dataclass(frozen=True)
class Row:
    """A reduction, and the elements of an exchange bucket: DEFAULT, ONE_BUCKET or a number."""

    reduction: str
    slice_elements: int = DEFAULT

    @property
    def name(self) -> str:
        """Return the name of the row in tables."""
        slices = {DEFAULT: "", ONE_BUCKET: ", one bucket"}
        return self.reduction + slices.get(self.slice_elements, f", {self.slice_elements / 2**20:g} Mi")


@dataclass(frozen=True)
class Task:
    """What every rank is told to do."""

    rows: tuple[Row, ...]
    elements: int
    bits: int
    blocks: int
    dense: bool
    transport: str = "torch"

    @staticmethod
    def from_json(text: str) -> Task:
        data = json.loads(text)
        return Task(**{**data, "rows": tuple(Row(**row) for row in data["rows"])})


def run_rank(task: Task, out: Path) -> None:
    """Everything one rank does; writes what it found to a file."""
    import torch
    import torch.distributed as dist

    import gradcomp.torch as gc
    from gradcomp.job import runtime

    torch.set_num_threads(1)
    gc.init(statistics_every_steps=0, reorder=False, transport=task.transport)
    state = runtime.current()
    rank, world = gc.rank(), gc.size()
    found: dict[str, Any] = {}
    if gc.local_size() == 1:
        found = {"link": measure_link(rank, world), "ping": ping(state)}
    gradient = np.random.default_rng(rank).standard_normal(task.elements).astype(np.float32)
    exchanges = {row.name: make_exchange(state, task, row, gradient) for row in task.rows}
    for turn in range(world):  # alone on its core
        if turn == rank:
            found["codec"] = next(iter(exchanges.values())).codec_rates()
        dist.barrier()
    found["overhead"] = round_seconds(state)
    found["layouts"] = {name: exchange.layout() for name, exchange in exchanges.items()}
    tensor = torch.from_numpy(gradient.copy())
    packet_bytes = found["link"]["packet_bytes"] if "link" in found else 0.0
    rows: dict[str, dict[str, list[float]]] = {}
    for _ in range(task.blocks):
        for name, exchange in exchanges.items():
            record(rows, name, exchange.step, dist.barrier, packet_bytes)
        if task.dense:
            record(rows, DENSE, lambda: dist.all_reduce(tensor), dist.barrier, packet_bytes)
    found["rows"] = rows
    found["sent"] = {name: exchange.sent_per_step() for name, exchange in exchanges.items()}
    found["digests"] = {name: exchange.digest() for name, exchange in exchanges.items()}
    out.with_name(f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    gc.shutdown()


def record(rows: dict[str, Any], name: str, step: Any, barrier: Any, packet_bytes: float) -> None:
    """One exchange: seconds, and bytes through this host's interface without headers and repeats."""
    barrier()
    before = hosts.Traffic.now()
    barrier()
    between = hosts.Traffic.now()
    cpu_began = time.process_time()
    began = time.perf_counter()
    step()
    seconds = time.perf_counter() - began
    cpu = time.process_time() - cpu_began
    barrier()  # everything sent before it has passed the interface now
    traffic = hosts.Traffic.now() - between
    row = rows.setdefault(name, {"seconds": [], "bytes": [], "cpu": []})
    row["seconds"].append(seconds)
    row["cpu"].append(cpu)
    # A barrier's own bytes are those of the one just before.
    row["bytes"].append(traffic.payload_bytes(packet_bytes) - (between - before).payload_bytes(packet_bytes))


def round_seconds(state: Any) -> float:
    """Return the time that a further small round under way costs, with all ranks at once."""
    from gradcomp.exchange.reports import shift
    from gradcomp.job.network import make_transport

    transport = make_transport(state, state.everyone)
    alone, together = (shift(transport, PING_BYTES[0], rounds=rounds) for rounds in (1, ROUNDS_TOGETHER))
    transport.close()
    return max(together - alone, 0.0) / (ROUNDS_TOGETHER - 1)


def ping(state: Any, repeats: int = 5) -> list[tuple[int, float]]:
    """Between the first two ranks: message sizes, and half the time there and back. Seconds."""
    import torch.distributed as dist

    from gradcomp.transport.base import wait

    found = []
    if state.rank < 2:
        transport = state.make_group((0, 1))
        for nbytes in PING_BYTES:
            buffer = np.zeros(nbytes, dtype=np.uint8)
            there = [[(1, buffer)], []] if state.rank == 0 else [[], [(0, buffer)]]
            back = [[], [(1, buffer)]] if state.rank == 0 else [[(0, buffer)], []]
            seconds = []
            for _ in range(repeats):
                began = time.perf_counter()
                wait(transport.exchange(*there))
                wait(transport.exchange(*back))
                seconds.append((time.perf_counter() - began) / 2)
            found.append((nbytes, statistics.median(seconds)))
        transport.close()
    dist.barrier()
    return found


class ExchangeOf:
    """A gradient under one reduction, exchanged as training would."""

    def __init__(self, exchanger: Any, gradient: Any) -> None:
        from gradcomp.exchange.arrivals import Submission

        self.exchanger = exchanger
        self.gradient = gradient
        self.mean = np.zeros_like(gradient)
        self.submission = Submission(0, gradient.ctypes.data, self.mean.ctypes.data)
        self.steps = 0

    def step(self) -> None:
        self.exchanger.open()
        self.exchanger.pipeline.arrivals.submit(self.submission)
        self.exchanger.flush()
        self.exchanger.wait()
        self.exchanger.commit()
        self.steps += 1

    def sent_per_step(self) -> float:
        return float(self.exchanger.pipeline.transport.bytes_sent / self.steps)

    def layout(self) -> dict[str, int]:
        """Return the number of exchange buckets, and the bytes of all payloads."""
        buckets = self.exchanger.pipeline.layout.buckets
        return {"buckets": len(buckets), "payload_bytes": sum(bucket.payload_bytes for bucket in buckets)}

    def digest(self) -> str:
        import hashlib

        return hashlib.sha256(self.mean.tobytes()).hexdigest()

    def codec_rates(self) -> dict[str, float]:
        """Elements per second of one encode and one decode of the first bucket."""
        from gradcomp.kernels import dispatch
        from gradcomp.kernels.devices import HOST

        group = self.exchanger.pipeline.layout.buckets[0].groups[0]
        table = group.table.copy()
        codec = group.compressor.codec_for(table)
        payload = np.zeros(int(codec.wire_bytes(table).sum()), dtype=np.uint8)
        flags = np.zeros(len(table), dtype=np.uint8)
        table["gradient"], table["output"] = self.gradient.ctypes.data, self.mean.ctypes.data
        table["payload"] = np.concatenate(([0], np.cumsum(codec.wire_bytes(table))))[:-1]
        from gradcomp.kernels.codec import Draw

        encodes, decodes = [], []
        for step in range(5):
            began = time.perf_counter()
            codec.encode(HOST, table, payload, flags, Draw(0, step, 0))
            middle = time.perf_counter()
            codec.decode(HOST, table, payload, flags)
            encodes.append(middle - began)
            decodes.append(time.perf_counter() - middle)
        return {
            "body": dispatch.backend(),
            "encode": group.elements / statistics.median(encodes),
            "decode": group.elements / statistics.median(decodes),
        }


def make_exchange(state: Any, task: Task, row: Row, gradient: Any) -> ExchangeOf:
    from gradcomp import LayerSpec, Policy, Quantize
    from gradcomp.exchange.exchanger import Exchanger
    from gradcomp.exchange.settings import Settings
    from gradcomp.job.network import make_transport

    layers = [LayerSpec("gradient", (2, task.elements // 2))]
    plan = Policy(Quantize(bits=task.bits)).plan(layers)
    everyone = state.everyone
    exchanger = Exchanger(
        state.engine,
        layers,
        plan,
        make_transport(state, everyone),
        state.watchdog,
        dataclasses.replace(state.config, reduction=row.reduction, slice_elements=row.slice_elements),
        lambda layer: 0,
        Settings(name=state.name(everyone), topology=state.topology),
    )
    state.exchangers.append(exchanger)
    return ExchangeOf(exchanger, gradient)
