"""Plans: canonical text, digest, coverage, and text from somewhere else."""

from __future__ import annotations

import contextlib
import json

import pytest
from core.json_values import json_values
from hypothesis import given
from hypothesis import strategies as st

from gradcomp import Assignment, ConfigError, LayerSpec, Plan, Policy, Quantize, WireFormatError

LAYERS = [LayerSpec("a", (64, 64)), LayerSpec("b", (64,))]
PLAN = Policy(Quantize(4)).plan(LAYERS, version=3)

whole = st.integers(-(10**9), 10**9)
by_block = st.lists(whole, min_size=2, max_size=256).map(tuple)
levels = st.none() | whole | st.floats(allow_nan=False, allow_infinity=False) | by_block
plans = st.builds(
    lambda version, rows: Plan(version, tuple(Assignment(name, *rest) for name, rest in rows.items())),
    st.integers(0, 10**12),
    st.dictionaries(st.text(), st.tuples(st.text(), levels), max_size=5),
)


@given(plans)
def test_json_reads_back(plan: Plan):
    assert Plan.from_json(plan.to_json()) == plan
    assert Plan.from_json(plan.to_json()).to_json() == plan.to_json()


def test_the_digest_identifies_plan_and_layers():
    changed = {
        "version": (Plan(4, PLAN.assignments), LAYERS),
        "level": (Policy(Quantize(5)).plan(LAYERS, version=3), LAYERS),
        "compressor": (Policy(Quantize(4, 64)).plan(LAYERS, version=3), LAYERS),
        "order of layers": (PLAN, LAYERS[::-1]),
        "shape": (PLAN, [LayerSpec("a", (32, 128)), LAYERS[1]]),
        "dtype": (PLAN, [LayerSpec("a", (64, 64), "float16"), LAYERS[1]]),
        "name": (PLAN, [LayerSpec("A", (64, 64)), LAYERS[1]]),
    }
    digests = {name: plan.digest(layers) for name, (plan, layers) in changed.items()}
    digests["nothing"] = PLAN.digest(LAYERS)
    assert len(set(digests.values())) == len(digests)
    assert PLAN.digest(list(LAYERS)) == digests["nothing"]


HOSTILE = {
    "nothing": "",
    "not json": "{",
    "a list": "[]",
    "a number": "1",
    "null": "null",
    "no version": '{"assignments":[]}',
    "no assignments": '{"version":1}',
    "negative version": '{"version":-1,"assignments":[]}',
    "version as text": '{"version":"1","assignments":[]}',
    "version as fraction": '{"version":1.5,"assignments":[]}',
    "version as boolean": '{"version":true,"assignments":[]}',
    "infinite version": '{"version":1e400,"assignments":[]}',
    "very long version": '{"version":' + "9" * 5000 + ',"assignments":[]}',
    "assignments as object": '{"version":1,"assignments":{"a":["b",1]}}',
    "assignments as text": '{"version":1,"assignments":"abc"}',
    "short row": '{"version":1,"assignments":[["a","b"]]}',
    "long row": '{"version":1,"assignments":[["a","b",1,2]]}',
    "layer as number": '{"version":1,"assignments":[[1,"b",1]]}',
    "compressor as null": '{"version":1,"assignments":[["a",null,1]]}',
    "level as list": '{"version":1,"assignments":[["a","b",[]]]}',
    "one block": '{"version":1,"assignments":[["a","b",[4]]]}',
    "too many blocks": f'{{"version":1,"assignments":[["a","b",{[4] * 257}]]}}',
    "a block's level as fraction": '{"version":1,"assignments":[["a","b",[4,4.0]]]}',
    "a block's level as boolean": '{"version":1,"assignments":[["a","b",[4,true]]]}',
    "a block without a level": '{"version":1,"assignments":[["a","b",[4,null]]]}',
    "blocks in blocks": '{"version":1,"assignments":[["a","b",[4,[4,4]]]]}',
    "blocks by name": '{"version":1,"assignments":[["a","b",{"0":4,"1":4}]]}',
    "level as text": '{"version":1,"assignments":[["a","b","4"]]}',
    "level as boolean": '{"version":1,"assignments":[["a","b",true]]}',
    "level NaN": '{"version":1,"assignments":[["a","b",NaN]]}',
    "infinite level": '{"version":1,"assignments":[["a","b",1e999]]}',
    "a layer twice": '{"version":1,"assignments":[["a","b",1],["a","b",2]]}',
    "nested too deeply": "[" * 100_000,
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_hostile_text_is_a_wire_format_error(text: str):
    with pytest.raises(WireFormatError):
        Plan.from_json(text)


@given(st.fixed_dictionaries({"version": json_values, "assignments": json_values}) | json_values)
def test_any_json_is_a_plan_or_a_wire_format_error(value):
    with contextlib.suppress(WireFormatError):
        Plan.from_json(json.dumps(value))


def test_a_plan_must_cover_exactly_the_layers():
    with pytest.raises(ConfigError, match=r"without assignment \['c'\], unknown \['b'\]"):
        PLAN.check_covers([LAYERS[0], LayerSpec("c", (1,))])
    PLAN.check_covers(LAYERS)


def test_a_layer_has_one_assignment():
    with pytest.raises(ConfigError, match="twice"):
        Plan(0, (Assignment("a", "none"), Assignment("a", "quantize", 4)))
