"""Timelines of several ranks: their clocks are aligned within the stated bound, and one trace is made of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reduce.schemes import REDUCTIONS, fits

from gradcomp import Cast, ConfigError, LayerSpec, Policy, PowerSGD, Quantize, TopK
from gradcomp.cli import main
from gradcomp.core.alignment import align
from gradcomp.core.timelines import read_all
from gradcomp.core.topology import Topology
from gradcomp.core.trace import PHASES, ExchangeId, Timeline
from gradcomp.testing.simulation import Simulation, random_gradients

LAYERS = [
    LayerSpec("a", (40, 30)),
    LayerSpec("b", (50, 20)),
    LayerSpec("c", (900,)),
    LayerSpec("d", (30, 30)),
]
#: Messages of every kind: codes that are added, a gather of indices, sums of factors, and a cast.
POLICY = Policy(overrides={"a": Quantize(4, 64), "b": PowerSGD(2), "c": TopK(0.1), "d": Cast("bfloat16")})


def recorded(folder: Path, world: int, steps: int, **options: Any) -> list[Path]:
    """The timelines of ranks that are simulated in one process, and so read one clock."""
    simulation = Simulation(LAYERS, POLICY, world, slice_elements=1000, reorder=False, **options)
    files = [folder / f"t-{rank}.json" for rank in range(world)]
    timelines = [Timeline(file, rank) for rank, file in enumerate(files)]
    for timeline, rank in zip(timelines, simulation.ranks, strict=True):
        timeline.listen(rank.pipeline.trace, ExchangeId("job", "all-0", tuple(range(world))))
    for step in range(steps):
        simulation.step(random_gradients(LAYERS, world, seed=step))
    for timeline in timelines:
        timeline.close()
    return files


def change(
    file: Path, *, clock: str | None = None, ahead: float = 0.0, ppm: float = 0.0, **about: Any
) -> Path:
    """Gives a timeline another clock, which is ahead and fast."""
    content = json.loads(file.read_text())
    head = content["traceEvents"][0]["args"]
    head["clock"], head["zero"] = head["clock"] if clock is None else clock, head["zero"] + ahead
    for event in content["traceEvents"]:
        for name in {"ts", "dur"} & event.keys():
            event[name] *= 1 + 1e-6 * ppm
        if "exchange" in event.get("args", {}):
            event["args"].update(about)
    changed = file.with_name(f"changed-{file.name}")
    changed.write_text(json.dumps(content))
    return changed


def errors(true: list[Path], changed: list[Path], first: int, last: int) -> list[tuple[float, float]]:
    """By rank, the largest error of an aligned time in the window, and the bound that is stated for it."""
    theirs, ours = read_all(map(str, true)), read_all(map(str, changed))
    found = []
    for fit, mine, real in zip(align(ours, first, last), ours, theirs, strict=True):
        times = [
            abs(fit.at(mine.seconds(event)[1]) - real.seconds(same)[1])
            for event, same in zip(mine.events, real.events, strict=True)
            if first <= event.get("args", {}).get("step", -1) <= last
        ]
        found.append((max(times), fit.error_seconds))
    return found


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_planted_clocks_are_found_within_the_bound(tmp_path: Path, reduction: str) -> None:
    """Clocks hours apart, one of them 40 parts in a million fast and one as slow, over each reduction."""
    world = 3
    assert fits(reduction, world)
    topology = Topology((0, 0, 1)) if reduction == "hierarchical" else Topology.one_host(world)
    files = recorded(tmp_path, world, 40, reduction=reduction, topology=topology)
    planted = [
        change(files[0], clock="a"),
        change(files[1], clock="b", ahead=4711.5, ppm=40),
        change(files[2], clock="c", ahead=-99.0, ppm=-40),
    ]
    found = errors(files, planted, 10, 30)
    assert found[0] == (0.0, 0.0)
    for error, bound in found[1:]:
        assert error <= bound + 1e-6
        assert bound < 0.1, "a step takes milliseconds"


def written(path: Path, rank: int, rounds: dict[int, tuple[float, float]], clock: str, **about: Any) -> str:
    """A timeline with one round of all ranks for each step, whose begin and end are given in seconds."""
    named = {"name": "bucket 0", "bucket": 0, "job": "j", "exchange": "all-0", "ranks": [0, 1], **about}
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": rank, "name": "process_name", "args": {"clock": clock, "zero": 0.0, "began": 0.0}},
        {"ph": "M", "pid": rank, "tid": 1, "name": "thread_name", "args": named},
    ]
    for step, (begin, end) in rounds.items():
        args = {"step": step, "round": 0, "from": [1 - rank]}
        times = {"ts": 1e6 * begin, "dur": 1e6 * (end - begin)}
        events.append({"ph": "X", "pid": rank, "tid": 1, "name": "send", "args": args, **times})
    path.write_text(json.dumps({"traceEvents": events}))
    return str(path)


def exchange(
    folder: Path, steps: int, skew: float, ppm: float, seed: int = 0, period: float = 0.05
) -> tuple[list[str], float]:
    """Two ranks that swap messages, which take 100 to 300 microseconds; rank 1 is ``skew`` seconds late. The drift."""
    draw = np.random.default_rng(seed)
    begins = np.arange(steps)[:, None] * period + draw.uniform(0, 0.01, (steps, 2)) + [0.0, skew]
    ends = begins.max(axis=1)[:, None] + draw.uniform(1e-4, 3e-4, (steps, 2))
    rate = 1 + 1e-6 * ppm
    files = []
    for rank in range(2):
        scale, shift = (rate, 1234.5) if rank else (1.0, 0.0)
        rounds = {s: (scale * begins[s, rank] + shift, scale * ends[s, rank] + shift) for s in range(steps)}
        files.append(written(folder / f"{rank}.json", rank, rounds, f"clock {rank}"))
    return files, rate


@pytest.mark.parametrize("steps", [1, 7, 400, 20_000])
@pytest.mark.parametrize("ppm", [0.0, -50.0])
def test_the_bound_holds_and_is_that_of_the_fastest_messages(tmp_path: Path, steps: int, ppm: float) -> None:
    """Drift of 50 parts in a million adds up to 50 ms over the longest window; the bound stays that of a message."""
    files, rate = exchange(tmp_path, steps, 0.0, ppm, seed=steps)
    timelines = read_all(files)
    for first, last in ((0, steps - 1), (steps // 2, steps // 2 + 10)):
        fit = align(timelines, first, last)[1]
        for step in (first, min(last, steps - 1)):
            time = 1234.5 + rate * (0.05 * step + 0.005)
            assert abs(fit.at(time) - (time - 1234.5) / rate) <= fit.error_seconds + 1e-6
        if steps >= 400:
            assert fit.error_seconds < 4e-4


def test_ranks_of_one_host_need_no_messages_and_have_no_error(tmp_path: Path) -> None:
    rounds = {step: (0.1 * step, 0.1 * step + 0.05) for step in range(3)}
    for rank in range(3):
        written(tmp_path / f"{rank}.json", rank, rounds if rank < 2 else {9: (0.9, 1.0)}, "same")
    fits_found = align(read_all(str(tmp_path / f"{rank}.json") for rank in range(3)), 0, 9)
    assert [(fit.offset, fit.error_seconds) for fit in fits_found] == [(0.0, 0.0)] * 3


def test_a_clock_that_nothing_is_known_of_is_refused(tmp_path: Path) -> None:
    files, _ = exchange(tmp_path, 5, 0.0, 0.0)
    alone = written(tmp_path / "2.json", 2, {0: (0.0, 1.0)}, "another", exchange="all-1", ranks=[2])
    with pytest.raises(ConfigError, match="rank 2 exchanged no messages with the others in these steps"):
        align(read_all([*files, alone]), 0, 4)


def test_times_of_different_runs_contradict_each_other(tmp_path: Path) -> None:
    """With names of the job that are equal by accident: the second run is 1% slower."""
    (first, _), _ = exchange(tmp_path, 200, 0.0, 0.0)
    other = tmp_path / "other"
    other.mkdir()
    _, second = exchange(other, 200, 0.0, 0.0, seed=1, period=0.0505)[0]
    with pytest.raises(
        ConfigError, match=r"contradicts the other files: messages would have arrived \d+\.\d+ ms"
    ):
        align(read_all([first, second]), 0, 199)


# ------------------------------------------------------------------------------------------ the command


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main(["trace", *map(str, arguments)])
    return code, *capsys.readouterr()


def test_the_trace_has_the_windows_phases_of_all_ranks_by_the_profilers_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = recorded(tmp_path, 3, 6)
    change(files[1], clock="other", ahead=77.0).replace(files[1])
    out = tmp_path / "trace.json"
    code, printed, complaint = run(
        capsys, tmp_path / "t-{rank}.json", "-o", out, "--from-step", 2, "--to-step", 3, "--json"
    )
    assert (code, complaint) == (0, "")
    summary, trace = json.loads(printed), json.loads(out.read_text())
    assert [(row["rank"], row["steps"]) for row in summary["ranks"]] == [(0, 2), (1, 2), (2, 2)]
    assert summary["missing_ranks"] == []
    assert summary["ranks"][1]["error_bound_ms"] > 0 == summary["ranks"][2]["error_bound_ms"]
    assert trace["otherData"] == summary
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {event["pid"] for event in spans} == {0, 1, 2}
    assert {event["args"]["step"] for event in spans} == {2, 3}
    assert {event["name"] for event in spans} <= {f"gradcomp: {phase}" for phase in PHASES}
    assert {"gradcomp: compress", "gradcomp: send", "gradcomp: decompress"} <= {
        event["name"] for event in spans
    }
    assert min(event["ts"] for event in spans) == 0.0
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"]
    assert names == ["rank 0", "rank 1", "rank 2"]

    # The ends of a step's last round lie together again, as they did before the clock was changed.
    bound = 1e3 * summary["ranks"][1]["error_bound_ms"]
    for step in (2, 3):
        ends = {
            rank: max(e["ts"] + e["dur"] for e in spans if e["pid"] == rank and e["args"]["step"] == step)
            for rank in range(3)
        }
        begins = {
            rank: min(e["ts"] for e in spans if e["pid"] == rank and e["args"]["step"] == step)
            for rank in range(3)
        }
        assert begins[1] < ends[0] + bound
        assert begins[0] < ends[1] + bound

    code, printed, _ = run(capsys, files[0], files[2], "-o", out)
    assert code == 0
    assert printed.startswith("steps 0 to 5 of 2 ranks: ")
    assert printed.endswith("no file of rank 1\n")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is no timeline that GRADCOMP_TIMELINE or start_timeline"),
        (b"\xff", "cannot read the timeline"),
        (b"[]", "is no timeline"),
        (b'{"traceEvents": []}', "is no timeline"),
        (b'{"traceEvents": [{"ph": "X", "ts": 1, "pid": 0, "args": {}}]}', "is no timeline"),
        (None, "cannot read the timeline"),
    ],
)
def test_a_broken_file_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, says: str
) -> None:
    file = tmp_path / "broken.json"
    if content is not None:
        file.write_bytes(content)
    code, _, complaint = run(capsys, file, "-o", tmp_path / "out.json")
    assert code == 2
    assert says in complaint
    assert complaint.count("\n") == 1
    assert not (tmp_path / "out.json").exists()


def test_whatever_is_missing_in_a_file_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every key of every event is taken away, or made a text, in turn."""
    (first, second), _ = exchange(tmp_path, 2, 0.0, 0.0)
    whole = json.loads(Path(second).read_text())["traceEvents"]
    changed, codes = tmp_path / "changed.json", set()
    for place, event in enumerate(whole):
        for holder, key in [(None, key) for key in event] + [("args", key) for key in event["args"]]:
            for value in (None, "text", -1, [], {}):
                events = json.loads(json.dumps(whole))
                target = events[place] if holder is None else events[place][holder]
                if value is None:
                    del target[key]
                else:
                    target[key] = value
                changed.write_text(json.dumps({"traceEvents": events}))
                code, _, complaint = run(capsys, first, changed, "-o", tmp_path / "out.json")
                assert complaint.count("\n") == (code != 0), (place, holder, key, value, complaint)
                codes.add(code)
    assert codes == {0, 2}


def test_files_that_do_not_belong_together_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (first, second), _ = exchange(tmp_path, 5, 0.0, 0.0)
    out = tmp_path / "out.json"
    other_job = written(tmp_path / "j.json", 1, {0: (0.0, 1.0)}, "x", job="another")
    empty = tmp_path / "empty.json"
    Timeline(empty, rank=1).close()
    bad_time = written(tmp_path / "nan.json", 1, {0: (float("nan"), 1.0)}, "x")
    for arguments, says in (
        ((first, other_job), "are of different jobs"),
        ((first, first), "are both of rank 0"),
        ((first, empty), "no step was recorded"),
        ((first, bad_time), "a time is not finite"),
        (
            (first, second, "--from-step", 7),
            "no step of 7 to the end was recorded: the files have steps 0 to 4",
        ),
        ((tmp_path / "none-{rank}.json",), "no file is named"),
    ):
        code, _, complaint = run(capsys, *arguments, "-o", out)
        assert (code, complaint.count("\n")) == (2, 1)
        assert says in complaint
    code, _, complaint = run(capsys, first, second, "-o", tmp_path / "missing/out.json")
    assert code == 2
    assert "cannot write the trace" in complaint
