"""Estimated steps: the formula of a ring, cases without a gain, and the command."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gradcomp import LayerSpec
from gradcomp.cli import main
from gradcomp.core.topology import Topology
from gradcomp.estimate.choices import CHOICES, LOCAL_CHOICES
from gradcomp.estimate.models import layers_of
from gradcomp.estimate.predict import Situation, best, device_processor, estimate, gains, readiness, work_of
from gradcomp.reduce.model import Network

DOCS = Path(__file__).resolve().parents[2] / "docs"
#: A processor that does everything at once, so that only the link counts.
FREE = replace(device_processor(1e18), round_seconds=0.0, skew=0.0)


def situation(layers, *, hosts=4, local=1, rate=1e9, backward=0.1, processor=FREE) -> Situation:
    topology = Topology(tuple(host for host in range(hosts) for _ in range(local)))
    network = Network(0.0, 1 / rate, 1.0, 1.0, 0.0, 1e-11)
    return Situation(
        layers, readiness(layers, backward), backward, 1.5 * backward, topology, network, processor
    )


def by_key(made: Situation, every: int | None = None):
    return {one.choice.key: one for one in estimate(made, every)}


@pytest.mark.parametrize(("hosts", "local"), [(2, 1), (3, 1), (4, 1), (7, 1), (2, 2), (4, 4)])
def test_ddp_takes_the_formula_of_a_ring_if_nothing_overlaps(hosts, local):
    """300 M parameters in one layer, whose gradient comes at the end of backward: 2 d (N-1) / N / rate are exposed."""
    layers = [LayerSpec("w", (300_000, 1000))]
    found = by_key(situation(layers, hosts=hosts, local=local, rate=1.177e9))
    world = hosts * local
    nbytes = 1.2e9 * 2 * (world - 1) / world
    assert found["ddp"].sent == pytest.approx(nbytes)
    assert found["ddp"].exposed == pytest.approx(nbytes / 1.177e9)
    assert found["ddp-half"].exposed == pytest.approx(nbytes / 2 / 1.177e9)
    assert found["none"].exposed == pytest.approx(nbytes / 1.177e9, rel=1e-3)
    if local == 1:  # four bits, and 8 bytes for each 512 values
        ratio = 4 / (0.5 + 8 / 512)
        assert found["4bit"].exposed == pytest.approx(nbytes / ratio / 1.177e9, rel=1e-3)


@pytest.mark.parametrize("every", [1, 30])
def test_local_steps_expose_a_whole_exchange_once_in_a_round(every):
    """The layers' gradients come early, which hides an exchange of every step, but not one after the last step."""
    layers = [LayerSpec(f"w{i}", (1000, 1000)) for i in range(40)]
    found = by_key(situation(layers, rate=1e9), every)
    nbytes = 160e6 * 2 * 3 / 4
    assert found["diloco"].sent == pytest.approx(nbytes / every)
    assert found["diloco"].exposed == pytest.approx(nbytes / every / 1e9, rel=1e-3)
    assert found["sparseloco"].sent < found["local-4bit"].sent / 9
    late = by_key(situation(layers, processor=replace(FREE, skew=0.1), rate=1e15), every)
    assert late["diloco"].exposed == pytest.approx(0.1 * 0.15 / every**0.5, rel=1e-3)


def test_backward_hides_what_is_sent_while_it_runs():
    layers = [LayerSpec(f"w{i}", (1000, 1000)) for i in range(40)]
    fast, slow = (by_key(situation(layers, rate=rate, backward=1.0)) for rate in (1e10, 1e8))
    last = 2 * 3 / 4 * 4e6 / 1e10
    assert last <= fast["ddp"].exposed <= 8 * last  # the last bucket of 25 MiB
    # The first bucket is one layer, the second the next seven, which are there after 8 / 40 s; 39 layers are left then.
    assert slow["ddp"].exposed == pytest.approx(8 / 40 + 39 * (2 * 3 / 4 * 4e6 / 1e8) - 1.0)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("model", ["resnet50", "gpt2-small"])
def test_a_slower_link_or_core_never_shortens_a_step(model, shared):
    layers, processor = layers_of(model), replace(device_processor(1e10), shared=shared, byte_seconds=1e-9)
    before = dict.fromkeys([choice.key for choice in CHOICES], 0.0)
    for rate in (1e11, 1e10, 1e9, 1e8, 1e7):
        found = by_key(situation(layers, rate=rate, processor=processor))
        assert all(found[key].step >= before[key] - 1e-9 for key in before)
        before = {key: one.step for key, one in found.items()}
        assert found["4bit"].sent < found["8bit"].sent < found["bf16"].sent < found["none"].sent
    slower = by_key(situation(layers, rate=1e7, processor=replace(processor, byte_seconds=3e-9)))
    assert all(slower[key].step >= before[key] - 1e-9 for key in before)


def test_gains_are_found_on_a_slow_link_and_not_on_a_fast_one():
    layers = layers_of("bert-base")
    slow, fast = (estimate(situation(layers, rate=rate, backward=0.3)) for rate in (1e8, 1e12))
    assert gains(slow)
    assert best(slow).choice.key in ("powersgd", "topk")
    assert best(slow, alike=True).choice.key == "4bit"
    assert not gains(fast)


def test_one_rank_exchanges_nothing():
    for one in estimate(situation(layers_of("lstm"), hosts=1), 10):
        assert (one.step, one.exposed) == (pytest.approx(0.15), pytest.approx(0.0))


def test_backward_takes_its_time_where_the_work_is():
    words, hidden, bias = (
        LayerSpec("embedding.weight", (9, 9)),
        LayerSpec("h.weight", (6, 5)),
        LayerSpec("h.bias", (6,)),
    )
    out = LayerSpec("out.weight", (10, 1))
    np.testing.assert_allclose(work_of([words, hidden, bias, out]), [0.0, 0.75, 0.0, 0.25])
    np.testing.assert_allclose(readiness([words, hidden, bias, out], 4.0), [4.0, 4.0, 1.0, 1.0])
    convolutions = [LayerSpec("c1", (8, 3, 3, 3)), LayerSpec("bn", (8,)), LayerSpec("c2", (64, 8, 3, 3))]
    np.testing.assert_allclose(work_of(convolutions), [0.5, 0.0, 0.5])
    np.testing.assert_allclose(work_of([bias]), [1.0])


ARGUMENTS = ["estimate", "--model", "gpt2-small", "--hosts", "4", "--backward-ms", "300"]


def test_the_command_prints_a_table_and_a_verdict_and_its_status_says_whether_it_helps(capsys):
    assert main([*ARGUMENTS, "--link", "10gbit"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("124,439,808 parameters in 148 layers, 4 ranks on 4 hosts")
    assert "no GPU was measured" in lines[1]
    assert lines[-1].endswith("compression='quantize:bits=4'.")
    assert main([*ARGUMENTS, "--link", "400gbit", "--json"]) == 3
    found = json.loads(capsys.readouterr().out)
    assert not found["helps"]
    assert found["verdict"].startswith("Nothing to gain here")
    assert [one["key"] for one in found["choices"]] == [choice.key for choice in CHOICES]
    assert found["choices"][0]["sent_bytes"] == pytest.approx(4 * 124_439_808 * 1.5)


def test_the_command_shows_local_steps(capsys):
    assert main([*ARGUMENTS, "--link", "50mbit", "--every", "20", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["key"] for one in found["choices"]] == [choice.key for choice in (*CHOICES, *LOCAL_CHOICES)]
    assert "Exchanged once in 20 steps: SparseLoCo" in found["verdict"]
    assert "gc.SparseLoCo(model, opt, every=20)" in found["verdict"]
    assert main([*ARGUMENTS, "--link", "400gbit", "--every", "20"]) == 3
    assert "Exchanged once" not in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize("page", ["estimate.md", "worked-example.md", "local-steps.md"])
def test_pages_show_what_their_commands_print(page, capsys):
    blocks = re.findall(
        r"```console\n\$ gradcomp (estimate [^\n|]+)(\| tail -1)?\n(.*?)```",
        (DOCS / page).read_text(),
        re.DOTALL,
    )
    assert blocks
    for arguments, tail, shown in blocks:
        assert main(arguments.split()) in (0, 3)
        printed = capsys.readouterr().out
        assert shown == (printed.splitlines(keepends=True)[-1] if tail else printed)


def test_a_cpus_codecs_are_timed(capsys):
    link = ["--link", "100mbit", "--device", "cpu"]
    assert main(["estimate", "--model", "lstm", "--hosts", "2", "--backward-ms", "26", *link]) == 0
    assert "codecs are timed on this machine" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--link", "10"], "a rate is a number with a unit"),
        (["--link", "0gbit"], "a rate is a number with a unit"),
        (["--link", "1gbit", "--hosts", "0"], "--hosts"),
        (["--link", "1gbit", "--backward-ms", "-1"], "times must be positive"),
        (["--link", "1gbit", "--step-ms", "1"], "no longer than its step"),
        (["--link", "1gbit", "--device", "cpu", "--codec-gbytes", "1"], "for GPUs"),
        (["--link", "1gbit", "--every", "0"], "--every"),
        (["--link", "1gbit", "--model", "nothing"], "there is no model and no file 'nothing'"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_status_2(arguments, message, capsys):
    assert main([*ARGUMENTS, *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
