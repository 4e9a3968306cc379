"""``gradcomp mi``: what it prints and draws, and that bad input is one line and status 2."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from gradcomp.analysis import gaussian_pair
from gradcomp.cli import main
from gradcomp.contrib.recording import sample, write
from gradcomp.core.layers import LayerSpec
from gradcomp.version import __version__

LAYERS = [LayerSpec("conv.weight", (16, 4, 3, 3)), LayerSpec("fc\x1b[2J\n.weight", (100, 10))]


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """Three ranks; the first two have one vector in the first layer, and independent ones in the second."""
    sampling = sample(LAYERS, 512, seed=0)
    rows = []
    for step in range(2):
        both = gaussian_pair(0.0, sampling.width, step)
        row = np.stack([*both, both[0]]).astype(np.float32)
        row[1, sampling.part(0)] = row[0, sampling.part(0)]
        rows.append(row)
    path = tmp_path / "run.npz"
    write(path, sampling, 50, 3, [0, 50], rows)
    return path


def shown(capsys, *arguments: object) -> list[str]:
    assert main(["mi", *map(str, arguments)]) == 0
    return capsys.readouterr().out.splitlines()


def test_entropy_information_and_null_are_printed_for_every_layer(recording: Path, capsys):
    lines = shown(capsys, recording)
    assert lines[:3] == [
        f"recorded   2 steps, 0 to 50, by gradcomp {__version__}",
        "ranks      3",
        "histogram  uniform, 2 m^(1/3) bins, correction none",
    ]
    assert lines[4] == "ranks 0 and 1: bits per element, means over steps"
    head, alike, apart = (line.split() for line in lines[6:9])
    assert head[4:] == ["H", "H(b|a)", "I", "shuffled", "excess", "I/H", "Gaussian", "estimated"]
    assert alike[:4] == ["1", "conv.weight", "512", "576"]
    assert (alike[5], alike[9]) == ("0.000", "100.0%")
    assert apart[1] == "fc\\x1b[2J\\n.weight"
    assert abs(float(apart[8])) < 0.1
    assert float(apart[7]) > 0.2  # the null
    assert lines[-1].startswith("mutual information is ")
    assert lines[-1].endswith("%")


def test_pairs_layers_and_histograms_can_be_chosen(recording: Path, capsys):
    lines = shown(
        capsys, recording, "--pair", 0, 2, "--pair", 2, 1, "--layer", "f*", "--bins", 2**32, "--shuffles", 1
    )
    assert lines[2] == "histogram  uniform, 4294967296 bins, correction none"
    assert [line for line in lines if line.startswith("ranks ")][1:] == [
        "ranks 0 and 2: bits per element, means over steps",
        "ranks 2 and 1: bits per element, means over steps",
    ]
    assert lines[-1] == "mutual information is 100.0% of the entropy, and of shuffled pairs 100.0%"
    plain = shown(capsys, recording, "--pair", 2, 0, "--layer", "conv*", "--shuffles", 0)
    assert plain[-1].startswith("mutual information is ")
    assert plain[-1].endswith("of the entropy")
    corrected = shown(capsys, recording, "--correction", "miller-madow", "--binning", "quantile")
    assert corrected[2] == "histogram  quantile, 2 m^(1/3) bins, correction miller-madow"


def test_json_has_a_plane_for_each_pair(recording: Path, capsys):
    printed = json.loads(
        "\n".join(shown(capsys, recording, "--pair", 0, 1, "--pair", 0, 2, "--shuffles", 0, "--json"))
    )
    assert [plane["pair"] for plane in printed["planes"]] == [[0, 1], [0, 2]]
    alike = printed["planes"][0]["layers"][0]
    assert (alike["name"], alike["elements"], alike["shuffled"]) == (
        "conv.weight",
        512,
        None,
    )  # NaN is no JSON
    assert alike["mutual"] == pytest.approx(alike["entropy"])


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="needs the extra plot")
def test_the_figure_is_drawn(recording: Path, capsys):
    out = recording.with_suffix(".png")
    lines = shown(capsys, recording, "--shuffles", 1, "--png", out)
    assert lines[-1] == f"figure: {out}"
    assert out.stat().st_size > 10_000


@pytest.mark.full
def test_neither_a_framework_nor_matplotlib_is_needed(recording: Path):
    blocked = (
        "import sys; sys.modules['torch'] = sys.modules['matplotlib'] = None; "
        "from gradcomp.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", blocked, "mi", str(recording)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


BAD = {
    "no file": (["mi"], "FILE"),
    "missing file": (["mi", "{run}.none"], "cannot read the recording"),
    "another file": (["mi", __file__], "is not a recording of gradients"),
    "rank": (["mi", "{run}", "--pair", "0", "3"], "two of ranks 0 to 2, got 0 and 3"),
    "layer": (["mi", "{run}", "--layer", "x\n"], "no layer matches 'x\\n'"),
    "bins": (["mi", "{run}", "--bins", "1"], "bins must be"),
    "binning": (["mi", "{run}", "--binning", "x"], "--binning"),
    "figure": (["mi", "{run}", "--png", "{run}/x.png"], "Not a directory"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD.values(), ids=BAD)
def test_bad_input_is_one_line_and_status_2(recording: Path, arguments: list[str], message: str, capsys):
    if "--png" in arguments:
        pytest.importorskip("matplotlib")
    try:
        status = main([argument.format(run=recording) for argument in arguments])
    except SystemExit as end:
        status = end.code
    printed = capsys.readouterr()
    assert (status, printed.out) == (2, "")
    (line,) = printed.err.splitlines()
    assert message in line
