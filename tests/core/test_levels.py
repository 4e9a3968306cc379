"""Plans in words: names, levels, the histogram."""

from __future__ import annotations

import pytest

import gradcomp as gc
from gradcomp import Assignment, Plan
from gradcomp.core.plan import MOST_LEVELS, histogram, level_kind, level_text, names, readable, short_name

QUANTIZE = gc.Quantize(4).family_string()
SMALL = gc.Quantize(4, 128).family_string()
TOPK = gc.TopK(0.01).family_string()
RANK = gc.PowerSGD(4).family_string()
EXACT = gc.Cast("float32").family_string()


def plan(*rows: tuple[str, object]) -> Plan:
    return Plan(0, tuple(Assignment(str(i), family, level) for i, (family, level) in enumerate(rows)))


KINDS = {
    gc.Quantize(): "bits",
    gc.NUQSGD(): "bits",
    gc.PowerSGD(): "rank",
    gc.SpectralAtomo(): "rank",
    gc.MomentumCorrection(gc.ErrorFeedback("topk")): "density",
    gc.GlobalTopK(): "density",
    gc.Threshold(): "threshold",
    gc.Identity(): None,
    gc.TernGrad(): None,
}


def test_levels_are_named_as_the_compressors_name_them():
    assert {one: level_kind(one.family_string()) for one in KINDS} == KINDS


SHORT = {
    gc.Identity(): "exact",
    gc.Cast("float32"): "exact",
    gc.MomentumCorrection("none"): "exact",
    gc.Cast("bfloat16"): "bfloat16",
    gc.ErrorFeedback("fp16"): "error_feedback[float16]",
    gc.Quantize(4): "quantize",
    gc.TopK(0.01, values="quantize:bits=4"): "topk",
    gc.MomentumCorrection(gc.ErrorFeedback("topk")): "momentum_correction[error_feedback[topk]]",
}


def test_short_names():
    assert {one: short_name(one.family_string()) for one in SHORT} == SHORT
    assert [name == "exact" for name in SHORT.values()] == [one.traits.exact for one in SHORT]


@pytest.mark.parametrize("family", ["", "[", "]", ":", "[[[:]", "nonesuch", "a" + "[" * 100_000])
def test_any_string_has_a_name(family: str):
    assert short_name(family) != "exact"


def test_names_that_would_be_equal_say_in_what_they_differ():
    found = names([QUANTIZE, SMALL, TOPK])
    assert list(found.values()) == ["quantize(bucket_size=128)", "quantize(bucket_size=512)", "topk"]


def test_names_of_different_families_differ():
    swapped = ["a:values=[b:x=1],x=2", "a:values=[b:x=2],x=1"]
    assert len(set(names(swapped).values())) == 2


def test_all_that_is_exact_has_one_name():
    assert set(names(["none", EXACT]).values()) == {"exact"}


TEXTS = [
    (QUANTIZE, 4, "4 bits"),
    (QUANTIZE, 1, "1 bit"),
    (QUANTIZE, (5, 2, 3), "2-5 bits"),
    (QUANTIZE, (1, 1), "1 bit"),
    (RANK, 3, "rank 3"),
    (TOPK, 0.01, "0.01"),
    (TOPK, 0.1 + 0.2, "0.3"),
    (EXACT, None, ""),
    ("another_package", 7, "7"),
]


def test_levels_have_units():
    for family, level, text in TEXTS:
        assert level_text(family, level) == text


def test_the_histogram_counts_by_compressor_and_level():
    rows = [(EXACT, None)] * 21 + [(QUANTIZE, 4)] * 9 + [(TOPK, 0.01)] * 3 + [(QUANTIZE, 2)] * 12
    assert histogram(plan(*rows)) == "quantize: 2 bits x 12, 4 bits x 9; topk: 0.01 x 3; exact x 21"


def test_levels_by_block_are_ranges_in_order_of_their_means():
    rows = [(QUANTIZE, (2, 8, 8)), (QUANTIZE, 4), (QUANTIZE, (2, 5)), (QUANTIZE, (5, 2, 2))]
    assert histogram(plan(*rows)) == "quantize: 2-5 bits x 2, 4 bits x 1, 2-8 bits x 1"


def test_levels_that_print_alike_count_as_one_and_others_are_in_order_of_their_value():
    assert histogram(plan((TOPK, 0.3), (TOPK, 0.1 + 0.2))) == "topk: 0.3 x 2"
    assert histogram(plan((RANK, 10), (RANK, 9))) == "powersgd: rank 9 x 1, rank 10 x 1"
    assert histogram(plan()) == ""


def test_a_histogram_stays_one_line_to_read():
    rows = [(RANK, rank) for rank in range(1, MOST_LEVELS + 2)]
    assert histogram(plan(*rows)) == f"powersgd: rank 1 to rank {MOST_LEVELS + 1}, median rank 7, x 13"
    assert histogram(plan(*rows[:-1])).count(",") == MOST_LEVELS - 1


def test_control_characters_are_escaped():
    assert readable("a\nb\x1b[31m\ud800é") == "a\\nb\\x1b[31m\\ud800é"
