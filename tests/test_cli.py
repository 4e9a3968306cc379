"""The command: what it prints, what it draws, and that bad input is one line and status 2."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

import gradcomp as gc
from gradcomp.cli import main
from gradcomp.core.journal import Journal

PAGE = Path(__file__).resolve().parents[1] / "docs" / "run-log.md"
LAYERS = [
    gc.LayerSpec("conv.weight", (16, 3, 3, 3)),
    gc.LayerSpec("conv.bias", (16,)),
    gc.LayerSpec("fc.weight", (100, 64), "bfloat16"),
]

needs_matplotlib = pytest.mark.skipif(find_spec("matplotlib") is None, reason="needs the extra plot")


def plan(version: int, *chosen: gc.Compressor) -> gc.Plan:
    rows = zip(LAYERS, chosen, strict=True)
    return gc.Plan(version, tuple(gc.Assignment(layer.name, c.family_string(), c.level) for layer, c in rows))


UNIFORM = plan(0, gc.Quantize(4), gc.Cast("float32"), gc.Quantize(4))
MIXED = plan(1, gc.Quantize(2), gc.Cast("float32"), gc.PowerSGD(4))


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Two runs; the second changed its plan at step 500."""
    path = tmp_path / "run.jsonl"
    journal = Journal(path)
    journal.run(2, "", "quantize:bits=4", LAYERS)
    journal.plan(0, UNIFORM, [200, 64, 736])
    journal.run(4, "LGreCo(every_steps=500)", "quantize:bits=4", LAYERS)
    journal.plan(0, UNIFORM, [1_000, 64, 3_936])
    journal.measured(500, 0, 500, 5_100.0)
    journal.choice(500, "error 0.9 of the budget")
    journal.plan(500, MIXED, [500, 64, 1_936])
    journal.close()
    return path


def process(*arguments: object, **env: str) -> subprocess.CompletedProcess[str]:
    """The command as a user has it."""
    command = [sys.executable, "-m", "gradcomp", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, env={**os.environ, **env}, check=False
    )


def gradcomp(*arguments: object) -> subprocess.CompletedProcess[str]:
    """The command in this process."""
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        try:
            status = main([str(argument) for argument in arguments])
        except SystemExit as end:
            status = end.code
    return subprocess.CompletedProcess(arguments, status, out.getvalue(), err.getvalue())


SHOWN = """\
run          2 of 2, by gradcomp VERSION
ranks        4
compression  quantize:bits=4
controller   LGreCo(every_steps=500)

plan 1, from step 500

#  layer        elements   share  compressor  level   dense bytes  bytes sent
1  conv.weight       432   6.31%  quantize    2 bits        1,728         500
2  conv.bias          16   0.23%  exact                        64          64
3  fc.weight       6,400  93.46%  powersgd    rank 4       12,800       1,936
   total           6,848                                   14,592       2,500

history, in bytes that one rank sends a step; ratio: to an uncompressed exchange

   step  version  predicted  ratio  measured  ratio  layers by level
      0        0      5,000  4.38x     5,100  4.29x  quantize: 4 bits x 2; exact x 1
*   500        1      2,500  8.76x         -      -  powersgd: rank 4 x 1; quantize: 2 bits x 1; exact x 1

reasons

step 500: error 0.9 of the budget
"""


@pytest.mark.parametrize("run", [gradcomp, process])
def test_the_last_plan_and_its_history_are_printed(log: Path, run):
    done = run("plan", "show", log)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == SHOWN.replace("VERSION", gc.__version__)


def test_the_page_shows_what_its_example_prints(tmp_path: Path):
    page = PAGE.read_text()
    example, shown = (page.partition(f"```{kind}\n")[2].partition("```")[0] for kind in ("json", "text"))
    (tmp_path / "run.jsonl").write_text(example)
    assert gradcomp("plan", "show", tmp_path / "run.jsonl").stdout == shown


def test_json_has_what_the_tables_show(log: Path):
    assert json.loads(gradcomp("plan", "show", log, "--run", 1, "--json").stdout)["run"] == 1
    shown = json.loads(gradcomp("plan", "show", log, "--json").stdout)
    assert (shown["run"], shown["ranks"], shown["plan"]) == (2, 4, 1)
    assert [(row["name"], row["level"], row["dense_bytes"]) for row in shown["layers"]] == [
        ("conv.weight", 2, 1728), ("conv.bias", None, 64), ("fc.weight", 4, 12_800)
    ]  # fmt: skip
    assert [row["predicted_bytes"] for row in shown["layers"]] == [500, 64, 1_936]
    assert [row["measured_bytes"] for row in shown["history"]] == [5100.0, None]
    assert shown["reasons"] == [{"step": 500, "text": "error 0.9 of the budget"}]


def test_a_log_of_an_earlier_version_has_no_bytes_by_layer(log: Path):
    records = [json.loads(line) for line in log.read_text().splitlines()]
    for record in records:
        record.pop("layer_bytes", None)
    log.write_text("".join(json.dumps(record) + "\n" for record in records))
    shown = gradcomp("plan", "show", log).stdout
    assert "quantize    2 bits        1,728           -" in shown
    assert all(
        row["predicted_bytes"] is None
        for row in json.loads(gradcomp("plan", "show", log, "--json").stdout)["layers"]
    )


def test_a_step_and_a_run_can_be_chosen(log: Path):
    at = gradcomp("plan", "show", log, "--step", 499).stdout
    assert "plan 0, from step 0" in at
    assert "quantize    4 bits" in at
    first = gradcomp("plan", "show", log, "--run", 1).stdout
    assert "1 of 2, by gradcomp" in first
    assert "controller   none" in first
    assert "*     0        0      1,000  14.59x" in first


def test_the_version_is_the_package_s():
    done = process("--version")
    assert (done.returncode, done.stdout) == (0, f"gradcomp {gc.__version__}\n")


def test_no_framework_is_needed(log: Path):
    blocked = (
        "import sys; sys.modules['torch'] = sys.modules['matplotlib'] = None; "
        "from gradcomp.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", blocked, "plan", "show", str(log)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


BAD = {
    "no command": ([], "Missing command"),
    "unknown command": (["plans"], "plans"),
    "no file": (["plan", "show"], "FILE"),
    "missing file": (["plan", "show", "{log}.none"], "No such file"),
    "a directory": (["plan", "show", "."], "Is a directory"),
    "broken file": (["plan", "show", __file__], "line 1: not a JSON object"),
    "empty file": (["plan", "show", os.devnull], "no run in this file"),
    "run as text": (["plan", "show", "{log}", "--run", "x"], "--run"),
    "run 0": (["plan", "show", "{log}", "--run", "0"], "no run 0; there are runs 1 to 2"),
    "run 3": (["plan", "show", "{log}", "--run", "3"], "no run 3; there are runs 1 to 2"),
    "negative step": (["plan", "show", "{log}", "--step", "-1"], "no plan in force at step -1: the first"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD.values(), ids=BAD)
def test_bad_input_is_one_line_and_status_2(log: Path, arguments: list[str], message: str):
    done = gradcomp(*(argument.format(log=log) for argument in arguments))
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("gradcomp")
    assert message in line


def test_bad_input_is_no_traceback_of_a_process(log: Path):
    arguments, message = BAD["missing file"]
    done = process(*(argument.format(log=log) for argument in arguments))
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert message in line


def test_a_run_without_a_plan_says_so(tmp_path: Path):
    journal = Journal(tmp_path / "run.jsonl")
    journal.run(2, "", "none", LAYERS)
    journal.close()
    done = gradcomp("plan", "show", tmp_path / "run.jsonl")
    assert done.returncode == 2
    assert done.stderr.endswith("run.jsonl: run 1 has no plan\n")


def test_names_from_a_file_cannot_control_the_terminal(tmp_path: Path):
    layer = gc.LayerSpec("é\x1b[2J\n\ud800", (8,))
    journal = Journal(tmp_path / "run.jsonl")
    journal.run(2, "\n", "none\x07", [layer])
    journal.plan(0, gc.Plan(0, (gc.Assignment(layer.name, "a\nb", 1),)), [8])
    journal.choice(0, "\x1b")
    journal.close()
    done = process("plan", "show", tmp_path / "run.jsonl", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.replace("\n", "").isprintable()
    assert "\\xe9\\x1b[2J\\n\\ud800" in done.stdout


def test_a_reader_that_leaves_early_is_no_error(log: Path):
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "gradcomp", "plan", "show", str(log)]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


# ------------------------------------------------------------------------------------------ the figure


def draw(log: Path, *arguments: object) -> np.ndarray:
    """The figure's pixels: (height, width, RGBA)."""
    from matplotlib.image import imread

    out = log.with_suffix(".png")
    done = gradcomp("plan", "show", log, "--png", out, *arguments)
    assert done.returncode == 0, done.stderr  # where matplotlib may say that it builds its cache of fonts
    assert done.stdout.endswith(f"\nprofile: {out}\n")
    return imread(out)


def pixels_of(image: np.ndarray, colour: str) -> int:
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return int((np.abs(image[..., :3] - [red, green, blue]).max(axis=-1) < 0.01).sum())


@needs_matplotlib
def test_the_profile_has_sizes_levels_and_the_first_plan(log: Path):
    from gradcomp.contrib.figures import COLOURS, SIZE_COLOUR

    image = draw(log)
    assert image.std() > 0.05
    drawn = {colour: pixels_of(image, colour) for colour in COLOURS[:2]}
    assert min(drawn.values()) > 30, drawn
    assert pixels_of(image, SIZE_COLOUR) > 10_000


@needs_matplotlib
def test_every_kind_of_level_has_a_panel(log: Path):
    from gradcomp.contrib.figures import COLOURS, REFERENCE_COLOUR

    mixed, uniform = draw(log), draw(log, "--step", 0)
    assert mixed.shape[0] > 1.5 * uniform.shape[0]
    assert pixels_of(uniform, COLOURS[0]) > 30
    # Letters have pixels of this grey, too.
    assert pixels_of(mixed, REFERENCE_COLOUR) > 4 * pixels_of(uniform, REFERENCE_COLOUR)


def odd_log(path: Path, layers: list[gc.LayerSpec], rows: list[tuple[str, object]]) -> Path:
    journal = Journal(path)
    journal.run(1, "", "none", layers)
    rows_of = zip(layers, rows, strict=True)
    journal.plan(0, gc.Plan(0, tuple(gc.Assignment(x.name, *row) for x, row in rows_of)), [0] * len(layers))
    journal.close()
    return path


ODD = {
    "no layer": ([], []),
    "no level": ([(8,), (8,)], [("none", None), ("terngrad", None)]),
    "an empty layer": ([(0,), (8,)], [("quantize", 4), ("quantize", 4)]),
    "only empty layers": ([(0,)], [("quantize", 4)]),
    "a scalar": ([()], [("threshold", 0.0)]),
    "levels by block": ([(8,), (8,)], [("quantize", (2, 5)), ("quantize", 4)]),
    "negative levels": ([(8,), (8,)], [("other", -3), ("other", -9)]),
    "levels far apart": ([(8,), (8,)], [("topk", 1e-300), ("topk", 1e18)]),
    "names that are formulas": ([(8,), (8,)], [("$\\frac{", 1), ("$x" * 1000, 1)]),
    "a hidden name": ([(8,)], [("_", 1)]),
}


@needs_matplotlib
@pytest.mark.parametrize(("shapes", "rows"), ODD.values(), ids=ODD)
def test_odd_plans_are_drawn(tmp_path: Path, recwarn, shapes: list, rows: list):
    layers = [gc.LayerSpec(str(i), shape) for i, shape in enumerate(shapes)]
    log = odd_log(tmp_path / "run.jsonl", layers, rows)
    assert main(["plan", "show", str(log), "--png", str(tmp_path / "out.png")]) == 0
    assert (tmp_path / "out.png").stat().st_size > 5_000
    assert [str(warning.message) for warning in recwarn] == []


@needs_matplotlib
def test_a_figure_that_cannot_be_written_is_one_line(log: Path):
    done = gradcomp("plan", "show", log, "--png", log.parent / "missing" / "out.png")
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].endswith("missing/out.png: No such file or directory")


def test_without_matplotlib_the_message_names_the_extra(log: Path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    assert main(["plan", "show", str(log), "--png", str(log.with_suffix(".png"))]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("gradcomp: a figure needs matplotlib: pip install 'gradcomp[plot]' (")
    assert len(captured.err.splitlines()) == 1
    assert not log.with_suffix(".png").exists()
