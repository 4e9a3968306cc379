"""Tests string forms of compressors, also nested: what is accepted, and what errors say about the rest."""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
import string
from fractions import Fraction
from importlib.metadata import EntryPoint

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

import gradcomp as gc
from gradcomp.compress import at_level, from_string, registry
from gradcomp.core import plan

GOOD = {
    "none": gc.Identity(),
    " none ": gc.Identity(),
    "fp16": gc.Cast("float16"),
    "bf16": gc.Cast("bfloat16"),
    "cast": gc.Cast(),
    "cast:dtype=float32": gc.Cast("float32"),
    "cast:dtype=float16,feedback=true": gc.Cast("float16", feedback=True),
    "quantize": gc.Quantize(),
    "quantize:bits=4,bucket_size=512": gc.Quantize(4, 512),
    "quantize: bits = 2 , scaling = l2": gc.Quantize(2, scaling="l2"),
    "quantize:rounding=nearest,feedback=False": gc.Quantize(rounding="nearest", feedback=False),
    "quantize:feedback=none": gc.Quantize(),
    "quantize:decay=0.5": gc.Quantize(decay=0.5),
    "quantize:decay=1": gc.Quantize(),
    "quantize:allocate=bucket": gc.Quantize(allocate="bucket"),
    "quantize:bits=3,allocate=bytes": gc.Quantize(3, allocate="bytes"),
    "quantize:bits=1/5,bucket_size=8,scaling=l2,rounding=nearest": gc.Quantize((1, 5), 8, "l2", "nearest"),
    "scaled_sign": gc.ScaledSign(),
    "scaled_sign:bucket_size=none,feedback=false": gc.ScaledSign(None, feedback=False),
    "signum:momentum=0": gc.Signum(momentum=0),
    "one_bit:bucket_size=128": gc.OneBit(128),
    "terngrad": gc.TernGrad(),
    "nuqsgd:bits=3,scaling=linf": gc.NUQSGD(3, scaling="linf"),
    "codebook:levels=0.125/0.5/1,rounding=nearest": gc.Codebook((0.125, 0.5, 1.0), rounding="nearest"),
    "block_float": gc.BlockFloat("fp8_e4m3", 32, "stochastic"),
    "block_float:format=fp4_e2m1,block=none,rounding=nearest": gc.BlockFloat("fp4_e2m1", None, "nearest"),
    "block_float:format=fp4_e2m1,block=16,scale=e4m3": gc.BlockFloat("fp4_e2m1", 16, scale="e4m3"),
    "codebook: levels = 1e-3 / 1 ": gc.Codebook([0.001, 1]),
    "codebook:levels=1": gc.Codebook((1.0,)),
}


@pytest.mark.parametrize("text", GOOD)
def test_string_form_is_understood_and_the_short_form_reads_back(text: str):
    compressor = from_string(text)
    assert compressor == GOOD[text]
    assert from_string(compressor.short_string()) == compressor
    assert len(compressor.short_string()) <= len(compressor.to_string())


DIVERGES = "diverges: it is unbiased with a variance omega of up to"
NEVER_SENT = "may never send what it keeps back"
# The beginning of a string form; ways in which it may go on, each of them wrong; and what is said.
BAD = [
    ("", ("", "zip", "Quantize"), "unknown compression '"),
    ("zip", ("",), "(for example 'quantize:bits=4'); known: "),
    ("quantize:bits", ("",), "expected field=value"),
    ("quantize:bits=4,", ("colour=red",), "bits, bucket_size"),
    ("quantize:bits=4,", ("bits=5",), "bits is given twice"),
    ("quantize:bits=", ("0", "9", "-1", "4.0", "four", "true", ""), "bits must be a whole number from 1 to 8"),
    ("quantize:bits=", ("4/", "4/0", "4/9", "4/4.0", "4/true", "4/four", "4/none", "/".join(257 * "4")), "bits"),
    ("quantize:bucket_size=", ("0", "true", "none", "2147483648"), "bucket_size"),
    ("quantize:allocate=", ("layer",), "bucket, bytes or none"),
    ("quantize:allocate=", ("bucket,scaling=l2", "bytes,rounding=nearest", "bytes,rounding=shift"),
     "needs scaling=minmax and rounding=stochastic"),
    ("quantize:rounding=shift,scaling=", ("l2", "linf"), "rounding=shift needs scaling=minmax"),
    ("quantize:scaling=", ("l3", "4"), "minmax, l2, linf"),
    ("quantize:rounding=", ("up",), "stochastic, nearest, shift"),
    ("quantize:feedback=", ("maybe", "1"), "feedback must be true, false or none"),
    ("quantize:decay=", ("2", "-0.1", "nan", "much"), "decay must be in [0, 1]"),
    ("cast:dtype=", ("int8", "float64"), "float32, float16, bfloat16"),
    ("cast:", ("feedback=maybe",), "feedback"),
    ("cast:", ("bits=4",), "dtype, feedback"),
    ("scaled_sign:bucket_size=", ("0", "1.5"), "bucket_size"),
    ("scaled_sign:feedback=", ("none",), "true or false"),
    ("signum:momentum=", ("1", "-0.1", "true", "nan"), "momentum must be in [0, 1)"),
    ("signum:", ("feedback=true",), "bucket_size, momentum"),
    ("one_bit:", ("bucket_size=2147483648",), "bucket_size"),
    ("one_bit:", ("feedback=2",), "true or false"),
    ("terngrad:", ("bits=2", "bucket_size=true"), "bucket_size"),
    ("block_float:format=", ("fp8",), "fp8_e4m3, fp8_e5m2, fp4_e2m1"),
    ("block_float:block=", ("0",), "block must be"),
    ("block_float:rounding=", ("up",), "stochastic, nearest"),
    ("block_float:feedback=", ("1",), "true, false or none"),
    ("block_float:", ("bits=8",), "block, feedback, format, rounding, scale"),
    ("block_float:scale=", ("e5m2",), "e8m0, e4m3"),
    ("block_float:scale=", ("e4m3",), "scale=e4m3 needs format=fp4_e2m1"),
    ("nuqsgd:bits=", ("1", "9", "true", "none", "2/4"), "from 2 to 8"),
    ("nuqsgd:scaling=", ("minmax",), "l2, linf"),
    ("nuqsgd:rounding=", ("up",), "stochastic, nearest"),
    ("nuqsgd:feedback=", ("1",), "true, false or none"),
    ("codebook", ("",), "levels"),
    ("codebook:levels=", ("none", "0/1", "1e-39/1", "nan/1", "0.5/half/1", "0.5/true/1", "0.5/2", "0.5",
                          "0.5/0.5/1", "0.5/0.25/1", "0.5/0.50000000001/1"),
     "1 to 127 ascending numbers in (0, 1], the last one 1"),
    ("codebook:levels=0.5/1,", ("scaling=range",), "l2, linf, minmax"),
    ("codebook:levels=0.5/1,", ("rounding=up",), "stochastic, nearest"),
    ("codebook:levels=0.5/1,", ("feedback=0",), "true, false or none"),
    ("none:", ("bits=4",), "it has no fields (did you mean 'none'?)"),
    ("fp16:", ("feedback=true",), "cast:dtype=float16"),
    # Low rank.
    ("powersgd:rank=", ("0", "-1", "2.0", "true", "four", "32768"), "rank must be a whole number from 1 to 32767"),
    ("unbiased_rank:rank=", ("0",), "rank"),
    ("best_rank:rank=", ("0",), "rank"),
    ("spectral_atomo:rank=", ("0",), "rank"),
    ("powersgd:", ("alternate=true,warm_start=false",), "needs warm_start=true"),
    ("powersgd:", ("alternate=1",), "alternate must be true or false"),
    ("powersgd:", ("warm_start=1",), "warm_start must be true or false"),
    ("powersgd:", ("feedback=1",), "feedback must be true or false"),
    ("best_rank:", ("feedback=1",), "feedback must be true or false"),
    # Selections.
    ("topk:density=", ("0", "-0.1", "1.1", "nan", "inf", "true", "much", "none"), "density must be in (0, 1]"),
    *((f"{name}:density=", ("0", "1.5"), "density must be in (0, 1]")
      for name in ("dgc", "redsync", "sidco", "chunked_topk", "global_topk", "clt_k", "random_k", "random_block")),
    ("topk:zeros=", ("0", "none", "no"), "zeros must be true or false"),
    ("chunked_topk:chunk=", ("0", "1.5", "true"), "chunk must be a whole number"),
    ("chunked_topk:decay=", ("-0.1", "1.1", "nan"), "decay must be in [0, 1]"),
    ("topk:indices=", ("zip",), "indices must be one of auto, raw, packed, bitmap, deflate"),
    ("topk:feedback=", ("1",), "feedback must be true or false"),
    ("topk:values=", ("[topk]", "[signum]", "[error_feedback[quantize]]", "[quantize:rounding=nearest,decay=0.5]",
                      "[quantize:bits=2/4]", "4"), "values must be a cast or a quantiser"),
    ("sidco:stages=", ("0", "-1", "1.5", "true", "two", "none"), "stages must be a whole number of at least 1"),
    ("sidco:distribution=", ("gamma", "none", "1"), "exponential, pareto"),
    ("redsync:tolerance=", ("0", "-1", "nan", "inf", "true", "wide", "none"), "tolerance must be positive and finite"),
    ("threshold:threshold=", ("0", "-1", "nan", "inf", "1e-60", "1e39", "true", "high", "none"),
     "threshold must be a positive float32"),
    ("threshold:capacity=", ("0", "1.5", "nan", "true", "none"), "density"),
    ("adacomp:bin_size=", ("0", "-1", "2.5", "true", "ten", "none"), "bin_size must be a whole number"),
    ("adacomp:limit=", ("0", "-1", "1.1", "nan", "true", "one", "none"), "limit must be in (0, 1]"),
    ("dgc:momentum_factor=", ("1.0", "-0.1", "nan", "true", "sgd", "none"), "in [0, 1), or 'optimizer'"),
    ("dgc:mask=", ("1",), "mask must be true or false"),
    ("dgc:clip=", ("0", "-1.0", "one", "true"), "max_norm"),
    ("dgc:sample=", ("0", "1.5", "nan", "all", "true"), "sample must be in (0, 1]"),
    ("dgc:warmup_steps=", ("-1", "2.5", "true", "none"), "warmup_steps must be a whole number of at least 0"),
    ("dgc:warmup_steps=", ("3",), "a warm-up through 4 densities needs at least as many steps"),
    ("clt_k:", ("indices=gzip",), "indices"),
    ("clt_k:", ("feedback=none",), "feedback must be true or false"),
    ("clt_k:refresh=", ("0", "-1", "1.5", "true", "none"), "refresh must be a whole number of at least 1"),
    ("random_k:", ("scaled=1",), "scaled must be true or false"),
    ("random_k:feedback=", ("0", "yes"), "feedback must be true, false or none"),
    ("random_k:", ("scaled=true,feedback=true",), "feedback of scaled values grows without bound"),
    ("two_level_selection[topk]:candidate=", ("0", "1.5", "true", "none", "nan"), "density"),
    ("two_level_selection[topk]:send=", ("all", "none", "1"), "send must be candidate, minimum or dense"),
    ("two_level_selection[", ("quantize]", "threshold]", "global_topk]", "none]", "error_feedback[topk]]"),
     "two_level_selection takes"),
    ("two_level_selection[random_", ("k:scaled=true]", "block:scaled=true]"), "sends values as they are"),
    ("graded[topk:density=0.1]", ("",), "'graded' is called 'two_level_selection' now"),
    # Wrappers.
    ("warmup", ("", ":steps=3"), "wraps another compressor"),
    ("warmup[]", ("",), "unknown compression ''"),
    ("warmup[topk", ("", "[cast]"), "a bracket is not closed"),
    ("topk:values=[cast", ("",), "a bracket is not closed"),
    ("warmup[topk]", ("]", "steps=3"), "expected ':' after ']'"),
    ("warmup[topk]:inner=topk", ("",), "field one of steps"),
    ("warmup[topk]:steps=", ("0", "1.5"), "steps must be a whole number of at least 1"),
    ("warmup[zip]", ("",), "unknown compression 'zip'"),
    ("topk[cast]", ("",), "topk wraps nothing"),
    ("fp16[topk]", ("",), "wraps nothing"),
    ("momentum_correction[", ("momentum_correction[topk]]", "warmup[momentum_correction[topk]]]"),
     "has momentum already"),
    ("momentum_correction[topk]:factor=", ("1",), "in [0, 1), or 'optimizer'"),
    ("momentum_correction[topk]:factor=", ("0",), "leave momentum_correction away"),
    ("momentum_correction[topk]:mask=", ("1",), "mask must be true or false"),
    ("local_clip[local_clip[topk]]", ("",), "clips already"),
    ("flat[quantize]:bits=4", ("",), "it has no fields"),
    ("local_clip[topk]:max_norm=", ("0", "nan", "inf", "true"), "max_norm must be positive"),
    ("error_feedback[topk]:decay=", ("1.5", "-0.5", "true"), "decay must be in [0, 1]"),
    ("error_feedback[topk]:follow_rate=", ("1",), "follow_rate must be true or false"),
    ("error_feedback[", ("signum]", "ef21[topk]]"), "takes no error feedback"),
    ("density_schedule[", ("quantize:bits=4/2]:levels=8/", "quantize]:levels=8/four"),
     "levels must be a tuple of numbers"),
    ("density_schedule[quantize]:levels=", ("8",), "levels must be a tuple"),
    ("density_schedule[topk]:", ("steps_per_level=0",), "steps_per_level must be a whole number"),
    ("density_schedule[lgc]", ("",), "one density"),
    ("ef21[topk]:momentum=", ("1.0", "much"), "momentum must be in [0, 1)"),
    ("ef21[", ("momentum_correction[topk]]", "warmup[topk]]", "dgc]", "signum]", "ef21[topk]]"),
     "go around ef21, not into it"),
    ("ef21[", ("none]", "signum:momentum=0]", "quantize:rounding=nearest,decay=0.5]"),
     "loses something, decays nothing"),
    # Feedback.
    ("ef21[terngrad]", ("",), "diverges"),
    ("quantize:feedback=true,", ("bits=1", "bits=1,rounding=shift", "bits=4,scaling=l2"), DIVERGES),
    ("nuqsgd:feedback=true,bits=2", ("",), DIVERGES),
    ("codebook:feedback=true,levels=1/", ("",), DIVERGES),
    ("error_feedback[", ("random_k:scaled=true]", "random_block:scaled=true]", "spectral_atomo]", "unbiased_rank]",
                         "terngrad]", "momentum_correction[terngrad]]"), DIVERGES),
    ("topk:values=", ("[quantize:bits=1,scaling=l2]", "[terngrad]"), DIVERGES),
    ("quantize:scaling=l2,rounding=nearest,bits=", ("2", "3", "4", "1/2"), NEVER_SENT),
    ("nuqsgd:rounding=nearest,", ("bits=2", "bits=3", "bucket_size=none"), NEVER_SENT),
]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "complaint"), [(begin + end, complaint) for begin, ends, complaint in BAD for end in ends]
)
def test_bad_string_form_is_refused_with_a_reason(text: str, complaint: str):
    with pytest.raises(gc.ConfigError) as caught:
        from_string(text)
    assert complaint in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "topk:values=[quantize:bits=1,scaling=l2]",
        *(begin + end for begin, ends, complaint in BAD if complaint == NEVER_SENT for end in ends),
    ],
)
def test_without_feedback_they_are_taken(text: str):
    assert not from_string(text + ",feedback=false").traits.keeps_residual


@given(st.text(string.printable, max_size=40).map(lambda tail: "quantize:" + tail))
def test_any_text_is_a_compressor_or_a_config_error(text: str):
    with contextlib.suppress(gc.ConfigError):
        assert isinstance(from_string(text), gc.Quantize)


@given(
    bits=st.integers(1, 8),
    bucket_size=st.integers(1, 2**31 - 1),
    scaling=st.sampled_from(["minmax", "l2", "linf"]),
    rounding=st.sampled_from(["stochastic", "nearest"]),
    feedback=st.sampled_from([None, True, False]),
    decay=st.floats(0, 1),
)
def test_every_quantizer_reads_back(**fields):
    try:
        compressor = gc.Quantize(**fields)
    except gc.ConfigError:  # because of its feedback
        assert not gc.Quantize(**fields | {"feedback": False}).traits.keeps_residual
        return
    assert from_string(compressor.to_string()) == compressor
    assert at_level(compressor.family_string(), compressor.level) == compressor


def test_the_short_form_leaves_out_what_is_the_default():
    assert gc.Quantize(4).short_string() == "quantize:bits=4"
    assert gc.Cast("bfloat16").short_string() == "cast:dtype=bfloat16"
    assert gc.ErrorFeedback(gc.TopK(0.1)).short_string() == "error_feedback[topk:density=0.1]"
    assert from_string(gc.TopK(0.01, values=gc.Quantize(8)).short_string()) == gc.TopK(
        0.01, values=gc.Quantize(8)
    )


@given(
    levels=st.lists(st.floats(2**-126, 1, exclude_max=True, width=32), max_size=126, unique=True).map(sorted),
    scaling=st.sampled_from(["l2", "linf"]),
)
def test_every_codebook_reads_back_and_has_bits_for_its_levels(levels: list[float], scaling: str):
    compressor = gc.Codebook((*levels, 1), scaling=scaling)
    assert from_string(compressor.to_string()) == compressor
    assert 2 ** (compressor.code_bits - 2) <= len(compressor.levels) < 2 ** (compressor.code_bits - 1)


coded = st.one_of(
    st.builds(gc.Cast, st.sampled_from(["float32", "float16", "bfloat16"])),
    # Of more than two bits feedback may be around all of these.
    st.builds(gc.Quantize, st.integers(3, 8), st.integers(1, 999), st.sampled_from(["minmax", "linf"])),
    st.builds(gc.Quantize, st.integers(7, 8), st.integers(1, 999), st.just("l2")),
    st.just(gc.Identity()),
)
top = st.builds(gc.TopK, st.floats(1e-9, 1), values=coded, indices=st.sampled_from(["auto", "deflate"]))


def wrapped(inner):
    one = inner.filter(lambda c: not c.traits.momentum)
    levels = st.lists(st.floats(1e-9, 1), min_size=1, max_size=3).map(tuple)
    return st.one_of(
        st.builds(gc.ErrorFeedback, inner, st.floats(0, 1), st.booleans()),
        st.builds(gc.MomentumCorrection, one, st.floats(1e-6, 0.999), st.booleans()),
        st.builds(gc.LocalClip, inner.filter(lambda c: c.traits.clip_norm is None), st.floats(1e-9, 1e9)),
        st.builds(gc.Warmup, inner, st.integers(1, 10**9)),
        st.builds(
            gc.DensitySchedule, inner.filter(lambda c: isinstance(c.level, float)), levels, st.integers(1, 9)
        ),
    )


@examples(300)
@given(st.recursive(coded | top, wrapped, max_leaves=4))
def test_every_nesting_reads_back(compressor):
    assert from_string(compressor.to_string()) == compressor
    assert at_level(compressor.family_string(), compressor.level) == compressor


@pytest.mark.parametrize(
    ("kind", "value", "complaint"),
    [
        *(
            (gc.Codebook, levels, "1 to 127")
            for levels in ((), tuple(i / 128 for i in range(1, 129)), "1", (10**400,))
        ),
        *((gc.Quantize, bits, "bits") for bits in ((), [4, 4], ((4, 4), 4))),
    ],
)
def test_what_is_no_tuple_of_possible_numbers_is_refused(kind, value, complaint: str):
    with pytest.raises(gc.ConfigError, match=complaint):
        kind(value)


def test_family_does_not_depend_on_the_level():
    assert {gc.Quantize(bits).family_string() for bits in range(1, 9)} == {gc.Quantize(4).family_string()}


@pytest.mark.parametrize(
    ("compressor", "levels", "complaint"),
    [
        *((c, (0, 9, 2.5, "4", True, (2, 9)), None) for c in (gc.Quantize(), gc.NUQSGD(), gc.TopK())),
        *(
            (c, ((2, 4),), None)
            for c in (gc.TopK(), gc.PowerSGD(), gc.NUQSGD(), gc.MomentumCorrection(gc.TopK()))
        ),
        *((c, (4, (2, 4)), "no level") for c in (gc.Identity(), gc.Cast("bfloat16"))),
    ],
    ids=str,
)
def test_a_level_that_a_compressor_does_not_have_is_refused(compressor, levels, complaint: str | None):
    assert compressor.by_block == isinstance(compressor, gc.Quantize)
    for level in levels:
        with pytest.raises(gc.ConfigError, match=complaint):
            at_level(compressor.family_string(), level)


def test_horovods_names_exist():
    names = gc.Compression
    assert (names.none, names.fp16, names.bf16) == (gc.Identity(), gc.Cast("float16"), gc.Cast("bfloat16"))


@dataclasses.dataclass(frozen=True)
class Elsewhere(gc.Identity):
    name = "elsewhere"


class Impostor(gc.Identity):
    name = "quantize"


def test_a_script_registers_a_compressor_of_its_own(monkeypatch):
    monkeypatch.setattr(registry, "REGISTERED", dict(registry.REGISTERED))
    monkeypatch.setattr(plan, "LEVELS", dict(plan.LEVELS))
    with pytest.raises(gc.ConfigError, match="unknown compression 'own'"):
        from_string("own")
    try:

        @registry.register("own")
        @dataclasses.dataclass(frozen=True)
        class Own(gc.Quantize):
            """A compressor of a script."""

        assert from_string("own:bits=3") == Own(3)
        assert Own(3).to_string().startswith("own:bits=3,")
        assert plan.level_kind(Own().family_string()) == "bits"
        assert at_level(Own().family_string(), 2) == Own(2)
    finally:
        registry.registered.cache_clear()


def test_a_pickle_holds_the_fields_alone():
    compressor = gc.Quantize(3, rounding="nearest")
    assert compressor.traits.keeps_residual
    again = pickle.loads(pickle.dumps(compressor))
    assert again == compressor
    assert set(vars(again)) == {f.name for f in dataclasses.fields(compressor)}


def test_a_name_is_given_once():
    with pytest.raises(ValueError, match="Quantize is named 'quantize' already"):
        registry.register("quantize")(Elsewhere)
    assert Elsewhere.name == "elsewhere"


class TestEntryPoints:
    @pytest.fixture(autouse=True)
    def _fresh_registry(self):
        registry.registered.cache_clear()
        yield
        registry.registered.cache_clear()

    def install(self, monkeypatch, value: str):
        point = EntryPoint("point", value, "gradcomp.compressors")
        monkeypatch.setattr(registry, "entry_points", lambda group: [point] if group == point.group else [])

    def test_a_plug_in_is_found(self, monkeypatch):
        monkeypatch.setattr(EntryPoint, "load", lambda self: Elsewhere)
        self.install(monkeypatch, "package:Elsewhere")
        assert from_string("elsewhere") == Elsewhere()

    @pytest.mark.parametrize(
        ("loaded", "complaint"), [(Fraction, "not a Compressor"), (Impostor, "two compressors are named")]
    )
    def test_a_plug_in_that_does_not_fit_is_refused(self, monkeypatch, loaded: type, complaint: str):
        monkeypatch.setattr(EntryPoint, "load", lambda self: loaded)
        self.install(monkeypatch, "package:Loaded")
        with pytest.raises(gc.ConfigError, match=complaint):
            from_string("none")
