"""The step and the losses that are measured on a GPU: what their figures mean, and short runs on the CPU."""

from __future__ import annotations

import gpu_step
import gpu_training
import numpy as np
import pytest
from gpu_null import NullTransport
from gpu_ranks import RanksError, launch

from gradcomp.kernels.reference_headers import FIXED
from gradcomp.reduce.header import BucketFlags, ByteHeader, HeaderId, Headers

TINY = {"layers": 1, "width": 32, "heads": 2, "words": 64, "length": 8, "batch": 2}


# ------------------------------------------------------------------------------------------ the step


def of_rank(**seconds: float) -> dict:
    """What a rank finds: steps of so many seconds, by row."""

    def row(step):
        lists = {"step": step, "thread": step / 4, "exposed_seconds": 0.0, "wire_seconds": 0.0}
        return {name: [each] * 3 for name, each in lists.items()} | {"losses": [1.0]}

    return {"rows": {name.replace("_", " "): row(each) for name, each in seconds.items()}}


def test_exposed_is_what_a_step_takes_longer_on_the_slower_rank_than_without_exchange():
    ranks = [
        of_rank(alone=0.010, alone_null=0.012, both=0.020, both_gloo=0.030),
        of_rank(alone=0.011, alone_null=0.014, both=0.021, both_gloo=0.025),
    ]
    rows = gpu_step.evaluate(ranks)
    assert rows["alone"]["step_ms"] == pytest.approx(11)
    # Beside a rank that has the device to itself, too.
    assert rows["alone null"]["exposed_ms"] == pytest.approx(3)
    assert rows["both gloo"]["exposed_ms"] == pytest.approx(9)
    assert rows["alone null"]["lock_share"] == pytest.approx(0.25)


def test_what_the_bar_is_for_is_trained_by_one_rank_at_a_time():
    turns = [([row.name for row in rows], rank) for rows, rank in gpu_step.schedule(1, 2)]
    assert turns == [
        (["alone", "alone null"], 0),
        (["alone", "alone null"], 1),
        (["both"], None),
        (["both gloo"], None),
    ]
    assert all(row.alone for row in gpu_step.ROWS if row.name == gpu_step.BAR_ROW)


@pytest.mark.parametrize(
    ("exposed", "failed", "code"), [([9.0, 4.9], False, 0), ([9.0, 5.1], False, 1), ([4.0], True, 1)]
)
def test_the_bar_is_met_by_one_cap_if_no_cap_fails(exposed, failed, code, capsys):
    results = {str(cap): {"rows": {gpu_step.BAR_ROW: {"exposed_ms": ms}}} for cap, ms in enumerate(exposed)}
    if failed:
        results["bad"] = {"error": "rank 1 failed"}
    assert gpu_step.verdict(results, on_gpu=True) == code
    assert ("MISSED" in capsys.readouterr().out) is (min(exposed) > 5)


@pytest.mark.parametrize("rank", [0, 1])
def test_over_the_null_transport_the_other_rank_sends_the_same(rank):
    transport = NullTransport(rank, [0, 30])
    total = np.array([1.5, 2.0], np.float32)
    transport.allreduce(total)
    assert total.tolist() == [3.0, 4.0]
    size = ByteHeader.size(1)
    header = ByteHeader(1, np.array([32, 32], np.int64))
    travels, own = np.full(size + 32, 1, np.uint8), np.full(size + 32, 2, np.uint8)
    flags = BucketFlags(np.array([1, 8], np.uint8), rank)
    Headers(header, [(travels, 1 - rank, rank)]).write(HeaderId(5, 6, bucket=1), 0, flags)
    counts = [0, 0]
    counts[1 - rank] = len(travels)
    received = np.zeros(len(own), np.uint8)
    transport.alltoallv(np.concatenate([travels, own]), counts, received, counts)
    assert received[size:].tobytes() == own[size:].tobytes()
    fixed = received[: FIXED.itemsize].view(FIXED)[0]
    assert [int(fixed[name]) for name in ("step", "bucket", "chunk", "payload_bytes")] == [6, 1, rank, 30]
    assert fixed["sender"] == 1 - rank
    mean = np.full(2 * len(own), 7, np.uint8)  # of which the number of the round holds for both parts
    transport.allgatherv(mean, [len(own)] * 2)
    parts = mean[: len(own)], mean[len(own) :]
    changed = np.flatnonzero(parts[1 - rank] != travels)
    assert changed.tolist() == [3, 22]
    assert parts[1 - rank][3] == 7
    assert parts[1 - rank][22] == 1 - rank
    assert (parts[rank] == 7).all()
    assert transport.bytes_sent == 8 + 2 * len(own)


def test_a_rank_that_fails_is_quoted(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import os; print('its words'); raise SystemExit(int(os.environ['RANK']))")
    with pytest.raises(RanksError, match=r"(?s)rank 1 failed.*its words"):
        launch(str(script), {}, 20.0)


def test_ranks_that_hang_are_ended(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import time; time.sleep(60)")
    with pytest.raises(RanksError, match="took more than 1 s"):
        launch(str(script), {}, 1.0)


@pytest.mark.full
def test_a_short_run_of_the_step(run_json):
    shape = [part for name, value in TINY.items() for part in (f"--{name}", str(value))]
    arguments = ["--device=cpu", "--caps=0.005", "--blocks=1", "--steps=1", "--seconds=90", *shape]
    rows = run_json("benchmarks/gpu_step.py", *arguments)["caps"]["0.005"]["rows"]
    assert list(rows) == ["alone", "alone null", "both", "both gloo"]
    assert rows["both gloo"]["buckets"] > 1
    assert "launches" not in rows["alone null"]  # a CPU has none


# ------------------------------------------------------------------------------------------ losses


FALLING = [4.0 - 0.3 * i for i in range(10)] + [1.0] * 10
CODED = "quantize:bits=4,bucket_size=512"
NAN = float("nan")
FIRST, LAST = "first losses", "last losses beside the CPU's"
PLAIN = "last losses beside uncompressed ones"


@pytest.mark.parametrize(
    ("compression", "curve", "wrong"),
    [
        (CODED, FALLING, []),
        (CODED, [FALLING[0] * 1.01, *FALLING[1:]], [FIRST]),
        (CODED, FALLING[:15] + [1.03] * 5, [LAST]),
        (CODED, [NAN] * 20, [FIRST, LAST, PLAIN]),
        ("none", [4.0] * 20, [FIRST, LAST, "no training"]),
    ],
)  # fmt: skip
def test_a_curve_that_is_not_the_cpus_is_wrong(compression, curve, wrong):
    beside = {"none": FALLING, CODED: FALLING}
    rows = gpu_training.judge({"cpu": beside, "cuda:0": beside | {compression: curve}}, "cuda:0")
    assert next(row["wrong"] for row in rows if row["compression"] == compression) == wrong


def test_losses_that_stay_above_uncompressed_ones_are_wrong():
    beside = {"none": FALLING, CODED: FALLING[:15] + [1.06] * 5}
    rows = gpu_training.judge({"cpu": beside, "cuda:0": beside}, "cuda:0")
    assert [row["wrong"] for row in rows] == [[], [PLAIN]]


@pytest.mark.full
def test_a_short_run_of_the_training():
    task = gpu_training.Task(["cpu"], ["none", CODED], TINY, steps=3, learning_rate=0.2)
    ranks = launch(gpu_training.__file__, vars(task), 60.0)
    curves = ranks[0]["cpu"]
    assert [len(curve) for curve in curves.values()] == [3, 3]
    assert curves["none"][0] == curves[CODED][0]
    assert ranks[1]["cpu"]["none"] != curves["none"]  # it has batches of its own
