"""The run log: what is written is read back, whatever else is in the file; anything wrong is named by its line."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from pathlib import Path

import pytest
from core.json_values import json_values
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

from gradcomp import ConfigError, LayerSpec, Policy, Quantize
from gradcomp.core.journal import Journal, Logged, Run, read
from gradcomp.core.run_lines import PERIOD, Factor, Gains, Sample, Window

LAYERS = [LayerSpec("a", (64, 64)), LayerSpec("b/é\n", (64,), "bfloat16")]
PLAN = Policy(Quantize(4)).plan(LAYERS, version=0)
NEXT = Policy(Quantize((2, 3))).plan(LAYERS, version=1)

RUN = {
    "kind": "run", "format": 1, "version": "0", "world": 2, "controller": "", "compression": "",
    "layers": [["a", [8], "float32"]],
}  # fmt: skip
FIRST = {"kind": "plan", "step": 0, "version": 0, "assignments": [["a", "none", None]], "predicted_bytes": 32}
BYTES = {"kind": "bytes", "step": 9, "version": 0, "steps": 9, "measured_bytes": 32.5}


TIMES = Window(
    10, 5, *((0.1, None, 0.25, 2.0),) * 8, skipped=((12, 1), (13, None)), discarded=2
)  # fmt: skip
SAMPLE = Sample(7, 1, 2.5, 0.5, None)
CONTROLLED = Sample(8, 0, 2.5, None, 0.125, PERIOD)
GAINS = Gains(
    9, "*", 0.7, 10.0, 20.0, 3.0, (2.0, 1.5), (Factor(1.0, 1.0, None, 4), Factor(10.0, 0.5, 2.0, 0))
)
#: Lines of these, as they stand in the log of RUN, which has two ranks and one layer.
STEPS = {
    "kind": "steps", "step": 0, "steps": 10, **{name: [0.5, None] for name in Window.BY_RANK}, "skipped": [[3, 0]],
    "discarded": 0,
}  # fmt: skip
LAYER = {"kind": "layer", "step": 1, "layer": 0, "norm": 1, "residual": None, "error": 0.5, "over": "step"}
GAIN = {
    "kind": "gains", "step": 1, "row": "*", "epsilon": 0.7, "minimum": 10, "candidate": 20, "prior": 3.5,
    "post": [2, 1], "factors": [[10, 0.5, None, 3]],
}  # fmt: skip


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.jsonl"


@pytest.fixture
def written(path: Path):
    """``written(record, ...)``: a log of these lines; text is a line as it stands."""

    def write(*records: dict | str) -> Path:
        lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
        path.write_text("".join(line + "\n" for line in lines))
        return path

    return write


def log_a_run(path: Path) -> None:
    journal = Journal(path)
    journal.run(4, "fixed", "quantize:bits=4", LAYERS)
    journal.plan(0, PLAN, [90, 10.2])
    assert read(path)[-1].plans[-1].plan == PLAN, "every line is out when the call returns"
    journal.measured(20, 0, 20, 101.5)
    journal.measured(20, 0, 0, float("nan"))  # bytes of no step are not logged
    journal.choice(20, "two bits will do")
    for line in (TIMES, SAMPLE, GAINS, CONTROLLED):
        journal.line(line)
    journal.plan(20, NEXT, [50, 10])
    journal.close()


def test_what_was_logged_is_read(path: Path):
    log_a_run(path)
    (run,) = read(path)
    assert (run.world, run.controller, run.compression) == (4, "fixed", "quantize:bits=4")
    assert run.layers == tuple(LAYERS)
    assert run.plans == (
        Logged(0, PLAN, 100, 101.5, 20, (90, 10)),
        Logged(20, NEXT, 60, layer_bytes=(50, 10)),
    )
    assert run.choices == ((20, "two bits will do"),)
    assert (run.windows, run.samples, run.gains) == ((TIMES,), (SAMPLE, CONTROLLED), (GAINS,))


def test_a_run_after_one_that_was_killed_begins_a_line(path: Path):
    log_a_run(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-7])
    log_a_run(path)
    log_a_run(path)
    first, second, third = read(path)
    assert (len(first.plans), len(second.plans)) == (1, 2)
    assert second == third
    assert path.read_bytes() == whole[:-7] + b"\n" + whole + whole


def test_a_cut_log_holds_what_came_before_the_cut(path: Path):
    log_a_run(path)
    whole = path.read_bytes()
    (complete,) = read(path)
    for length in {*range(0, len(whole), 9), len(whole) - 1}:
        path.write_bytes(whole[:length])
        found = read(path)
        plans = found[0].plans if found else ()
        assert [logged.plan for logged in plans] == [x.plan for x in complete.plans[: len(plans)]]


def test_only_the_end_may_be_cut(written):
    path = written(RUN, json.dumps(FIRST)[:-9], BYTES)
    with pytest.raises(ConfigError, match=r"run\.jsonl, line 2: not a JSON object"):
        read(path)


def test_unknown_kinds_and_fields_are_skipped(written):
    later = {"kind": "weather", "step": "rain"}
    (run,) = read(written(later, {**RUN, "more": 1}, later, {**FIRST, "more": [1]}))
    assert [logged.predicted_bytes for logged in run.plans] == [32]


BROKEN = {
    "not JSON": ["{"],
    "nothing": [""],
    "a list": ["[]"],
    "null": ["null"],
    "not UTF-8": ["\udcff"],
    "nested too deeply": ["[" * 100_000],
    "no kind": [{"step": 1}],
    "kind as number": [{"kind": 1}],
    "another format": [{**RUN, "format": 2}],
    "no format": [{**RUN, "format": None}],
    "no ranks": [{**RUN, "world": 0}],
    "version as number": [{**RUN, "version": 1}],
    "layers as text": [{**RUN, "layers": "abc"}],
    "a layer as text": [{**RUN, "layers": ["abc"]}],
    "a layer of unknown dtype": [{**RUN, "layers": [["a", [1], "int3"]]}],
    "a layer of negative size": [{**RUN, "layers": [["a", [-1], "float32"]]}],
    "a layer of fractional size": [{**RUN, "layers": [["a", [1.5], "float32"]]}],
    "a layer too large": [{**RUN, "layers": [["a", [2**40, 2**40], "float32"]]}],
    "a layer twice": [{**RUN, "layers": RUN["layers"] * 2}],
    "a plan before its run": [FIRST],
    "a choice before its run": [{"kind": "choice", "step": 1, "text": ""}],
    "step as boolean": [RUN, {**FIRST, "step": True}],
    "negative step": [RUN, {**FIRST, "step": -1}],
    "no version": [RUN, {**FIRST, "version": None}],
    "no assignments": [RUN, {**FIRST, "assignments": None}],
    "assignments that are none": [RUN, {**FIRST, "assignments": [["a"]]}],
    "another layer": [RUN, {**FIRST, "assignments": [["b", "none", None]]}],
    "a layer without assignment": [RUN, {**FIRST, "assignments": []}],
    "a level that no axis holds": [RUN, {**FIRST, "assignments": [["a", "x", 10**400]]}],
    "a block's level that no axis holds": [RUN, {**FIRST, "assignments": [["a", "x", [1, 10**400]]]}],
    "level NaN": [RUN, {**FIRST, "assignments": [["a", "x", float("nan")]]}],
    "fractional prediction": [RUN, {**FIRST, "predicted_bytes": 1.5}],
    "bytes of no plan": [RUN, FIRST, {**BYTES, "version": 1}],
    "bytes of another run's plan": [RUN, FIRST, RUN, BYTES],
    "bytes as text": [RUN, FIRST, {**BYTES, "measured_bytes": "1"}],
    "bytes as boolean": [RUN, FIRST, {**BYTES, "measured_bytes": True}],
    "negative bytes": [RUN, FIRST, {**BYTES, "measured_bytes": -1}],
    "infinite bytes": [RUN, FIRST, {**BYTES, "measured_bytes": float("inf")}],
    "bytes of no step": [RUN, FIRST, {**BYTES, "steps": 0}],
    "choice without text": [RUN, {"kind": "choice", "step": 1}],
    "bytes of another number of layers": [RUN, {**FIRST, "layer_bytes": [16, 16]}],
    "a layer's bytes as text": [RUN, {**FIRST, "layer_bytes": ["32"]}],
    "times before their run": [STEPS],
    "times of another number of ranks": [RUN, {**STEPS, "exposed": [0.5]}],
    "times of no step": [RUN, {**STEPS, "steps": 0}],
    "negative time": [RUN, {**STEPS, "seconds": [-0.5, None]}],
    "time NaN": [RUN, {**STEPS, "wire": [float("nan"), 0]}],
    "time that no axis holds": [RUN, {**STEPS, "codec": [1e300, 0]}],
    "no times": [RUN, {**STEPS, "backward": None}],
    "a skipped step without a layer": [RUN, {**STEPS, "skipped": [3]}],
    "a skipped step of an unknown layer": [RUN, {**STEPS, "skipped": [[3, 1]]}],
    "a sample of an unknown layer": [RUN, {**LAYER, "layer": 1}],
    "a sample of a layer by name": [RUN, {**LAYER, "layer": "a"}],
    "a sample over nothing": [RUN, {**LAYER, "over": "year"}],
    "a sample without a norm": [RUN, {**LAYER, "norm": None}],
    "gains of no row": [RUN, {**GAIN, "row": 1}],
    "gains without norms": [RUN, {**GAIN, "post": [1]}],
    "a gain without steps": [RUN, {**GAIN, "factors": [[10, 0.5, None]]}],
    "a factor as text": [RUN, {**GAIN, "factors": [["10", 0.5, None, 3]]}],
}


@pytest.mark.parametrize("records", BROKEN.values(), ids=BROKEN)
def test_a_broken_line_is_named(path: Path, records: list):
    lines = [record if isinstance(record, str) else json.dumps(record) for record in [*records, FIRST]]
    path.write_bytes("".join(line + "\n" for line in lines).encode(errors="surrogateescape"))
    with pytest.raises(ConfigError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}, line {len(records)}: ")
    assert len(str(caught.value)) < 300 + len(str(path))


@pytest.fixture(scope="module")
def one_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("journal") / "run.jsonl"


@examples(60)
@given(
    record=st.sampled_from([RUN, FIRST, BYTES, STEPS, LAYER, GAIN]), key=st.integers(0, 12), value=json_values
)
def test_any_field_is_read_or_a_config_error(one_path: Path, record: dict, key: int, value):
    changed = {**record, list(record)[key % len(record)]: value}
    before = [] if record is RUN else [RUN] if record is FIRST else [RUN, FIRST]
    one_path.write_text("".join(json.dumps(line) + "\n" for line in [*before, changed]))
    with contextlib.suppress(ConfigError):
        assert all(isinstance(run, Run) for run in read(one_path))


# ------------------------------------------------------------------------------------------ writing


@pytest.fixture
def ordinary_user():
    """Root may write everywhere."""
    if os.geteuid() != 0:
        yield
        return
    try:
        os.seteuid(65534)
    except PermissionError:
        pytest.skip("root without the right to become an ordinary user")
    yield
    os.seteuid(0)


def test_a_path_without_permission_is_refused(tmp_path: Path, request: pytest.FixtureRequest):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    request.getfixturevalue("ordinary_user")
    with pytest.raises(
        ConfigError, match=r"cannot append to the run log .*closed/run\.jsonl: Permission denied"
    ):
        Journal(closed / "run.jsonl")


@pytest.mark.parametrize("name", ["missing/run.jsonl", "."], ids=["no directory", "a directory"])
def test_a_path_that_cannot_be_opened_is_refused(tmp_path: Path, name: str):
    with pytest.raises(ConfigError, match="cannot append to the run log") as caught:
        Journal(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(path: Path):
    with pytest.raises(ConfigError, match=f"cannot read the run log {path}: No such file"):
        read(path)


def test_closing_twice_is_fine_and_ends_the_log(path: Path):
    journal = Journal(path)
    journal.run(4, "", "none", LAYERS)
    journal.close()
    journal.close()
    journal.plan(0, PLAN, [90, 10.2])
    assert read(path)[0].plans == ()


def test_lines_of_several_threads_stay_whole(path: Path):
    journal = Journal(path)
    journal.run(4, "", "none", LAYERS)
    text = "x" * 10_000
    threads = [
        threading.Thread(target=lambda: [journal.choice(1, text) for _ in range(50)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    journal.close()
    assert read(path)[0].choices == ((1, text),) * 200


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_ends_the_log_with_one_warning(tmp_path: Path, caplog):
    link = tmp_path / "run.jsonl"
    link.symlink_to("/dev/full")
    journal = Journal(link)
    journal.run(4, "", "none", LAYERS)
    journal.plan(0, PLAN, [90, 10.2])
    journal.close()
    assert [record.getMessage() for record in caplog.records] == [
        f"the run log {link} ends here: No space left on device"
    ]


# ------------------------------------------------------------------------------------------ what a run says


def test_dense_bytes_are_those_of_the_statistics(written):
    four, one = read(written({**RUN, "world": 4}, {**RUN, "world": 1}))
    assert four.dense_bytes == 2 * 32 * 3 // 4
    assert four.ratio(6) == 8.0
    assert one.ratio(0) is one.ratio(6) is None


def test_the_plan_of_a_step_is_the_last_one_that_began(written):
    plans = [{**FIRST, "step": step, "version": version} for version, step in enumerate([2, 5, 5, 9])]
    (run,) = read(written(RUN, *plans))
    in_force = {step: logged.plan.version for step in range(12) if (logged := run.in_force(step))}
    assert in_force == {2: 0, 3: 0, 4: 0, **dict.fromkeys(range(5, 9), 2), 9: 3, 10: 3, 11: 3}
    assert run.in_force().plan.version == 3


def test_bytes_belong_to_the_last_plan_of_their_version(written):
    again = {**FIRST, "step": 4}
    (run,) = read(written(RUN, FIRST, again, BYTES))
    assert [logged.measured_bytes for logged in run.plans] == [None, 32.5]
