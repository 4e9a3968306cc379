"""The information plane of a recording, and its figure."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradcomp.analysis import Recording, gaussian_pair, information_plane, mutual_information
from gradcomp.contrib.recording import sample
from gradcomp.core.errors import ConfigError
from gradcomp.core.layers import LayerSpec

LAYERS = [LayerSpec("alike", (40, 50)), LayerSpec("apart", (40, 50)), LayerSpec("one", (1, 1))]

needs_matplotlib = pytest.mark.skipif(find_spec("matplotlib") is None, reason="needs the extra plot")


def recording(ranks: int = 3) -> Recording:
    """Of ranks 0 and 2 the first layer has a correlation of 0.9, all else is independent."""
    sampling = sample(LAYERS, 10_000, seed=0)
    random = np.random.default_rng(1)
    values = random.standard_normal((3, ranks, sampling.width)).astype(np.float32)
    for step in range(3):
        values[step, 0, :2000], values[step, -1, :2000] = gaussian_pair(0.9, 2000, step)
    return Recording(sampling, np.array([0, 10, 20]), values, 10)


def test_each_layer_and_step_has_the_information_of_its_vectors():
    found = recording()
    plane = information_plane(found, (0, 2), bins=16, shuffles=0)
    assert [layer.name for layer in plane.layers] == ["alike", "apart"]
    assert plane.elements == (2000, 2000)
    for layer in range(2):
        for step in range(3):
            one = mutual_information(found.of(layer, 0)[step], found.of(layer, 2)[step], bins=16, shuffles=0)
            assert plane.mutual[layer, step] == pytest.approx(one.mutual, abs=1e-12)
            assert plane.entropy[layer, step] == one.entropy_y
            assert plane.conditional[layer, step] == one.conditional


def test_gradients_that_are_alike_are_above_the_null_and_others_are_at_it():
    plane = information_plane(recording(), (0, 2))
    excess = plane.mean(plane.mutual - plane.null)
    assert excess[0] > 0.8
    assert abs(excess[1]) < 0.05
    assert plane.mean(plane.gaussian)[0] == pytest.approx(1.198, abs=0.1)
    assert plane.calibration[0] == pytest.approx(plane.mean(plane.mutual)[0], abs=0.1)
    assert plane.calibration[1] == pytest.approx(plane.mean(plane.null)[1], abs=0.05)
    other = information_plane(recording(), (0, 1))
    assert abs(other.mean(other.mutual - other.null)[0]) < 0.05


def test_a_step_without_a_gradient_is_left_out():
    found = recording()
    found.values[1, 2, :2000] = np.nan
    found.values[2, 0, 5] = np.inf
    plane = information_plane(found, (0, 2), shuffles=1)
    assert np.isnan(plane.mutual[0]).tolist() == [False, True, True]
    assert np.isfinite(plane.mutual[1]).all()
    assert plane.mean(plane.mutual)[0] == plane.mutual[0, 0]
    found.values[:, 2, :2000] = np.nan
    assert np.isnan(information_plane(found, (0, 2), shuffles=1).mean(plane.mutual * np.nan)).all()


def test_layers_are_chosen_by_pattern():
    assert [layer.name for layer in information_plane(recording(), layers=["a*k*"], shuffles=0).layers] == [
        "alike"
    ]


BAD: dict[str, tuple[Any, dict[str, Any], str]] = {
    "one rank": (recording(1), {}, "1 rank; a comparison needs two"),
    "a rank that is not there": (recording(), {"pair": (0, 3)}, "two of ranks 0 to 2, got 0 and 3"),
    "a rank and itself": (recording(), {"pair": (1, 1)}, "got 1 and 1"),
    "a negative rank": (recording(), {"pair": (0, -1)}, "got 0 and -1"),
    "no such layer": (recording(), {"layers": ["x"]}, "no layer matches 'x'; there are 'alike'"),
    "too small a layer": (recording(), {"layers": ["one"]}, "no layer of at least 2"),
    "bins": (recording(), {"bins": 0}, "bins must be"),
}


@pytest.mark.parametrize(("found", "settings", "message"), BAD.values(), ids=BAD)
def test_bad_input_is_a_typed_error(found: Recording, settings: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        information_plane(found, **settings)


def test_a_recording_without_steps_is_refused():
    found = recording()
    empty = Recording(found.sampling, found.steps[:0], found.values[:0], 10)
    with pytest.raises(ConfigError, match="no step"):
        information_plane(empty)


@pytest.mark.full
@needs_matplotlib
def test_the_figure_has_a_row_of_panels_for_every_pair(tmp_path: Path):
    from matplotlib.image import imread

    from gradcomp.contrib.figures import COLOURS, REFERENCE_COLOUR
    from gradcomp.plots import draw_information

    planes = [information_plane(recording(), pair, shuffles=1) for pair in ((0, 2), (0, 1))]
    draw_information(planes[:1], tmp_path / "one.png")
    draw_information(planes, tmp_path / "two.png", ["$a", "b"])
    one, two = imread(tmp_path / "one.png"), imread(tmp_path / "two.png")
    assert two.shape[0] == 2 * one.shape[0]
    for colour in (COLOURS[0], REFERENCE_COLOUR):
        wanted = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        assert (np.abs(one[..., :3] - wanted).max(axis=-1) < 0.02).sum() > 30
