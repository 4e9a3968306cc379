"""The pages of the papers: they say what the committed runs say, and a run that is there is not run again."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from types import SimpleNamespace

import convergence
import paper_gravac
import paper_qsdp
import paper_runs
import paper_shapes
import papers
import pytest
import report
from paper_runs import Arm, Measurement, Pool, Results, Scale
from paper_tables import Row, by_seed, compare, order, resolved, worse


def found(metric: float, seed: int) -> dict:
    """What a rank tells of a run."""
    return {
        "seed": seed, "metric": metric, "digest": "d", "seconds": 1.0, "steps": 4, "step_seconds": 0.5,
        "bytes_per_step": 100.0, "ratio": 2.0, "loss_over_time": [1.0], "bytes_over_time": [100.0],
        "seconds_over_time": [0.5],
    }  # fmt: skip


@pytest.fixture
def launched(monkeypatch):
    """The plans that would have been trained; each gives a metric of 1 less a tenth of the seed."""
    plans: list[convergence.Plan] = []

    def launch_all(asked, ranks, link):
        plans.extend(asked)
        return [
            [{"source": None, "runs": [found(1 - seed / 10, seed) for seed in plan.seeds]}] * ranks
            for plan in asked
        ]

    monkeypatch.setattr(convergence, "launch_all", launch_all)
    return plans


@pytest.mark.parametrize("paper", papers.PAPERS)
def test_a_page_is_what_the_committed_runs_make_it(paper):
    text = (papers.PAGES / f"{paper}.md").read_text(encoding="utf-8")
    tables = importlib.import_module(f"paper_{paper}").tables(Results(Pool(papers.RESULTS), papers.RESULTS))
    assert papers.fill(text, tables) == text, f"python benchmarks/papers.py {paper} --page"


def test_a_page_and_its_tables_must_match():
    page = "a\n<!-- table: one -->\nold\n<!-- end -->\nb\n"
    filled = papers.fill(page, {"one": "new"})
    assert filled == "a\n<!-- table: one -->\nnew\n<!-- end -->\nb\n"
    assert papers.fill(filled, {"one": "new"}) == filled
    for tables in ({}, {"one": "", "two": ""}, {"two": ""}):
        with pytest.raises(SystemExit, match="do not match"):
            papers.fill(page, tables)
    with pytest.raises(SystemExit, match="do not match"):
        papers.fill(page + page, {"one": ""})


def test_an_order_shows_where_the_seeds_differ_by_less_than_the_effect():
    assert resolved([1.0, 1.5, 2.0])
    assert not resolved([0.5, 1.0, 2.5])
    assert not resolved([-1.0, 1.0])
    assert not resolved([5.0]), "one seed resolves nothing"
    assert order([1.0, 1.5, 2.0], paper=3.0) == "worse, as there"
    assert order([1.0, 1.5, 2.0], paper=0.1) == "worse; there equal"
    assert order([-1.0, -1.5, -2.0], paper=3.0) == "better; there worse"
    assert order([-1.0, -1.5], paper=None) == "better"
    assert order([0.0, 1.0], paper=3.0) == "not resolved"


def test_runs_of_different_lengths_do_not_compare():
    own, base = (
        {"seed": 0, "metric": metric, "steps": 4, "source": None, "machine": "a"} for metric in (0.9, 1.0)
    )
    assert worse([own], [base], "resnet") == pytest.approx([10.0])
    assert worse([own], [{**base, "machine": "b"}], "resnet") == []
    for other in ({"steps": 5}, {"source": "a.txt"}):
        with pytest.raises(SystemExit, match="do not compare"):
            worse([{**own, **other}], [base], "resnet")


def test_what_is_there_is_not_trained_again(launched, tmp_path):
    arms = [Arm("lstm", "none"), Arm("lstm", "topk", rate=0.1, seeds=1)]
    assert paper_runs.train(Pool(tmp_path), arms, Scale(lstm_steps=10), None, None) == []
    assert [(plan.compression, plan.seeds) for plan in launched] == [("none", (0, 1, 2)), ("topk", (0,))]
    assert {plan.settings.lstm_steps for plan in launched} == {10}
    launched.clear()
    # The same, one of them over all seeds, asked for twice, and twice as long.
    more = [*arms, Arm("lstm", "topk", rate=0.1), Arm("lstm", "none", length=2.0, seeds=2)]
    pool = Pool(tmp_path)
    paper_runs.train(pool, more, Scale(lstm_steps=10), None, None)
    assert [(plan.compression, plan.seeds) for plan in launched] == [("topk", (1, 2)), ("none", (0, 1))]
    assert launched[1].settings.lstm_steps == 20
    assert [run["seed"] for run in pool.of(more[2])] == [0, 1, 2]
    assert len(pool.of(arms[1])) == 1


def test_a_base_is_trained_on_every_machine_and_compared_on_its_own(launched, monkeypatch, tmp_path):
    base, old, new = (Arm("lstm", how) for how in ("none", "topk", "sign"))
    pool = Pool(tmp_path)
    for machine, arms in (("a", [base, old]), ("b", [base, old, new])):
        monkeypatch.setattr(report, "processor", lambda machine=machine: machine)
        paper_runs.train(pool, arms, Scale(), None, None, [base])
    assert [plan.compression for plan in launched] == ["none", "topk", "none", "sign"]
    launched.clear()
    paper_runs.train(pool, [base, old, new], Scale(), None, None, [base])
    monkeypatch.setattr(report, "processor", lambda: "c")
    paper_runs.train(pool, [base, old, new], Scale(), None, None, [base])
    assert launched == [], "nothing is lacking"
    assert by_seed(pool.of(base)) == "1, 0.9, 0.8; 1, 0.9, 0.8"
    found = report.pairs(pool.of(new), pool.of(base))
    assert [(run["seed"], other["machine"]) for run, other in found] == [(0, "b"), (1, "b"), (2, "b")]
    assert report.pairs(pool.of(old), [run for run in pool.of(base) if run["machine"] == "b"]) == []


def test_a_file_without_bases_is_not_continued_on_another_machine():
    here = {"machine": report.processor()}
    report.check_machine(Path("runs.json"), [here])
    with pytest.raises(SystemExit, match=r"runs\.json .* of another machine \(elsewhere\)"):
        report.check_machine(Path("runs.json"), [here, {"machine": "elsewhere"}])


def test_an_arm_that_fails_costs_only_itself(launched, monkeypatch, tmp_path):
    succeed = convergence.launch_all
    monkeypatch.setattr(
        convergence,
        "launch_all",
        lambda plans, ranks, link: None if plans[0].compression == "bad" else succeed(plans, ranks, link),
    )
    arms = [Arm("lstm", "bad"), Arm("lstm", "none")]
    pool = Pool(tmp_path)
    assert paper_runs.train(pool, arms, Scale(), None, None) == arms[:1]
    assert len(pool.of(arms[1])) == 3


def test_ranks_that_drift_apart_are_an_error():
    ranks = [{"source": None, "runs": [{**found(1.0, 0), "digest": digest}]} for digest in "ab"]
    with pytest.raises(SystemExit, match="different parameters"):
        paper_runs.collect(Arm("lstm", "none"), ranks)


def test_a_table_compares_with_its_first_row(launched, tmp_path):
    pool = Pool(tmp_path)
    rows = [Row("SGD", Arm("resnet", "none"), 90.0), Row("Rank 1", Arm("resnet", "powersgd:rank=1"), 81.0)]
    absent = Row("Rank 2", Arm("resnet", "powersgd:rank=2"), 88.0)
    paper_runs.train(pool, [row.arm for row in rows], Scale(), None, None)
    first, _, base, same, lacking = compare(pool, "ResNet", rows[0], [rows[1], absent]).splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in (first, base, same, lacking)]
    assert cells[0][:3] == ["ResNet", "paper", "paper, worse %"]
    assert cells[1] == ["SGD", "90", "–", "1, 0.9, 0.8", "–", "–", "–", "100", "2.0"]
    assert cells[2][2:6] == ["+10.00", "1, 0.9, 0.8", "+0.00 (+0.00 to +0.00)", "-10.00"]
    assert cells[3][:4] == ["Rank 2", "88", "+2.22", "not run"]


def test_an_arm_over_a_link_is_another_training(launched, monkeypatch, tmp_path):
    here, there = Arm("lstm", "none"), Arm("lstm", "none", link="1gbit", seeds=1)
    pool = Pool(tmp_path)
    monkeypatch.setattr(paper_runs.os, "geteuid", lambda: 1)
    assert paper_runs.train(pool, [here, there], Scale(), None, None) == [there], "hosts need root"
    monkeypatch.setattr(paper_runs.os, "geteuid", lambda: 0)
    assert paper_runs.train(pool, [here, there], Scale(), None, None) == []
    assert [len(pool.of(arm)) for arm in (here, there)] == [3, 1]
    assert pool.of(there)[0]["seconds_by_part"] == [0.5]
    assert "seconds_by_part" not in pool.of(here)[0]


def test_a_quick_run_decides_in_a_few_steps():
    arm = Arm("lstm", "topk", "lgreco:every_steps=100,accordion=[accordion:low=2,every_steps=100,window=9]")
    assert Scale().controller(arm) == arm.controller
    quick = "lgreco:every_steps=3,accordion=[accordion:low=2,every_steps=3,window=3]"
    assert paper_runs.QUICK.controller(arm) == quick
    timed = paper_runs.timed(Arm("lstm", "topk", "lgreco:every_steps=100,window=100"))
    assert timed.controller == "lgreco:every_steps=33,window=33", "no sum is longer than the period"


@pytest.fixture
def commands(monkeypatch):
    """The commands that would have been run; each writes its JSON, but for one that is named bad.py."""
    ran: list[list[str]] = []

    def run(command, check):
        ran.append(command[1:])
        bad = command[1].endswith("bad.py")
        Path(command[command.index("--json") + 1]).write_text("{}", encoding="utf-8")
        return SimpleNamespace(returncode=int(bad))

    monkeypatch.setattr(papers.subprocess, "run", run)
    return ran


def test_what_is_measured_is_not_measured_again_unless_it_resumes(commands, tmp_path):
    found = Results(Pool(tmp_path), tmp_path)
    asked = [
        Measurement("once", "a.py", ("--data={data}",), ("--quick",), hosts=False),
        Measurement("more", "b.py", (), (), resumes=True, hosts=False),
        Measurement("failed", "bad.py", (), (), hosts=False),
    ]
    for _ in range(2):
        lacking = papers.measure(found, asked, paper_runs.FULL, data=Path("text"), cifar=None)
        assert [each.partition(":")[0] for each in lacking] == ["failed"]
    assert [Path(command[0]).name for command in commands] == ["a.py", "b.py", "bad.py", "b.py", "bad.py"]
    assert commands[0][1] == "--data=text"
    assert commands[1][-1] == "--resume"
    assert not (tmp_path / "failed.json").exists(), "it may lack rows"


def test_a_quick_measurement_of_two_names_runs_once(commands, tmp_path):
    found = Results(Pool(tmp_path), tmp_path)
    asked = [Measurement(name, "a.py", (name,), ("--quick",), hosts=False) for name in ("one", "two")]
    assert papers.measure(found, asked, paper_runs.QUICK, data=None, cifar=None) == []
    assert len(commands) == 1
    assert found.measured("two") == {}


def test_time_to_a_loss_is_that_of_the_parts_until_it_is_reached():
    base = {"losses": [10.0 - n for n in range(10)], "bytes": [1] * 10}
    fast = {"losses": [10.0 - 2 * n for n in range(10)], "bytes": [1] * 10, "seconds_by_part": [0.5] * 10}
    assert paper_gravac.seconds_to(fast, base) == pytest.approx(2.5), (
        "3, the base's after 80%, in the fifth part"
    )
    slow = {**fast, "losses": [10.0] * 10}
    assert paper_gravac.seconds_to(slow, base) is None
    found = {0: 1.0, 1: None, 2: 2.0}
    assert paper_gravac.quotient(found, {0: 4.0, 1: 1.0, 2: 4.0, 3: 1.0}) == "3.00 (2 seeds)"
    assert paper_gravac.quotient({0: None}, {0: 1.0}) is None


def test_perplexity_over_time_is_the_mean_over_seeds():
    """Figure 5.2 of Markov 2024."""
    assert "not run" in paper_qsdp.over_time(None)
    runs = [
        {"row": row, "seed": seed, "curve": [[30, seconds + seed, math.log(8 + seed)], [60, 99.0, 0.0]]}
        for row, seconds in (("plain-g16", 10.0), ("w8g8", 4.0))
        for seed in (0, 2)
    ]
    first = paper_qsdp.over_time({"runs": runs}).splitlines()[2]
    assert [cell.strip() for cell in first.split("|")[1:-1]] == ["30", "11", "9.0", "5", "9.0", "2.20"]


@pytest.mark.parametrize(
    ("shapes", "million", "compression", "there"),
    [
        (paper_shapes.lstm, 28.9, "powersgd:rank=1", 310),
        (paper_shapes.lstm, 28.9, "powersgd:rank=2", 203),
        (paper_shapes.lstm, 28.9, "powersgd:rank=4", 120),
        (paper_shapes.resnet50, 25.6, "powersgd:rank=4", 66.5),
        (paper_shapes.transformer_xl, 192.0, "powersgd:rank=32", 14.0),
        (paper_shapes.transformer_lm, 156.0, "powersgd:rank=32", 15.0),
    ],
)
def test_ratios_of_the_papers_models(shapes, million, compression, there):
    assert sum(map(math.prod, shapes())) / 1e6 == pytest.approx(million, rel=0.002)
    assert paper_shapes.ratio(shapes(), compression) == pytest.approx(there, rel=0.006)
