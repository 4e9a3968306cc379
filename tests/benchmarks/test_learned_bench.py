"""The benchmark of learned compression: plain codes, both ratios, the paper's arithmetic."""

from __future__ import annotations

from types import SimpleNamespace

import learned
import learned_codes as codes
import learned_watch
import numpy as np
import pytest
import torch
from learned_results import (
    equal_bytes,
    evaluate,
    handed_over,
    lost,
    paper_bytes,
    paper_ratio,
    ratios,
    run_bytes,
    times,
)
from learned_rows import ARMS, EQUAL_BYTES, TASKS, choose

from gradcomp import LGC, LayerSpec
from gradcomp.compress import Broadcast, Gather, Sum, from_string
from gradcomp.contrib.lgc.autoencoder import Autoencoder
from gradcomp.testing import CHECKS, Row
from gradcomp.testing.simulation import Simulation


def drawn(count: int) -> np.ndarray:
    return np.random.default_rng(count).standard_normal(count).astype(np.float32)


@pytest.mark.parametrize("count", [0, 1, 267])
@pytest.mark.parametrize("bits", [1, 2, 8])
def test_quantised_values_are_within_half_an_interval(count, bits):
    values = drawn(count)
    payload = codes.quantise(values, bits)
    assert len(payload) == 4 + -(-count * bits // 8)
    found = codes.dequantise(payload, count, bits)
    largest = np.abs(values).max(initial=0)
    assert np.abs(found - values).max(initial=0) <= 1.00001 * largest / 2**bits
    assert len(np.unique(found)) <= 2**bits


@pytest.mark.parametrize("channels", [1, 4, 16])
def test_a_projection_is_least_squares(channels):
    values = drawn(160)
    found = codes.unproject(codes.project(values, channels), 160, channels)
    blocks, error = found.reshape(-1, 16), (values - found).reshape(-1, 16)
    np.testing.assert_allclose((blocks * error).sum(axis=1), 0, atol=1e-5)
    if channels == 16:
        np.testing.assert_allclose(found, values, atol=1e-5)


def test_plain_codes_lose_what_their_bits_and_columns_leave_out():
    found = codes.losses(np.stack([drawn(4096)] * 2))
    assert found["bits-8"] < 1e-4 < found["bits-2"] < 0.5
    # Of values that nothing connects, a projection keeps its share.
    assert found["projection-4"] == pytest.approx(12 / 16, abs=0.05)
    assert found["projection-1"] == pytest.approx(15 / 16, abs=0.05)


@pytest.mark.parametrize(("channels", "bits"), [(4, 8), (1, 2)])
@pytest.mark.parametrize("count", [267, 1292])
def test_plain_codes_take_the_bytes_of_the_learned_one(channels, bits, count):
    learned_bytes = 4 * Autoencoder(channels).code_length(count)
    assert 4 * len(codes.project(drawn(count), channels)) == learned_bytes
    # A scale more, and up to 15 values of padding less.
    assert learned_bytes - 2 * bits <= len(codes.quantise(drawn(count), bits)) <= learned_bytes + 4


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize(
    "kind",
    [codes.BITS, *(pytest.param(kind, marks=pytest.mark.full) for kind in (codes.VALUES, codes.PROJECTION))],
)
def test_the_contract(kind, name):
    """With feedback: what a code loses is in the residual."""
    compressor = codes.PlainCode(
        0.3, 0.0, 0, 0, ends=False, least_parameters=0, kind=kind, code_channels=8, feedback=True
    )
    CHECKS[name](
        Row(
            compressor,
            constants=False,
            draws=True,
            sized=False,
            by_part=kind == codes.PROJECTION,
            overflows=kind != codes.PROJECTION,
        )
    )


def test_the_ring_without_codes_sums_what_lgc_sums_in_phase_2():
    layers = [LayerSpec("first", (8, 30)), LayerSpec("between", (40, 20)), LayerSpec("last", (10, 8))]
    settings = {"density": 0.1, "warmup_steps": 1, "train_steps": 9, "least_parameters": 0}
    lgc, values = (
        Simulation(layers, compressor)
        for compressor in (LGC(**settings, learning_rate=0.0), codes.PlainCode(**settings))
    )
    for _ in range(4):
        for mine, theirs in zip(values.step().all_means(), lgc.step().all_means(), strict=True):
            np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("task", TASKS)
def test_rows_are_compressions(task):
    rows = choose(None)
    assert len({arm.key for arm in ARMS}) == len(ARMS)
    for arm in rows:
        from_string(arm.on(task))
    assert {key for pair in EQUAL_BYTES.items() for key in (pair[0], *pair[1])} <= {arm.key for arm in ARMS}
    with pytest.raises(SystemExit, match="unknown x"):
        choose("lgc,x")


def phase(name: str, steps: int, wire: int, every: dict[str, float], root: dict[str, float]) -> dict:
    return {"phase": name, "steps": steps, "wire_bytes": wire, "step_seconds": 0.1, "every_step": every,
            "as_root": root}  # fmt: skip


def run(row: str, metric: float, phases: list[dict], seed: int = 0, **more) -> dict:
    return {
        "task": "resnet", "row": row, "compression": row, "seed": seed, "metric": metric, "steps": 100,
        "phases": phases, "parameters": 10_000, "nets_loss": [], "plain_loss": {}, "settings": {"ranks": 2},
        "machine": "a", **more,
    }  # fmt: skip


def test_the_papers_ratio_counts_a_leader_and_all_bytes_count_everything():
    dense = run("none", 0.6, [phase("exact", 10, 800_000, {}, {}), phase("codes", 90, 7_200_000, {}, {})])
    sent = {"clt_k 1 sum": 40.0, "lgc 1 sum": 60.0}
    found = run(
        "lgc",
        0.57,
        [phase("exact", 10, 800_000, {}, {}), phase("codes", 90, 200_000, sent, {"lgc 0 broadcast": 300.0})],
    )
    assert paper_ratio(dense) is None
    assert paper_ratio(found) == 40_000 / 400
    assert paper_ratio(found, root=False) == 40_000 / 100
    assert run_bytes(found) == 1_000_000
    # Two ranks send whole gradients, then each its code and one of them the indices.
    assert paper_bytes(found) == 10 * 2 * 40_000 + 90 * (2 * 100 + 300)
    rows = {row["row"]: row for row in evaluate([dense, found])}
    assert rows["lgc"]["all_ratio"] == 8.0
    assert rows["lgc"]["worse"] == [pytest.approx(5.0)]
    assert rows["none"]["paper_ratio"] is None
    elsewhere = {row["row"]: row for row in evaluate([{**dense, "machine": "b"}, found])}
    assert elsewhere["lgc"]["worse"] == [], "arithmetic differs between machines"


def last_line(table: str) -> list[str]:
    return [cell.strip() for cell in table.splitlines()[-1].split("|")[1:-1]]


def test_a_page_tells_what_the_paper_has_and_what_seeds_show():
    steps = [phase("exact", 10, 800_000, {}, {}), phase("codes", 90, 200_000, {"lgc 1 sum": 60.0}, {})]
    runs = [
        run(row, metric - seed / 100, steps if row == "lgc" else steps[:1], seed, nets_loss=[2.0, 1.0, 0.5])
        for seed in range(3)
        for row, metric in (("none", 0.6), ("lgc", 0.54))
    ]
    rows = evaluate(runs)
    own = last_line(ratios("resnet", rows, {"none": (91.88, "1"), "lgc": (91.4, "3,193")}))
    assert own[1:4] == ["91.4", "+0.52", "3,193"]
    assert own[5:7] == ["+10.17 (+10.00 to +10.34)", "worse, as there"]
    assert own[-1] == "0.750", "the mean of the last 20 steps"
    assert last_line(times({"resnet": rows}, {"lgc": "1 s"}))[1:] == ["100.0", "100.0", "–", "1 s"]
    assert last_line(handed_over("resnet", rows))[1:] == ["40,000", "1,111", "–", "60", "–"]
    assert equal_bytes("resnet", rows) is None
    assert lost("resnet", rows) is None


def test_a_watch_tells_phases_apart_and_what_a_rank_hands_over(monkeypatch):
    monkeypatch.setattr(learned_watch, "_watch_messages", lambda note: None)
    monkeypatch.setattr(learned_watch, "_watch_training", lambda nets, plain: None)
    job = SimpleNamespace(steps=600, metric=lambda: 0.5, model=torch.nn.Linear(2, 3))
    watch = learned_watch.Watch(job, rank=1)

    def message(kind: type, size: int, **more):
        if kind is Sum:
            return Sum(size // 4, lambda view: view)
        return kind(size, lambda view: (view, size), **more)

    for step in range(600):
        if step >= 500:
            for sent in (message(Sum, 40), message(Gather, 7), message(Broadcast, 30, root=step % 2)):
                counted = learned_watch._counted(sent, "x ", watch._note)
                if not isinstance(sent, Sum):
                    counted.write(None)
        watch.step(float(step), 0.1, SimpleNamespace(wire_bytes=100 * (step + 1)))
    watch._nets.extend(range(25))
    found = watch.found()
    assert found["nets_loss"] == [4.5, 14.5]
    assert [(part["phase"], part["steps"], part["wire_bytes"]) for part in found["phases"]] == [
        ("exact", 200, 20_000),
        ("values", 300, 30_000),
        ("codes", 100, 10_000),
    ]
    assert found["phases"][1]["every_step"] == {}
    assert found["phases"][2]["every_step"] == {"x sum": 40.0, "x gather": 7.0}
    assert found["phases"][2]["as_root"] == {"x broadcast": 30.0}
    assert found["loss_curve"][0] == [6, 2.5]
    assert found["metric_curve"][-1] == (600, 0.5)
    assert found["parameters"] == 9
    assert job.model.training


def test_ranks_that_differ_are_no_run():
    ranks = [
        {"source": None, "runs": [{"digest": digest, "phases": [], "loss_curve": []}]}
        for digest in ("a", "b")
    ]
    with pytest.raises(SystemExit, match="different parameters"):
        learned.collect("resnet", ARMS[0], ranks, {})
