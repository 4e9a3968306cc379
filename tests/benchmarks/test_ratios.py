"""The ratio check: the papers' ratios from the layers of ResNet-18."""

from __future__ import annotations

import pytest
import ratios

from gradcomp import LayerSpec

MATRIX, BIAS = LayerSpec("weight", (64, 100)), LayerSpec("bias", (64,), kind="bias")


@pytest.fixture(scope="module")
def found():
    return {table.classes: {row["title"]: row for row in ratios.measure(table)} for table in ratios.TABLES}


def test_the_layers_are_those_of_resnet18():
    layers = ratios.resnet18_layers(10)
    assert sum(layer.size for layer in layers) == 11_173_962
    assert len(layers) == 62
    assert sum(len(layer.shape) == 4 for layer in layers) == 20


@pytest.mark.full
def test_headers_are_counted_apart_and_small(found):
    for rows in found.values():
        for row in rows.values():
            if "header_bytes" in row:
                assert 0 < row["header_bytes"] < 0.03 * (row["compressed_bytes"] + row["exact_bytes"])
                assert row["sent_ratio"] < row["ratio"]


def test_exact_layers_count_but_for_one_column():
    counted = ratios.count([MATRIX, BIAS], "quantize:bits=8,bucket_size=64,scaling=linf")
    assert counted.dense_bytes == 4 * 6464
    assert counted.exact_bytes == 4 * 64
    assert counted.compressed_bytes == 6400 + 4 * 100
    assert counted.ratio == pytest.approx(4 * 6464 / (6800 + 256))
    assert counted.ratio_without == pytest.approx(4 * 6400 / 6800)


def test_a_ratio_off_its_bar_is_a_miss(monkeypatch):
    monkeypatch.setattr(ratios, "resnet18_layers", lambda classes: [MATRIX, BIAS])
    rows = (
        ratios.Row("right", "quantize:bits=8,bucket_size=64,scaling=linf", 4 * 6464 / 7056, 0.001),
        ratios.Row("wrong", "quantize:bits=8,bucket_size=64,scaling=linf", 4.0, 0.001),
        ratios.Row("unknown", "newest", 4.0, 0.001),
    )
    verdicts = [row["verdict"] for row in ratios.measure(ratios.Table("", 10, rows))]
    assert verdicts[:2] == ["met", "MISSED"]
    assert verdicts[2].startswith("not run: unknown compression 'newest'")


@pytest.mark.full
def test_ratios_are_those_of_the_papers(found):
    ratio = {
        (classes, title): row["ratio"]
        for classes, rows in found.items()
        for title, row in rows.items()
        if "ratio" in row
    }
    for key, expected in (
        ((100, "4 bits, linf, bucket 512 + 4 bytes"), 7.83),
        ((100, "4 bits, minmax, bucket 1024 + 8 bytes"), 7.83),
        ((100, "TopK 1%, 32-bit indices"), 47.97),
        ((10, "PowerSGD, rank 1"), 243.26),
        ((10, "PowerSGD, rank 2"), 135.84),
        ((10, "PowerSGD, rank 4"), 72.13),
        ((100, "PowerSGD, rank 4"), 72.22),
    ):
        assert ratio[key] == pytest.approx(expected, rel=1e-3), key
    assert ratio[100, "TopK 1%, our index coding"] > 70


@pytest.mark.full
def test_all_bars_are_met(run_json):
    rows = run_json("benchmarks/ratios.py")["rows"]
    verdicts = [(row["title"], row["verdict"]) for row in rows if row["bar"]]
    assert [verdict for _, verdict in verdicts] == ["met"] * 7, verdicts
