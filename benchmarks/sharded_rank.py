"""The benchmark of sharded training, seen by one rank."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import resource
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import hosts
import models
import torch
import torch.distributed as dist
from languages import GPT, HELD_OUT, LANGUAGES, VOCABULARY, Language
from step_rank import measure_link
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import gradcomp.torch as gc
from gradcomp import Compressor, Identity, Quantize
from gradcomp.compress import from_string
from gradcomp.compress.quantise.learned import with_levels
from gradcomp.exchange.request_group import RequestGroup, Run
from gradcomp.exchange.requests import ALL_GATHER, REDUCE_SCATTER, PreparedRequest, Request
from gradcomp.transport.inprocess import World

SMALL = 1024  # parameters with fewer elements travel exactly
BUCKET = 1024
EXACT = 32  # bits
#: The parts of a training after which the paper learns levels: 400, 1,900 and 3,800 of 4,800 steps.
LEARNS_AT = (400 / 4800, 1900 / 4800, 3800 / 4800)


@dataclass(frozen=True)
class Row:
    """``bits`` of weights and of gradients, 32 for float32; None: fully_shard alone, or without any exchange.

    ``replicas``, of hybrid sharding: ``"torch"`` takes the means over replicas, on a mesh of two dimensions; ``"copy"``
    leaves a replica its own gradients; else what compresses them. ``ours``: compress_fsdp inside a host, uncompressed.
    """

    bits: tuple[int, int] | None = None
    replicas: str | None = None
    ours: bool = False
    exchanges: bool = True
    reuse: str | None = None
    redraw: str = "step"
    half_gradients: bool = False
    rounding: str = "shift"
    bucket: int = BUCKET
    #: Steps between decisions of L-GreCo; 0: the bits stay.
    every_steps: int = 0
    learns: bool = False  # levels
    #: How a replicated model is trained: local, ddp, optimizer or zero; None: sharded by fully_shard.
    replicated: str | None = None
    differences: bool = True
    hierarchical: bool | None = None

    def compressors(self) -> tuple[Compressor, Compressor]:
        assert self.bits is not None, "of rows with bits"
        weights, gradients = self.bits
        return (
            Quantize(bits=weights, bucket_size=self.bucket, rounding=self.rounding, feedback=False),
            Identity() if gradients == EXACT else Quantize(bits=gradients, bucket_size=BUCKET),
        )


ROWS = {
    "null": Row(exchanges=False),
    "plain": Row(),
    "plain-g16": Row(half_gradients=True),
    "w8g8": Row((8, 8)),
    "w4g4": Row((4, 4)),
    "w8g8-codes": Row((8, 8), reuse="codes"),
    "w8g8-gather": Row((8, 8), redraw="gather"),
    "w8g8-flat": Row((8, 8), hierarchical=False),
    "w8g8-levels": Row((8, 8), hierarchical=True),
    "w4g4-flat": Row((4, 4), hierarchical=False),
    "w4g4-levels": Row((4, 4), hierarchical=True),
    "w6g6": Row((6, 6)),
    "w6g4": Row((6, 4)),
    "w6g5": Row((6, 5)),
    "w5g6": Row((5, 6)),
    "w5g5": Row((5, 5)),
    "w5g4": Row((5, 4)),
    "w4g5": Row((4, 5)),
    "w4g6": Row((4, 6)),
    "w8g8-lgreco": Row((8, 8), every_steps=100),
    "w4g4-lgreco": Row((4, 4), every_steps=100),
    "w4g8": Row((4, 8)),
    "w5g8": Row((5, 8)),
    "w4g32": Row((4, EXACT)),
    "w3g32": Row((3, EXACT)),
    "w2g32": Row((2, EXACT)),
    "w8g3": Row((8, 3)),
    "w8g2": Row((8, 2)),
    "w4g8-nearest": Row((4, 8), rounding="nearest"),
    "w5g8-nearest": Row((5, 8), rounding="nearest"),
    "w8g8-nearest": Row((8, 8), rounding="nearest"),
    "w8g8-coin": Row((8, 8), rounding="stochastic"),
    "w8g8-nearest-whole": Row((8, 8), rounding="nearest", bucket=1 << 30),
    "w8g8-coin-whole": Row((8, 8), rounding="stochastic", bucket=1 << 30),
    "hsdp": Row(replicas="torch"),
    "hsdp-copy": Row(replicas="copy"),
    "hybrid-copy": Row(replicas="copy", ours=True),
    "hybrid-none": Row(replicas="none", ours=True),
    "hybrid-4bit": Row(replicas=f"quantize:bits=4,bucket_size={BUCKET},rounding=nearest", ours=True),
    "hybrid-4bit-128": Row(replicas="quantize:bits=4,bucket_size=128,rounding=nearest", ours=True),
}
ROWS |= {
    f"{name}-learned": replace(ROWS[name], learns=True)
    for name in ["w6g4", "w5g4", "w4g4", "w4g32", "w3g32", "w2g32", "w8g3", "w8g2", "w4g8", "w5g8"]
}
#: Of models that every rank has whole. A width of 32 bits is no compression.
REPLICATED = {
    "local": Row(replicated="local"),
    "ddp": Row(replicated="ddp"),
    "optimizer-g4": Row((32, 4), replicated="optimizer"),
    "zero-exact": Row((32, 32), replicated="zero"),
    "zero-w4": Row((4, 32), replicated="zero"),
    "zero-w4-plain": Row((4, 32), replicated="zero", differences=False),
    "zero-w4g8": Row((4, 8), replicated="zero"),
    "zero-w4g4": Row((4, 4), replicated="zero"),
}


@dataclass(frozen=True)
class Task:
    """What every rank is told to do."""

    rows: Sequence[str]
    blocks: int
    steps: int
    warmup: int
    seed: int


@dataclass(frozen=True)
class Training:
    """A row to be trained, from a seed."""

    row: str
    steps: int
    seed: int
    data: str | None
    language: str  # a name of LANGUAGES
    #: Steps between points of the curve of held-out losses; 0: there is none.
    curve_every: int = 0


class Nothing:
    """Collectives that send nothing: a rank takes its own shards for those of all, its own gradients for the mean."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any = None, async_op: bool = False
    ) -> None:
        if op is None:
            output_tensor.view(dist.get_world_size(group), -1).copy_(input_tensor.clone().unsqueeze(0))
        else:
            output_tensor.copy_(input_tensor.chunk(dist.get_world_size(group))[dist.get_rank(group)])


@dataclass(eq=False)
class Trainer:
    row: Row
    model: GPT
    optimizer: torch.optim.Optimizer
    batches: Iterator[tuple[Tensor, Tensor]]
    state: Any = None
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    traffic: list[hosts.Traffic] = field(default_factory=list)

    def step(self) -> float:
        tokens, targets = next(self.batches)
        begin = time.perf_counter()
        self.optimizer.zero_grad()
        loss = self.model(tokens, targets)
        loss.backward()
        self.optimizer.step()
        seconds = time.perf_counter() - begin
        self.losses.append(loss.item())
        return seconds

    def exchange_seconds(self, steps: int) -> float:
        """A step, by gradcomp's own count."""
        if self.state is None:
            return 0.0
        counted = self.state.statistics()
        return (counted.exchange_seconds + counted.replica_seconds) / steps


def make_trainer(
    row: Row,
    text: models.Text,
    rank: int,
    world: int,
    seed: int,
    learn_levels: Sequence[int] = (0,),
    language: Language = LANGUAGES["words"],
) -> Trainer:
    """Rows with learned levels learn after the given steps; by default in the first one, for all others to use."""
    torch.manual_seed(seed)
    model = GPT(language)
    batches = text.batches(rank, language.batch, language.length, seed)
    if row.replicated:
        return make_replicated(row, model, batches, language.adamw)
    mesh = init_device_mesh("cpu", (world,))
    if row.replicas is not None:
        inside = int(os.environ["LOCAL_WORLD_SIZE"])
        whole = init_device_mesh("cpu", (world // inside, inside), mesh_dim_names=("replicas", "shards"))
        mesh = whole if row.replicas == "torch" else whole["shards"]
    policy = (
        MixedPrecisionPolicy(reduce_dtype=torch.float16) if row.half_gradients else MixedPrecisionPolicy()
    )
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), **language.adamw)
    trainer = Trainer(row, model, optimizer, batches)
    if not row.exchanges:
        for module in [*model.layers, model]:
            module.set_custom_all_gather(Nothing())
            module.set_custom_reduce_scatter(Nothing())
    elif row.ours:
        replicas = None if row.replicas == "copy" else (row.replicas, whole["replicas"])
        trainer.state = gc.compress_fsdp(model, "none", "none", optimizer=optimizer, replicas=replicas)
    elif row.bits is not None:
        weights, gradients = row.compressors()
        trainer.state = gc.compress_fsdp(
            model,
            weights,
            gradients,
            optimizer=optimizer,
            reuse=row.reuse,
            redraw=row.redraw,
            controller=gc.LGreCo(row.every_steps) if row.every_steps else None,
            learn_levels=learn_levels if row.learns else (),
            hierarchical=row.hierarchical,
        )
    return trainer


def make_replicated(
    row: Row, model: GPT, batches: Iterator[tuple[Tensor, Tensor]], adamw: dict[str, Any]
) -> Trainer:
    called: Any = model
    if row.replicated == "zero":
        weights, gradients = (
            "none" if bits == 32 else Quantize(bits, **options)
            for bits, options in zip(
                row.bits or (), ({"rounding": "nearest", "feedback": False}, {}), strict=True
            )
        )
        optimizer: torch.optim.Optimizer = gc.ZeroOptimizer(
            model.named_parameters(),
            torch.optim.AdamW,
            gradients,
            weights,
            differences=row.differences,
            **adamw,
        )
    else:
        optimizer = torch.optim.AdamW(model.parameters(), **adamw)
    if row.replicated == "ddp":
        called = nn.parallel.DistributedDataParallel(model)
    if row.replicated == "optimizer":
        assert row.bits is not None, "of rows with compression"
        optimizer = gc.DistributedOptimizer(optimizer, model.named_parameters(), Quantize(row.bits[1]))
    return Trainer(row, called, optimizer, batches)


@dataclass(frozen=True)
class Formula:
    """Bytes that a rank sends to other hosts in a step, computed from shapes alone, and headers.

    Steps repeat: nothing is compared.
    """

    formula: int
    beside: int


def formula(model: GPT, row: Row, rank: int, world: int, per_host: int = 1) -> Formula:
    """s b / 8 + 8 per quantisation bucket of every message to another host, 4 bytes an element of what travels exactly.

    In one level a rank sends to all ranks of other hosts, in two levels to one of each host.
    """
    if not row.exchanges:
        return Formula(0, 0)
    if row.replicas is not None:
        return Formula(_between_hosts(model, row, world), 0)
    far = [j for j in range(world) if j // per_host != rank // per_host]
    peers = [j for j in far if j % per_host == rank % per_host]
    gathers_to = far if row.hierarchical is False or row.bits is None else peers
    scatters_to = peers if row.hierarchical else far
    units = [(list(layer.parameters()), 2) for layer in model.layers]
    inside = {id(p) for parameters, _ in units for p in parameters}
    units.append(([p for p in model.parameters() if id(p) not in inside], 1))
    total = beside = 0
    for parameters, gathers in units:
        own = sum(_bytes(p.shape, rank, world, row.bits and row.bits[0], 4, row.bucket) for p in parameters)
        others = sum(
            _bytes(p.shape, j, world, row.bits and row.bits[1], 2 if row.half_gradients else 4)
            for p in parameters
            for j in scatters_to
        )
        sent = 1 if row.reuse else gathers
        total += sent * len(gathers_to) * own + others
        if row.bits is not None:
            header = _header_bytes(len(parameters))
            beside += (sent * len(gathers_to) + len(scatters_to)) * header
    return Formula(total, beside)


def _bytes(
    shape: Sequence[int], rank: int, world: int, bits: int | None, item: int, bucket: int = BUCKET
) -> int:
    rows = -(-shape[0] // world)
    mine = max(0, min(shape[0] - rank * rows, rows)) * math.prod(shape[1:])
    if bits in (None, EXACT) or len(shape) < 2 or math.prod(shape) < SMALL:
        return item * mine
    return -(-mine * bits // 8) + 8 * -(-mine // bucket)


def _between_hosts(model: GPT, row: Row, world: int) -> int:
    """What the means of a rank's shards send between hosts: 2 (R-1)/R of their payload, for R replicas."""
    if row.replicas == "copy":
        return 0
    replicas = world // int(os.environ["LOCAL_WORLD_SIZE"])
    quantises = row.replicas.startswith("quantize")
    bucket = from_string(row.replicas).bucket_size if quantises else BUCKET
    total = 0.0
    for parameter in model.parameters():
        mine = parameter.to_local()
        coded = quantises and mine.ndim > 1 and mine.numel() >= SMALL
        payload = mine.numel() / 2 + 8 * mine.numel() / bucket if coded else 4 * mine.numel()
        total += 2 * (replicas - 1) / replicas * payload
    return round(total)


def _header_bytes(layers: int) -> int:
    from gradcomp.reduce.header import ByteHeader

    return int(ByteHeader.size(layers))


def codec_seconds(model: GPT, row: Row, world: int) -> float:
    """Of encoding and decoding in a step, alone on this core: median of several."""
    if row.replicas is not None and row.replicas.startswith("quantize"):
        size = sum(p.to_local().numel() for p in model.parameters())
        return _times(REDUCE_SCATTER, from_string(row.replicas), size)[0]
    if row.bits is None:
        return 0.0
    weights, gradients = row.compressors()
    if row.learns:
        weights = with_levels(weights, unbiased=False) or weights
        gradients = with_levels(gradients, unbiased=True) or gradients
    large = [p for p in model.parameters() if p.ndim > 1 and p.numel() >= SMALL]
    inner = {id(p) for layer in model.layers for p in layer.parameters()}
    total = 0.0
    for parameter in large:
        size = parameter.numel()
        gathers = 1 if id(parameter) not in inner or row.reuse else 2
        decodes = 1 if id(parameter) not in inner else 2
        encode_decode, decode = _times(ALL_GATHER, weights, size // world)
        total += gathers * encode_decode + (world * decodes - gathers) * decode
        total += _times(REDUCE_SCATTER, gradients, size)[0]
    return total


def _times(kind: str, compressor: Compressor, size: int, repeats: int = 5) -> tuple[float, float]:
    """Medians of a request in a world of one, and of decoding once more what was gathered."""
    transport = World(1).transports()[0]
    request = PreparedRequest(Request.of(kind, [gc.LayerSpec("x", (size,))], compressor), 0, 1)
    values, output = [torch.randn(size).numpy()], [torch.empty(size).numpy()]
    runs, decodes = [], []
    for _ in range(repeats):
        begin = time.perf_counter()
        group = RequestGroup([Run(request, values, output)], transport, lambda _: None)
        while group.poll().name != "NOTHING":
            pass
        runs.append(time.perf_counter() - begin)
        if kind == ALL_GATHER:
            begin = time.perf_counter()
            request.decode_again(output)
            decodes.append(time.perf_counter() - begin)
    return statistics.median(runs), statistics.median(decodes) if decodes else 0.0


def peak_bytes() -> int:
    """The most memory that this process has had so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def digest(model: GPT) -> str:
    """Of the weights that a forward pass computes with."""
    sha = hashlib.sha256()
    for module in [*model.layers, model]:
        module.unshard()
        for parameter in module.parameters(recurse=module is not model):
            sha.update(parameter.detach().clone().numpy().tobytes())
        module.reshard()
    return sha.hexdigest()


def rate_factor(step: int, steps: int) -> float:
    """The part of the learning rate of a step: it rises for a twentieth of the steps, and falls as a cosine to 0."""
    rise = max(steps // 20, 1)
    return min((step + 1) / rise, 1.0) * (1 + math.cos(math.pi * step / steps)) / 2


def train_rank(task: Training, out: Path) -> None:
    """Train a row; write the held-out loss to a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    gc.init(seed=task.seed)
    language = LANGUAGES[task.language]
    text = language.text(Path(task.data) if task.data else None)
    learn_levels = sorted({round(at * task.steps) for at in LEARNS_AT})
    row = (ROWS | REPLICATED)[task.row]
    trainer = make_trainer(row, text, rank, world, task.seed, learn_levels, language)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        trainer.optimizer, lambda step: rate_factor(step, task.steps) if language.cosine else 1.0
    )

    def held_out() -> float:
        with torch.no_grad():
            batches = text.test_batches(64, language.length, HELD_OUT)
            return statistics.mean(trainer.model(tokens, targets).item() for tokens, targets in batches)

    curve: list[list[float]] = []
    seconds = 0.0
    for step in range(1, task.steps + 1):
        seconds += trainer.step()
        schedule.step()
        if task.curve_every and step % task.curve_every == 0:
            curve.append([step, round(seconds, 2), round(held_out(), 4)])
            dist.barrier()  # so that no step waits for another rank's loss
    sent = trainer.state.statistics() if trainer.state else None
    found: dict[str, Any] = {"loss": held_out(), "seconds": round(seconds, 2)}
    if curve:
        found["curve"] = curve
    if sent is not None and not curve:  # losses on the way gather weights too, and are no part of a step
        found["bytes_per_step"] = (sent.weight_bytes + sent.gradient_bytes) / task.steps
    if isinstance(trainer.optimizer, gc.ZeroOptimizer):
        with torch.no_grad():
            masters = trainer.optimizer.full_state_dict()["masters"]
            for parameter, master in zip(trainer.model.parameters(), masters, strict=True):
                parameter.copy_(master)
    with trainer.state.exact_weights() if trainer.state else nullcontext():
        found["exact_loss"] = held_out()
    out.with_name(f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    gc.shutdown()
    dist.destroy_process_group()


def time_blocks(trainers: Mapping[str, Trainer], task: Task) -> None:
    """Train all rows in turns, block by block; times and traffic are kept by the trainers."""
    for _, trainer in itertools.product(range(task.blocks), trainers.values()):
        dist.barrier()
        before = hosts.Traffic.now()
        times = [trainer.step() for _ in range(task.warmup + task.steps)]
        dist.barrier()
        trainer.traffic.append(hosts.Traffic.now() - before)
        trainer.seconds += times[task.warmup :]


def run_rank(task: Task, out: Path) -> None:
    """Everything one rank does; writes what it found to a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    links = [measure_link(rank, world)] * world
    dist.all_gather_object(links, links[rank])
    found: dict[str, Any] = {"link": links[0]}
    gc.init(seed=task.seed)
    text = models.load_text(None, VOCABULARY)
    without = peak_bytes()
    trainers = {name: make_trainer(ROWS[name], text, rank, world, task.seed) for name in task.rows}
    time_blocks(trainers, task)
    found["peak_bytes"] = peak_bytes() - without
    found["parameters"] = sum(p.numel() for p in next(iter(trainers.values())).model.parameters())
    packet = found["link"]["packet_bytes"]
    steps = task.warmup + task.steps
    found["rows"] = {}
    for name, trainer in trainers.items():
        bytes_of = formula(trainer.model, trainer.row, rank, world, world // len(hosts.addresses()))
        certain = [t.payload_bytes(packet) for t in trainer.traffic if t.is_certain]
        found["rows"][name] = {
            "seconds": trainer.seconds,
            "losses": trainer.losses,
            "interface_bytes": statistics.median(certain) / steps if certain else None,
            "formula_bytes": bytes_of.formula,
            "beside_bytes": bytes_of.beside,
            "exchange_seconds": trainer.exchange_seconds(task.blocks * steps),
            "codec_seconds": codec_seconds(trainer.model, trainer.row, world),
            "digest": digest(trainer.model) if trainer.row.exchanges else "",
        }
        dist.barrier()
    out.with_name(f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    gc.shutdown()
    dist.destroy_process_group()
