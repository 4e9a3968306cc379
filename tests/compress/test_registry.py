"""String forms: what they accept, and what they say about the rest."""

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

import gradcomp
from gradcomp import (
    NUQSGD,
    BlockFloat,
    Cast,
    Codebook,
    Compression,
    ConfigError,
    Identity,
    OneBit,
    Quantize,
    ScaledSign,
    Signum,
    TernGrad,
)
from gradcomp.compress import at_level, from_string, registry
from gradcomp.core import plan as levels

GOOD = {
    "none": Identity(),
    " none ": Identity(),
    "fp16": Cast("float16"),
    "bf16": Cast("bfloat16"),
    "cast": Cast(),
    "cast:dtype=float32": Cast("float32"),
    "cast:dtype=float16,feedback=true": Cast("float16", feedback=True),
    "quantize": Quantize(),
    "quantize:bits=4,bucket_size=512": Quantize(4, 512),
    "quantize: bits = 2 , scaling = l2": Quantize(2, scaling="l2"),
    "quantize:rounding=nearest,feedback=False": Quantize(rounding="nearest", feedback=False),
    "quantize:feedback=none": Quantize(),
    "quantize:decay=0.5": Quantize(decay=0.5),
    "quantize:decay=1": Quantize(),
    "quantize:allocate=bucket": Quantize(allocate="bucket"),
    "quantize:bits=3,allocate=bytes": Quantize(3, allocate="bytes"),
    "scaled_sign": ScaledSign(),
    "scaled_sign:bucket_size=none,feedback=false": ScaledSign(None, feedback=False),
    "signum:momentum=0": Signum(momentum=0),
    "one_bit:bucket_size=128": OneBit(128),
    "terngrad": TernGrad(),
    "nuqsgd:bits=3,scaling=linf": NUQSGD(3, scaling="linf"),
    "codebook:levels=0.125/0.25/0.5/1,rounding=nearest": Codebook(
        (0.125, 0.25, 0.5, 1.0), rounding="nearest"
    ),
    "block_float": BlockFloat("fp8_e4m3", 32, "stochastic"),
    "block_float:format=fp4_e2m1,block=none,rounding=nearest": BlockFloat(
        "fp4_e2m1", None, "nearest", feedback=None
    ),
    "block_float:format=fp4_e2m1,block=16,scale=e4m3": BlockFloat("fp4_e2m1", 16, scale="e4m3"),
    "codebook: levels = 1e-3 / 1 ": Codebook([0.001, 1]),
    "codebook:levels=1": Codebook((1.0,)),
}


@pytest.mark.parametrize("text", GOOD)
def test_string_form_is_understood(text: str):
    assert from_string(text) == GOOD[text]


BAD = {
    "": "unknown compression ''",
    "zip": "unknown compression 'zip' (for example 'quantize:bits=4'); known: ",
    "Quantize": "unknown compression",
    "quantize:bits": "expected field=value",
    "quantize:bits=4,colour=red": "bits, bucket_size",
    "quantize:bits=4,bits=5": "bits is given twice",
    "quantize:bits=0": "from 1 to 8",
    "quantize:bits=9": "from 1 to 8",
    "quantize:bits=-1": "from 1 to 8",
    "quantize:bits=4.0": "from 1 to 8",
    "quantize:bits=four": "from 1 to 8",
    "quantize:bits=true": "from 1 to 8",
    "quantize:bits=": "from 1 to 8",
    "quantize:bucket_size=0": "bucket_size",
    "quantize:allocate=layer": "bucket, bytes or none",
    "quantize:allocate=bucket,scaling=l2": "needs scaling=minmax",
    "quantize:allocate=bytes,rounding=nearest": "needs scaling=minmax and rounding=stochastic",
    "quantize:bucket_size=true": "bucket_size",
    "quantize:bucket_size=2147483648": "bucket_size",
    "quantize:scaling=l3": "minmax, l2, linf",
    "quantize:scaling=4": "minmax, l2, linf",
    "quantize:rounding=up": "stochastic, nearest, shift",
    "quantize:feedback=maybe": "feedback",
    "quantize:feedback=1": "feedback",
    "quantize:decay=2": "decay",
    "quantize:decay=nan": "decay",
    "quantize:decay=much": "decay",
    "cast:dtype=int8": "float32, float16, bfloat16",
    "cast:dtype=float64": "float32, float16, bfloat16",
    "cast:feedback=maybe": "feedback",
    "cast:bits=4": "dtype, feedback",
    "scaled_sign:bucket_size=0": "bucket_size",
    "scaled_sign:bucket_size=1.5": "bucket_size",
    "scaled_sign:feedback=none": "true or false",
    "signum:momentum=1": "[0, 1)",
    "signum:momentum=-0.1": "[0, 1)",
    "signum:momentum=true": "[0, 1)",
    "signum:momentum=nan": "[0, 1)",
    "signum:feedback=true": "bucket_size, momentum",
    "one_bit:bucket_size=2147483648": "bucket_size",
    "one_bit:feedback=2": "true or false",
    "terngrad:bits=2": "bucket_size",
    "terngrad:bucket_size=true": "bucket_size",
    "block_float:format=fp8": "fp8_e4m3, fp8_e5m2, fp4_e2m1",
    "block_float:block=0": "block must be",
    "block_float:rounding=up": "stochastic, nearest",
    "block_float:feedback=1": "true, false or none",
    "block_float:bits=8": "block, feedback, format, rounding, scale",
    "block_float:scale=e5m2": "e8m0, e4m3",
    "block_float:scale=e4m3": "scale=e4m3 needs format=fp4_e2m1",
    "nuqsgd:bits=1": "from 2 to 8",
    "nuqsgd:bits=9": "from 2 to 8",
    "nuqsgd:bits=true": "from 2 to 8",
    "nuqsgd:scaling=minmax": "l2, linf",
    "nuqsgd:rounding=up": "stochastic, nearest",
    "nuqsgd:feedback=1": "true, false or none",
    "codebook": "levels",
    "codebook:levels=none": "1 to 127 ascending",
    "codebook:levels=0/1": "1 to 127 ascending",
    "codebook:levels=0.5": "the last one 1",
    "codebook:levels=0.5/0.5/1": "ascending",
    "codebook:levels=0.5/0.25/1": "ascending",
    "codebook:levels=0.5/true/1": "ascending",
    "codebook:levels=0.5/half/1": "ascending",
    "codebook:levels=1e-39/1": "ascending",
    "codebook:levels=0.5/2": "(0, 1]",
    "codebook:levels=nan/1": "ascending",
    "codebook:levels=0.5/0.50000000001/1": "ascending",
    "codebook:levels=0.5/1,scaling=minmax": "l2, linf",
    "codebook:levels=0.5/1,rounding=up": "stochastic, nearest",
    "codebook:levels=0.5/1,feedback=0": "true, false or none",
    "none:bits=4": "it has no fields (did you mean 'none'?)",
    "fp16:feedback=true": "cast:dtype=float16",
}


@pytest.mark.parametrize("text", BAD)
def test_bad_string_form_is_refused_with_a_hint(text: str):
    with pytest.raises(ConfigError) as caught:
        from_string(text)
    assert BAD[text] in str(caught.value)


@given(st.text(string.printable, max_size=40).map(lambda tail: "quantize:" + tail))
def test_any_text_is_a_compressor_or_a_config_error(text: str):
    with contextlib.suppress(ConfigError):
        assert isinstance(from_string(text), Quantize)


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
        compressor = Quantize(**fields)
    except ConfigError:  # because of its feedback
        assert not Quantize(**fields | {"feedback": False}).traits.keeps_residual
        return
    assert from_string(compressor.to_string()) == compressor
    assert at_level(compressor.family_string(), compressor.level) == compressor


@pytest.mark.parametrize("text", GOOD)
def test_the_short_form_reads_back(text: str):
    compressor = from_string(text)
    assert from_string(compressor.short_string()) == compressor
    assert len(compressor.short_string()) <= len(compressor.to_string())


@pytest.mark.parametrize(
    ("compressor", "short"),
    [
        (Quantize(4), "quantize:bits=4"),
        (Cast("bfloat16"), "cast:dtype=bfloat16"),
        (gradcomp.TopK(0.01, values=Quantize(8)), None),
        (gradcomp.ErrorFeedback(gradcomp.TopK(0.1)), "error_feedback[topk:density=0.1]"),
    ],
)
def test_the_short_form_leaves_out_what_is_the_default(compressor, short):
    assert short is None or compressor.short_string() == short
    assert from_string(compressor.short_string()) == compressor


@given(
    levels=st.lists(st.floats(2**-126, 1, exclude_max=True, width=32), max_size=126, unique=True).map(sorted),
    scaling=st.sampled_from(["l2", "linf"]),
)
def test_every_codebook_reads_back_and_has_room_for_its_levels(levels: list[float], scaling: str):
    compressor = Codebook((*levels, 1), scaling=scaling)
    assert from_string(compressor.to_string()) == compressor
    assert 2 ** (compressor.code_bits - 2) <= len(compressor.levels) < 2 ** (compressor.code_bits - 1)


@pytest.mark.parametrize("levels", [(), tuple(i / 128 for i in range(1, 129)), "1", (10**400,)])
def test_impossible_levels_are_refused(levels):
    with pytest.raises(ConfigError, match="1 to 127"):
        Codebook(levels)


def test_family_does_not_depend_on_the_level():
    assert {Quantize(bits).family_string() for bits in range(1, 9)} == {Quantize(4).family_string()}


@pytest.mark.parametrize("level", [0, 9, 2.5, "4", True])
@pytest.mark.parametrize("compressor", [Quantize(), NUQSGD()], ids=["quantize", "nuqsgd"])
def test_impossible_level_is_refused(compressor, level):
    with pytest.raises(ConfigError):
        at_level(compressor.family_string(), level)


@pytest.mark.parametrize("family", ["none", "cast:dtype=bfloat16"])
def test_level_for_a_compressor_without_one_is_refused(family: str):
    with pytest.raises(ConfigError, match="no level"):
        at_level(family, 4)


def test_horovods_names_exist():
    assert (Compression.none, Compression.fp16, Compression.bf16) == (
        Identity(),
        Cast("float16"),
        Cast("bfloat16"),
    )


@dataclasses.dataclass(frozen=True)
class Elsewhere(Identity):
    name = "elsewhere"


class Impostor(Identity):
    name = "quantize"


def test_a_script_registers_a_compressor_of_its_own(monkeypatch):
    monkeypatch.setattr(registry, "REGISTERED", dict(registry.REGISTERED))
    monkeypatch.setattr(levels, "LEVELS", dict(levels.LEVELS))
    with pytest.raises(ConfigError, match="unknown compression 'own'"):
        from_string("own")
    try:

        @registry.register("own")
        @dataclasses.dataclass(frozen=True)
        class Own(Quantize):
            """A compressor of a script."""

        assert from_string("own:bits=3") == Own(3)
        assert Own(3).to_string().startswith("own:bits=3,")
        assert levels.level_kind(Own().family_string()) == "bits"
        assert at_level(Own().family_string(), 2) == Own(2)
    finally:
        registry.registered.cache_clear()


def test_a_pickle_holds_the_fields_alone():
    compressor = Quantize(3, rounding="nearest")
    assert compressor.traits.keeps_residual
    again = pickle.loads(pickle.dumps(compressor))
    assert again == compressor
    assert set(vars(again)) == {f.name for f in dataclasses.fields(compressor)}


def test_a_name_is_given_once():
    with pytest.raises(ValueError, match="Quantize is named 'quantize' already"):
        registry.register("quantize")(Elsewhere)
    assert Elsewhere.name == "elsewhere"


def test_every_compressor_of_a_family_is_public():
    public = {getattr(gradcomp, name) for name in gradcomp.__all__}
    # A benchmark that was imported here may have registered its own.
    ours = {kind for kind in registry.registered().values() if kind.__module__.startswith("gradcomp.")}
    assert public >= ours
    assert len(ours) >= 29


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
        with pytest.raises(ConfigError, match=complaint):
            from_string("none")
