"""The comparison with other libraries, seen by one rank: rows that alternate, and a failure said in a file."""

from __future__ import annotations

import dataclasses
import datetime
import faulthandler
import hashlib
import json
import os
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import models
import peers_libraries
from peers_rows import HOROVOD, PeerRow
from step_rank import Task, Trainer, make_trainer, measure_link, median_block, run_block

FAILURE = "failure.json"
_OWN = ("none", "ddp", "gradcomp")


@dataclass(frozen=True)
class PeersTask(Task):
    """A task of the step benchmark with rows of other libraries."""

    paths: dict[str, str] = field(default_factory=dict)
    limit_seconds: float = 120.0

    @staticmethod
    def from_json(text: str) -> PeersTask:
        data = json.loads(text)
        return PeersTask(**{**data, "rows": tuple(PeerRow(**row) for row in data["rows"])})


class Watch:
    """Says in files which row this rank is at, and how it failed; ends a rank that is at one block for too long."""

    def __init__(self, out: Path, rank: int, limit_seconds: float) -> None:
        self._row, self._failure = out.with_name(f"{rank}.row"), out.with_name(f"{rank}.{FAILURE}")
        self._limit = limit_seconds
        self._timer: threading.Timer | None = None

    def begin(self, row: str) -> None:
        self.end()
        self._row.write_text(row)
        self._timer = threading.Timer(self._limit, self._give_up)
        self._timer.daemon = True
        self._timer.start()

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _give_up(self) -> None:
        faulthandler.dump_traceback()  # where each thread is
        self.fail("TimeoutError", f"no end after {self._limit:g} s")

    def fail(self, kind: str, message: str) -> None:
        """Write the failure and end the process at once: libraries may wait for other ranks when they are closed."""
        row = self._row.read_text() if self._row.exists() else ""
        text = json.dumps({"row": row, "type": kind, "message": message, "time": time.time()})
        partial = self._failure.with_suffix(".partial")
        partial.write_text(text)
        partial.replace(self._failure)
        os._exit(1)


def run_rank(task: PeersTask, out: Path) -> None:
    watch = Watch(out, int(os.environ["RANK"]), task.limit_seconds)
    try:
        train(task, out, watch)
    except Exception as error:  # noqa: BLE001 - a peer may fail in any way, and its row says in which
        traceback.print_exc()
        watch.fail(type(error).__name__, (str(error).splitlines() or [""])[0])


def train(task: PeersTask, out: Path, watch: Watch) -> None:
    import torch
    import torch.distributed as dist

    watch.begin("")  # what goes wrong before the first row and after the last one is no row's fault
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=task.limit_seconds))
    rank, world = dist.get_rank(), dist.get_world_size()
    link = measure_link(rank, world)
    kinds = {row.kind for row in task.rows}
    sys.path += task.paths.values()
    if "gradcomp" in kinds:
        import gradcomp.torch as gc

        gc.init(seed=task.seed)
    # The same numbers on all ranks: GRACE's PowerSGD draws its matrices from torch's own generator.
    torch.manual_seed(task.seed)
    initial, text = models.WordLSTM(), models.load_text(None)
    rendezvous, started = None, False
    trainers = []
    for row in task.rows:
        watch.begin(row.key)
        if row.kind == HOROVOD and not started:
            rendezvous, started = peers_libraries.start_horovod(rank, world), True
        trainers.append(prepare(row, initial, text, rank, world, task))
    for _ in range(task.blocks):
        for trainer in trainers:
            watch.begin(trainer.row.key)
            run_block(trainer, task, dist.barrier)
    watch.begin("")
    found = {
        "link": link,
        "text": text.source,
        "parameters": sum(p.numel() for p in initial.parameters()),
        "initial": digest(initial),
        "rows": {t.row.key: findings(t, task, link["packet_bytes"]) for t in trainers},
    }
    out.with_name(f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    if started:
        import horovod.torch as hvd

        hvd.shutdown()
    if rendezvous is not None:
        rendezvous.stop()
    if "gradcomp" in kinds:
        gc.shutdown()
    if dist.is_initialized():
        dist.destroy_process_group()
    watch.end()


def prepare(row: PeerRow, initial: Any, text: Any, rank: int, world: int, task: PeersTask) -> Trainer:
    """A trainer of the step benchmark; for another library's row, with the library around its optimizer."""
    plain = row if row.kind in _OWN else dataclasses.replace(row, kind="other")
    trainer = make_trainer(plain, initial, text, rank, task)
    trainer.optimizer = peers_libraries.wrap(row, trainer.optimizer, trainer.model, world)
    return trainer


def findings(trainer: Trainer, task: Task, packet_bytes: float) -> dict[str, Any]:
    payloads = [traffic.payload_bytes(packet_bytes) for traffic in trainer.block_traffic]
    return {
        "block_seconds": trainer.block_seconds,
        "interface_bytes": median_block(payloads, task.warmup + task.steps),
        "losses": trainer.losses,
        "digest": trainer.digest(),
    }


def digest(model: Any) -> str:
    sha = hashlib.sha256()
    for parameter in model.parameters():
        sha.update(parameter.detach().numpy().tobytes())
    return sha.hexdigest()
