"""String forms of compressors in compressors: every one reads back, and what is impossible is refused with a reason."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

from gradcomp import (
    Cast,
    ConfigError,
    DensitySchedule,
    ErrorFeedback,
    Identity,
    LocalClip,
    MomentumCorrection,
    Quantize,
    TopK,
    Warmup,
)
from gradcomp.compress import at_level, from_string

coded = st.one_of(
    st.builds(Cast, st.sampled_from(["float32", "float16", "bfloat16"])),
    # Of more than two bits feedback may be around all of these.
    st.builds(Quantize, st.integers(3, 8), st.integers(1, 999), st.sampled_from(["minmax", "linf"])),
    st.builds(Quantize, st.integers(7, 8), st.integers(1, 999), st.just("l2")),
    st.just(Identity()),
)
top = st.builds(TopK, st.floats(1e-9, 1), values=coded, indices=st.sampled_from(["auto", "deflate"]))


def wrapped(inner):
    one = inner.filter(lambda c: not c.traits.momentum)
    levels = st.lists(st.floats(1e-9, 1), min_size=1, max_size=3).map(tuple)
    return st.one_of(
        st.builds(ErrorFeedback, inner, st.floats(0, 1), st.booleans()),
        st.builds(MomentumCorrection, one, st.floats(1e-6, 0.999), st.booleans()),
        st.builds(LocalClip, inner.filter(lambda c: c.traits.clip_norm is None), st.floats(1e-9, 1e9)),
        st.builds(Warmup, inner, st.integers(1, 10**9)),
        st.builds(
            DensitySchedule, inner.filter(lambda c: isinstance(c.level, float)), levels, st.integers(1, 9)
        ),
    )


@examples(300)
@given(st.recursive(coded | top, wrapped, max_leaves=4))
def test_every_nesting_reads_back(compressor):
    assert from_string(compressor.to_string()) == compressor
    assert at_level(compressor.family_string(), compressor.level) == compressor


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("warmup", "wraps another compressor"),
        ("warmup:steps=3", "wraps another compressor"),
        ("warmup[]", "unknown compression ''"),
        ("warmup[topk", "a bracket is not closed"),
        ("warmup[topk[cast]", "a bracket is not closed"),
        ("warmup[topk]]", "expected ':' after ']'"),
        ("warmup[topk]steps=3", "expected ':' after ']'"),
        ("warmup[topk]:inner=topk", "field one of steps"),
        ("warmup[zip]", "unknown compression 'zip'"),
        ("topk[cast]", "topk wraps nothing"),
        ("fp16[topk]", "wraps nothing"),
        ("topk:values=[cast", "a bracket is not closed"),
        ("topk:values=[topk]", "values must be a cast or a quantiser"),
        ("topk:values=[signum]", "values must be a cast or a quantiser"),
        ("topk:values=[error_feedback[quantize]]", "values must be a cast or a quantiser"),
        ("topk:values=[quantize:rounding=nearest,decay=0.5]", "values must be a cast or a quantiser"),
        ("topk:values=4", "values must be a cast or a quantiser"),
        ("topk:indices=zip", "indices must be one of"),
        ("topk:density=0", "density must be in (0, 1]"),
        ("topk:density=true", "density must be in (0, 1]"),
        ("momentum_correction[momentum_correction[topk]]", "has momentum already"),
        ("momentum_correction[warmup[momentum_correction[topk]]]", "has momentum already"),
        ("momentum_correction[topk]:factor=1", "in [0, 1), or 'optimizer'"),
        ("momentum_correction[topk]:factor=0", "leave momentum_correction away"),
        ("dgc:momentum_factor=sgd", "in [0, 1), or 'optimizer'"),
        ("momentum_correction[topk]:mask=1", "mask must be true or false"),
        ("local_clip[local_clip[topk]]", "clips already"),
        ("local_clip[topk]:max_norm=0", "max_norm must be positive"),
        ("local_clip[topk]:max_norm=nan", "max_norm must be positive"),
        ("local_clip[topk]:max_norm=inf", "max_norm must be positive"),
        ("error_feedback[topk]:decay=1.5", "decay must be in [0, 1]"),
        ("error_feedback[topk]:decay=true", "decay must be in [0, 1]"),
        ("error_feedback[topk]:follow_rate=1", "follow_rate must be true or false"),
    ],
)
def test_bad_nesting_is_refused_with_a_reason(text: str, complaint: str):
    with pytest.raises(ConfigError) as caught:
        from_string(text)
    assert complaint in str(caught.value)
