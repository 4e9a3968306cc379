"""Loggers, with the real libraries and offline: two ranks run the blocks of the page, and the files are read back."""

from __future__ import annotations

import csv
import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from documented import ROOT, needs
from documented import train as run_two_ranks
from launching import Finished

from gradcomp.core.metrics import StepMetrics
from gradcomp.core.trace import Statistics

pytestmark = pytest.mark.full

PAGE = ROOT / "docs/watch.md"
NAMES = set(StepMetrics().read(Statistics()))

PROLOGUE = """
import torch
import gradcomp.torch as gc
gc.init()
torch.manual_seed(gc.rank())
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
gc.broadcast_parameters(model.state_dict(), root_rank=0)
criterion = torch.nn.CrossEntropyLoss()
loader = [(torch.randn(8, 64), torch.randint(10, (8,))) for _ in range(101)]
opt = torch.optim.SGD(model.parameters(), lr=0.05)
opt = gc.DistributedOptimizer(opt, model.named_parameters(), "quantize:bits=4")
read = []
original = type(opt).compression_metrics
def compression_metrics(self):
    read.append(original(self))
    return read[-1]
type(opt).compression_metrics = compression_metrics
"""
EPILOGUE = """
metrics = read
"""


def block(heading: str) -> str:
    """The code under a heading of the page."""
    (code,) = re.findall(
        rf"^### {heading}\n+```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.M | re.S
    )
    return code


def train(folder: Path, prologue: str, heading: str) -> tuple[list[dict[str, float]], list[Finished]]:
    """What rank 0's logger read, step by step of the log; rank 1's logged nothing."""
    ranks = run_two_ranks(folder, prologue, block(heading) + EPILOGUE, ())
    for rank in ranks:
        assert rank.returncode == 0, rank.stdout + rank.stderr
    read = [
        json.loads(line.removeprefix("result "))[1]
        for rank in ranks
        for line in rank.stdout.splitlines()
        if line.startswith("result ")
    ]
    assert read[1] == []
    assert [metrics["gradcomp/steps"] for metrics in read[0]] == [1, 51, 101]
    for metrics in read[0]:
        assert metrics.keys() == NAMES
        assert metrics["gradcomp/ratio"] > 3
        assert 4 < metrics["gradcomp/bits"] < 32 / 3
        assert metrics["gradcomp/step_ms"] > metrics["gradcomp/codec_ms"] > 0
    return read[0], ranks


@needs("tensorboard")
def test_tensorboard_has_every_metric_of_every_fiftieth_step(tmp_path: Path) -> None:
    read, _ = train(tmp_path, PROLOGUE, "TensorBoard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (file,) = (tmp_path / "runs").iterdir()
    events = EventAccumulator(str(file))
    events.Reload()
    assert set(events.Tags()["scalars"]) == NAMES
    for name in NAMES:
        found = [(event.step, event.value) for event in events.Scalars(name)]
        expected = [(step, metrics[name]) for step, metrics in zip((0, 50, 100), read, strict=True)]
        assert found == [(step, pytest.approx(value, rel=1e-6)) for step, value in expected]  # float32


def records(file: Path) -> Iterator[bytes]:
    """The records of W&B's file: blocks of 32 KiB with the format of LevelDB's log, after 7 bytes."""
    data, at, parts = file.read_bytes(), 7, []
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        parts.append(data[at + 7 : at + 7 + length])
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield b"".join(parts)
            parts = []


@needs("wandb")
def test_wandb_has_the_metrics_on_an_axis_of_their_own_and_loses_none_of_the_scripts(tmp_path: Path) -> None:
    offline = 'os.environ.update(WANDB_MODE="offline", WANDB_SILENT="true")\n'
    read, _ = train(tmp_path, offline + PROLOGUE, "Weights and Biases")
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    history, axes = [], {}
    for data in records(file):
        record = Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "metric":
            axes[record.metric.glob_name or record.metric.name] = record.metric.step_metric
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            history.append(
                {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
            )
    ours = [row for row in history if "gradcomp/ratio" in row]
    assert [row["gradcomp/step"] for row in ours] == [0, 50, 100]
    for row, metrics in zip(ours, read, strict=True):
        assert {name: row[name] for name in NAMES} == pytest.approx(metrics)
    assert sum("loss" in row for row in history) == 101
    assert axes["gradcomp/*"] == "gradcomp/step"


@needs("mlflow")
def test_mlflow_has_every_metric_when_the_run_has_ended(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/mlflow.db"
    variables = f'os.environ.update(MLFLOW_TRACKING_URI="{store}", MLFLOW_DISABLE_TELEMETRY="true")\n'
    read, _ = train(tmp_path, variables + PROLOGUE, "MLflow")
    from mlflow import MlflowClient

    client = MlflowClient(store)
    (run,) = client.search_runs(["0"])
    assert set(run.data.metrics) == NAMES
    for name in NAMES:
        found = [(each.step, each.value) for each in client.get_metric_history(run.info.run_id, name)]
        expected = [(step, metrics[name]) for step, metrics in zip((0, 50, 100), read, strict=True)]
        assert sorted(found) == [(step, pytest.approx(value)) for step, value in expected]


LIGHTNING = """
import torch
import gradcomp
from lightning import LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
seed_everything(1)

class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))

    def training_step(self, batch, index):
        loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)

source = torch.Generator().manual_seed(5)
dataset = torch.utils.data.TensorDataset(
    torch.randn(480, 64, generator=source), torch.randint(10, (480,), generator=source)
)
loader = torch.utils.data.DataLoader(dataset, batch_size=8)
model = Net()
loggers = [CSVLogger("logs")]
"""


@needs("lightning")
def test_lightnings_loggers_have_the_metrics_and_a_trainer_that_compresses_nothing_is_refused(
    tmp_path: Path,
) -> None:
    code = (
        block("Lightning")
        + """
metrics = strategy.compression_metrics()
try:
    CompressionMetrics().on_train_start(Trainer(accelerator="cpu", logger=False), model)
except gradcomp.ConfigError as error:
    assert "the trainer has no CompressedDDPStrategy" in str(error)
else:
    raise AssertionError("it was accepted")
"""
    )
    ranks = run_two_ranks(tmp_path, LIGHTNING, code, ("lightning.pytorch", "gradcomp.integrations.lightning"))
    assert [rank.returncode for rank in ranks] == [0, 0], ranks[0].stderr + ranks[1].stderr
    (file,) = (tmp_path / "logs").rglob("metrics.csv")
    rows = list(csv.DictReader(file.read_text().splitlines()))
    assert {name for name in rows[0] if name.startswith("gradcomp/")} == NAMES
    ours = [row for row in rows if row["gradcomp/ratio"]]
    assert [row["step"] for row in ours] == ["50"]  # of 60
    assert float(ours[0]["gradcomp/steps"]) == 50
    assert float(ours[0]["gradcomp/ratio"]) > 3
    assert any(row["loss"] for row in rows)
