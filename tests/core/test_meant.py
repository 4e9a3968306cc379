"""What errors about string forms suggest: that it is what was meant, and that it parses."""

from __future__ import annotations

import ast
import re
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

from gradcomp import ConfigError
from gradcomp.compress import from_string
from gradcomp.compress.registry import registered
from gradcomp.control import controller_from_string
from gradcomp.control.registry import BUILT_IN
from gradcomp.core.strings import closest

COMPRESSORS = {
    "quantise:": "quantize:bits=4",
    "quantise": "quantize:bits=4",
    "quantise:bit=3": "quantize:bits=3",
    "Quantize(bits=4)": "quantize:bits=4",
    "4bit": "quantize:bits=4",
    "int8": "quantize:bits=8",
    "q2": "quantize:bits=2",
    "quantize:8": "quantize:bits=8",
    "quantize:bits": "quantize:bits=4",
    "topk:0.01": "topk:density=0.01",
    "TopK": "topk:density=0.01",
    "top-k: densty = 1e-3": "topk:density=1e-3",
    "powersgd:2": "powersgd:rank=2",
    "fp8": "block_float:format=fp8_e4m3",
    "half": "fp16",
    "bfloat16": "bf16",
    "fp-16": "fp16",
    "none:bits=4": "none",
    "error_feedback": "error_feedback[topk:density=0.01]",
    "erorfeedback[topk:0.01]": "error_feedback[topk:density=0.01]",
    "local_clip[quantise:4]:norm=2": "local_clip[quantize:bits=4]:max_norm=2",
}

CONTROLLERS = {
    "lgreko": "lgreco:every_steps=100",
    "LGreCo": "lgreco:every_steps=100",
    "lgreco:500": "lgreco:every_steps=500",
    "lgreco:every=500": "lgreco:every_steps=500",
    "accordeon": "accordion:low=8,high=2,every_steps=500",
    "kmeans": "kmeans:every_steps=500",
    "kmeans:50": "kmeans:every_steps=50",
    "l-greco:objectiv=time": "lgreco:objective=time",
}


def suggested(text: str, parse) -> str | None:
    """What the error about this text names, if it names something; None too if there is no error."""
    try:
        parse(text)
    except ConfigError as error:
        found = re.search(r"\((?:did you mean|for example) ('.*?'|\".*?\")\??\)", str(error))
        return None if found is None else ast.literal_eval(found[1])
    return None


@pytest.mark.parametrize("text", [*COMPRESSORS, *CONTROLLERS])
def test_what_was_meant_is_suggested(text: str):
    parse, said = (
        (from_string if text in COMPRESSORS else controller_from_string),
        (COMPRESSORS | CONTROLLERS)[text],
    )
    assert suggested(text, parse) == said
    parse(said)


@pytest.mark.parametrize("name", [*registered(), *(kind.name for kind in BUILT_IN)])
def test_an_unknown_field_of_anything_is_answered_by_what_parses(name: str):
    kind = registered().get(name)
    parse = controller_from_string if kind is None else from_string
    inner = "[topk]" if kind is not None and "inner" in kind.__dataclass_fields__ else ""
    inner = "[quantize]" if name == "flat" else inner
    said = suggested(f"{name}{inner}:qqqq=1", parse)
    if said is None:
        assert name in ("codebook", "schedule", "fixed_plan"), (
            "which have no example: they hold what a user chose"
        )
    else:
        parse(said)


WORDS = st.sampled_from([*registered(), *(kind.name for kind in BUILT_IN), "4bit", "fp16", "none", "auto"])


@examples(120)
@given(
    WORDS,
    st.text("quantize topk_", max_size=3),
    st.text(string.ascii_lowercase + "[]:=,/. 0123456789", max_size=24),
)
def test_whatever_is_suggested_parses(name: str, letters: str, tail: str):
    for parse in (from_string, controller_from_string):
        said = suggested(name[: len(name) - len(letters)] + letters + tail, parse)
        if said is not None:
            parse(said)


@pytest.mark.parametrize("text", ["quantize:bits=12", "topk:density=2", "lgreco:alpha=0"])
def test_a_wrong_value_is_not_answered_by_another_name(text: str):
    parse = controller_from_string if text.startswith("lgreco") else from_string
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert "mean" not in str(caught.value)


@pytest.mark.parametrize(
    ("parse", "text", "said"),
    [
        (from_string, "lgrecko", "lgreco is a controller: controller='lgreco'"),
        (from_string, "auto", 'auto is a controller: compression="auto", by itself'),
        (controller_from_string, "quantize:bits=4",
         "quantize is a compressor, not a controller; use compression='quantize:bits=4'"),
        (controller_from_string, "accordion:low=8", r"^'accordion:low=8' lacks high, every_steps"),
        (from_string, "codebook", "'codebook' lacks levels"),
        (from_string, "quantise", r"unknown compression 'quantise' \(did you mean .*; known: adacomp"),
    ],
)  # fmt: skip
def test_the_error_says_where_a_name_goes_what_is_missing_and_the_suggestion_before_all_names(
    parse, text, said
):
    with pytest.raises(ConfigError, match=said):
        parse(text)


def test_the_closest_word_is_found_whatever_its_case_and_separators():
    assert closest("Top-K", ["topk", "clt_k"]) == "topk"
    assert closest("xyz", ["topk", "clt_k"]) is None
