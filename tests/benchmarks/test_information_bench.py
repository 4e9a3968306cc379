"""The benchmark of the information plane."""

from __future__ import annotations

import information as bench
import numpy as np
import pytest

from gradcomp.analysis import Recording, gaussian_pair, read
from gradcomp.contrib.recording import sample
from gradcomp.core.layers import LayerSpec


def test_drawn_signs_leave_magnitudes_alone_and_a_correlation_none():
    sampling = sample([LayerSpec("a", (50, 40))], 2000, seed=0)
    values = np.stack(gaussian_pair(0.9, 2000)).astype(np.float32)[None]
    found = Recording(sampling, np.array([0]), values, 1)
    drawn = bench.with_drawn_signs(found, 1)
    np.testing.assert_array_equal(drawn.values[:, 0], values[:, 0])
    np.testing.assert_array_equal(np.abs(drawn.values), np.abs(values))
    rows, planes = bench.rows_of("run", found, ((0, 1),), shuffles=1)
    assert len(rows) == len(planes) == len(bench.HISTOGRAMS)
    row = dict(zip(bench.HEADERS, rows[list(bench.HISTOGRAMS).index("2 m^(1/3) quantiles")], strict=True))
    assert 0.1 < float(row["magnitudes"]) < float(row["excess"]) - 0.3


@pytest.mark.full
def test_a_short_run(run_script, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat and the dog sat on the cat " * 2000)
    arguments = ["--run", "lstm", "--data", str(text), "--steps", "3", "--every", "2", "--shuffles", "1"]
    run_script("benchmarks/information.py", *arguments, "--keep", str(tmp_path))
    recording = read(tmp_path / "lstm.npz")
    assert recording.steps.tolist() == [0, 2]
    assert np.isfinite(recording.values).all()
