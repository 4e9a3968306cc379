"""The step benchmark, seen by one rank: every row's model in one process, trained in alternation and timed."""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hosts
import models
from roofline import Rounds, WireRecord
from step_rows import FORWARD, Row

BATCH, LENGTH = 4, 14  # a step without exchange takes about 38 ms on one thread
MODELS = ("lstm", "resnet", "resnet18", "gpt", "deep")  # of 10.6, 0.27, 11.2, 7.3 and 6.1 M parameters
LEARNING_RATE = 0.2
HOOK_RANK = 4
COUNTERS = ("exposed_seconds", "codec_seconds", "wire_seconds")


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
    model: str = "lstm"

    @property
    def total_steps(self) -> int:
        """Steps of one row."""
        return self.blocks * (self.steps + self.warmup)

    @staticmethod
    def from_json(text: str) -> Task:
        data = json.loads(text)
        return Task(**{**data, "rows": tuple(Row(**row) for row in data["rows"])})


@dataclass
class Trainer:
    """One row's model and optimizer, and what was measured of them."""

    row: Row
    model: Any
    module: Any
    optimizer: Any
    batches: Iterator[tuple[Any, Any]]
    block_seconds: list[list[float]] = field(default_factory=list)
    forward_seconds: list[float] = field(default_factory=list)
    backward_seconds: list[float] = field(default_factory=list)
    after_seconds: list[float] = field(default_factory=list)
    counted_seconds: dict[str, list[float]] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    ready_seconds: dict[str, list[float]] = field(default_factory=dict)
    block_traffic: list[hosts.Traffic] = field(default_factory=list)
    block_wire_bytes: list[int] = field(default_factory=list)
    began: float = 0.0
    wire: WireRecord | None = None
    hook_state: Any = None

    def step(self) -> tuple[float, float]:
        """One step; (seconds until backward returned, seconds after it)."""
        tokens, targets = next(self.batches)
        self.began = time.perf_counter()
        self.optimizer.zero_grad()
        loss = self.module(tokens, targets)
        self.forward_seconds.append(time.perf_counter() - self.began)
        loss.backward()
        returned = time.perf_counter()
        self.optimizer.step()
        ended = time.perf_counter()
        self.losses.append(loss.item())
        return returned - self.began, ended - returned

    def wire_bytes(self) -> int:
        """What gradcomp has counted so far; 0 for other rows."""
        return self.exchange.statistics().wire_bytes if self.row.kind == "gradcomp" else 0

    @property
    def exchange(self) -> Any:
        """What tells how gradcomp exchanges: the wrapped optimizer, or the hook's state."""
        return self.optimizer if self.hook_state is None else self.hook_state

    def counters(self) -> list[float]:
        """What gradcomp has counted so far, in the order of COUNTERS; nothing for other rows."""
        if self.row.kind != "gradcomp":
            return []
        counted = self.exchange.statistics()
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


def make_trainer(row: Row, initial: Any, text: models.Text | models.Noise, rank: int, task: Task) -> Trainer:
    import torch

    model = copy.deepcopy(initial)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=row.momentum)
    module: Any = model
    hook_state: Any = None
    wire: WireRecord | None = None
    if row.kind == "ddp":
        module, hook_state = distribute(model, row.how)
    elif row.kind == "gradcomp":
        import gradcomp.torch as gc

        if row.by == "optimizer":
            gc.broadcast_parameters(model.state_dict(), root_rank=0)
            optimizer = gc.DistributedOptimizer(
                optimizer,
                named_parameters=model.named_parameters(),
                compression=row.how,
                layers=not row.how.startswith("flat["),
                finish=row.finish,
            )
        else:
            module, hook_state = compress_ddp(model, row)
        exchange = hook_state or optimizer
        wire = WireRecord(exchange._exchanger_or_none().pipeline, task.warmup + task.steps)
    batches = text.batches(rank, BATCH, LENGTH, task.seed)
    trainer = Trainer(row, model, module, optimizer, batches, wire=wire, hook_state=hook_state)
    if row.kind == "none":
        trainer.watch_readiness()
    return trainer


def distribute(model: Any, how: str) -> tuple[Any, Any]:
    """The model under DDP with the hook that ``how`` names (fp16, bf16, powersgd or none), and the hook's state."""
    import torch
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    if how != "powersgd":
        module = torch.nn.parallel.DistributedDataParallel(model)
        if how:
            module.register_comm_hook(None, getattr(default_hooks, f"{how}_compress_hook"))
        return module, None
    # With several buckets on Gloo this hook aborts or hangs: it issues collectives from callbacks, in no agreed order.
    module = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1 << 12)
    state = powerSGD_hook.PowerSGDState(
        None,
        matrix_approximation_rank=HOOK_RANK,
        start_powerSGD_iter=2,  # the least with feedback and warm start
        use_error_feedback=True,
        warm_start=True,
    )
    module.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return module, state


def compress_ddp(model: Any, row: Row) -> tuple[Any, Any]:
    """The model under DDP with gradcomp's hook, which the program or a group of gradcomp's backend registers."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import gradcomp.torch as gc
    from gradcomp.torch import backend

    if row.by == "backend":  # its compression is the setting's default
        module = DistributedDataParallel(model, process_group=dist.new_group(backend="gradcomp"))
        return module, backend.hook_state(module)
    module = DistributedDataParallel(model)
    state, hook = gc.ddp_comm_hook(module, row.how)
    module.register_comm_hook(state, hook)
    return module, state


def buckets_of(trainer: Trainer, world: int) -> tuple[list[list[str]], Rounds]:
    """The row's buckets in the order in which they travel: whose gradients are in them, and what this rank sends."""
    if trainer.row.kind == "gradcomp":
        assert trainer.wire is not None, "made with the optimizer"
        return [names for names, _ in trainer.exchange.buckets()], trainer.wire.rounds()
    if trainer.row.kind == "none":
        return [], []
    parameters = list(trainer.model.named_parameters())
    # The order after DDP rebuilt its buckets in the first step.
    composition = trainer.module._get_ddp_logging_data()["rebuilt_per_bucket_param_indices"]
    members = [[parameters[int(i)] for i in bucket.split()] for bucket in composition.split(",")]
    item_bytes = 2 if trainer.row.how in ("fp16", "bf16") else 4
    sizes = [item_bytes * sum(p.numel() for _, p in bucket) for bucket in members]
    if trainer.hook_state is not None:
        assert len(sizes) == 1, "the bucket is larger than the model"
        _, before, after = trainer.hook_state.compression_stats()  # elements, since compression began
        sizes = [round(sizes[0] * after / before)] if before else sizes
    names = [[name for name, _ in bucket] for bucket in members]
    return names, [[[2 * nbytes * (world - 1) // world] for nbytes in sizes]]


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
    initial, text = make_model(task)
    trainers = [make_trainer(row, initial, text, rank, task) for row in task.rows]
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
                trainer.exchange.write_trace(Path(task.traces) / f"{trainer.row.key}-{rank}.trace.json")
    out.with_name(f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    if use_gradcomp:
        gc.shutdown()
    if dist.is_initialized():
        dist.destroy_process_group()


def make_model(task: Task) -> tuple[Any, models.Text | models.Noise]:
    """The untrained model, and what it is trained on."""
    if task.model == "resnet":
        return models.Classifier(models.ResNet((3, 3, 3), 16)), models.Noise()
    if task.model == "resnet18":
        return models.Classifier(models.ResNet((2, 2, 2, 2), 64)), models.Noise(8)
    if task.model == "deep":
        return models.Classifier(models.Deep()), models.Noise(64)
    text = models.load_text(Path(task.data) if task.data else None)
    if task.model == "gpt":
        return models.WordGPT(models.VOCABULARY, 256, 6, 4, LENGTH), text
    return models.WordLSTM(), text


def run_block(trainer: Trainer, task: Task, barrier: Callable[[], None]) -> None:
    barrier()
    wire, sent = trainer.wire_bytes(), hosts.Traffic.now()
    times, counters = [], [trainer.counters()]
    for _ in range(task.warmup + task.steps):
        times.append(trainer.step())
        counters.append(trainer.counters())
    if trainer.row.finish == FORWARD:
        trainer.optimizer.synchronize()  # the next row begins on an idle link
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
    names, rounds = buckets_of(trainer, world)
    found: dict[str, Any] = {
        "block_seconds": trainer.block_seconds,
        "forward_seconds": statistics.median(trainer.forward_seconds),
        "backward_seconds": statistics.median(trainer.backward_seconds),
        "after_seconds": statistics.median(trainer.after_seconds),
        "losses": trainer.losses,
        "interface_bytes": median_block(
            [t.payload_bytes(packet_bytes) for t in trainer.block_traffic], block_steps
        ),
        "interface_total_bytes": median_block([t.sent_bytes for t in trainer.block_traffic], block_steps),
        "resent_bytes": sum(t.resent_bytes for t in trainer.block_traffic) / task.total_steps,
        "buckets": names,
        "rounds": rounds,
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
    """A bare transfer, every host to the next and all at once: bytes per second, header bytes per packet.

    Of several ranks on a host the first one measures, for the others it is an empty dictionary.
    """
    import torch.distributed as dist

    own = hosts.addresses()
    host, place = divmod(rank, world // len(own))
    if place:
        for _ in range(1 + 2 * repeats):
            dist.barrier()
        return {}
    with socket.create_server((own[host], hosts.PORT + 1)) as server:
        dist.barrier()
        outgoing = socket.create_connection((own[(host + 1) % len(own)], hosts.PORT + 1))
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
