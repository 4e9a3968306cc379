"""The pages of the papers: they say what the committed runs say, and a run that is there is not run again."""

from __future__ import annotations

import importlib

import convergence
import paper_runs
import papers
import pytest
from paper_powersgd import lstm_ratio
from paper_runs import Arm, Pool, Results, Scale
from paper_tables import Row, compare, order, resolved, worse


def found(metric: float, seed: int) -> dict:
    """What a rank tells of a run."""
    return {
        "seed": seed, "metric": metric, "digest": "d", "seconds": 1.0, "steps": 4, "step_seconds": 0.5,
        "bytes_per_step": 100.0, "ratio": 2.0, "loss_over_time": [1.0], "bytes_over_time": [100.0],
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
    own, base = ({"seed": 0, "metric": metric, "steps": 4, "source": None} for metric in (0.9, 1.0))
    assert worse([own], [base], "resnet") == pytest.approx([10.0])
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


def test_ratios_of_the_papers_lstm():
    assert [round(lstm_ratio(rank)) for rank in (1, 2, 4)] == [310, 203, 120]
