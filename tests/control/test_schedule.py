"""Schedule: levels change at the steps that it names. FixedPlan: they are what a file or a mapping says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from control.observed import environment, environment_of
from control.resumed import resumed, states_of
from loudest import LAYERS, levels

from gradcomp import Assignment, ConfigError, LayerSpec, Plan, Quantize, StateError, TopK, Warmup
from gradcomp.control import controller_from_string
from gradcomp.control.schedule import FixedPlan, Schedule
from gradcomp.testing.simulation import Simulation

STEPS = Schedule({0: 8, 3: {"a": 2, "[bd]": "topk:density=0.1"}, 7: {"*": Quantize(3, 64)}})
EXPECTED = [[8, 8, 8, 8, None]] * 3 + [[2, 0.1, 8, 0.1, None]] * 4 + [[3, 3, 3, 3, None]] * 3


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("warm_up", [0, 4])
def test_levels_change_at_their_steps(world, warm_up):
    compression = Warmup(Quantize(4, 32), warm_up) if warm_up else Quantize(4, 32)
    ranks = Simulation(LAYERS, compression, world, shuffle=True, delay=0.3, controller=STEPS)
    for _ in range(warm_up):
        assert levels(ranks) == [None] * 5
        ranks.step().all_means()
    for expected in EXPECTED:
        assert levels(ranks) == expected
        ranks.step().all_means()


def test_until_the_first_entry_layers_keep_what_they_have():
    ranks = Simulation(LAYERS, Quantize(4, 32), 2, controller=Schedule({2: 8}))
    found = []
    for _ in range(4):
        found.append(levels(ranks)[0])
        ranks.step()
    assert found == [4, 4, 8, 8]
    assert ranks.pipelines[0].plan.version == 1


def test_entries_need_not_be_in_order():
    assert Schedule({5: 2, 0: 8}).to_string() == Schedule({0: 8, 5: 2}).to_string()
    ranks = Simulation(LAYERS, Quantize(4, 32), 2, controller=Schedule({2: 2, 0: 8}))
    assert levels(ranks)[0] == 8


def job(controller, world: int = 2) -> Simulation:
    return Simulation(LAYERS, Quantize(4, 32), world, controller=controller)


@pytest.mark.parametrize("at", range(1, 10))
@pytest.mark.parametrize("world", [2, 3])
def test_a_run_goes_on_where_it_was(at, world):
    first, second = job(STEPS), job(STEPS, world)
    for _ in range(at):
        first.step()
    resumed(second, states_of(first))
    for expected in EXPECTED[at:]:
        assert levels(second) == expected
        second.step().all_means()
    shared = [p.controller.shared_state() for p in second.pipelines]
    assert json.dumps(shared[0]) == json.dumps(shared[1])


def test_another_schedule_takes_over_after_a_step():
    first, second = job(Schedule({0: 8})), job(Schedule({0: 2}))
    first.step()
    resumed(second, states_of(first))
    found = []
    for _ in range(3):
        found.append(levels(second)[0])
        second.step()
    assert found == [8, 2, 2]


@pytest.mark.parametrize("bad", [{}, {"choices": 3}, {"choices": {"a": "nothing"}}, {"choices": {"a": 4}}])
def test_a_state_that_is_none_is_refused(bad):
    with pytest.raises(StateError, match="not a state of schedule"):
        Schedule({0: 8}).begin(environment([64])).restore(bad, {})


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ({}, "empty"),
        (4, "mapping"),
        ({-1: 4}, "whole numbers"),
        ({1.5: 4}, "whole numbers"),
        ({True: 4}, "whole numbers"),
        ({"0": 4}, "whole numbers"),
        ({0: None}, "step 0"),
        ({0: {}}, "step 0 is empty"),
        ({0: {4: 4}}, "strings"),
        ({5: {"a": float("inf")}}, "step 5, 'a'"),
        ({0: "nothing"}, "unknown compression"),
        ({0: Warmup(Quantize(4), 5)}, "schedule itself"),
    ],
)
def test_bad_input(steps, words):
    with pytest.raises(ConfigError, match=words):
        Schedule(steps)


# --- FixedPlan ----------------------------------------------------------------------------------------------

NAMES = [LayerSpec(name, (8, 8)) for name in ("layers[0].weight", "layers[1].weight", "head.weight", "bias")]


def begin(plan, compressors=None) -> dict:
    """Layer name -> string form, of what was chosen."""
    compressors = compressors or [Quantize(4)] * 3 + [None]
    running = FixedPlan(plan).begin(environment_of(NAMES, compressors))
    return {NAMES[i].name: c for i, c in running.choices.items()}


def test_the_first_that_matches_decides():
    assert begin({"head.*": 8, "*.weight": 2, "layers*": 3}) == {
        "layers[0].weight": Quantize(2),
        "layers[1].weight": Quantize(2),
        "head.weight": Quantize(8),
    }


def test_a_name_is_itself_before_it_is_a_pattern():
    assert begin({"layers[0].weight": 2}) == {"layers[0].weight": Quantize(2)}


def test_string_forms_and_compressors():
    assert begin({"head.weight": "topk:density=0.1", "layers*": TopK(0.2)}) == {
        "head.weight": TopK(0.1),
        "layers[0].weight": TopK(0.2),
        "layers[1].weight": TopK(0.2),
    }


def test_a_file_a_text_and_a_mapping_are_the_same(tmp_path):
    mapping = {"head.*": 8, "*": "quantize:bits=2"}
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(mapping, indent=2))
    plans = [FixedPlan(mapping), FixedPlan(path), FixedPlan(str(path)), FixedPlan(json.dumps(mapping))]
    assert len({plan.to_string() for plan in plans}) == 1
    assert all(begin(plan.plan) == begin(mapping) for plan in plans)


def test_a_string_form_names_the_file(tmp_path):
    (path := tmp_path / "plan.json").write_text('{"*": 2}')
    assert controller_from_string(f"fixed_plan:plan={path}").to_string() == FixedPlan({"*": 2}).to_string()


def test_other_contents_have_another_string_form(tmp_path):
    forms = set()
    for number, mapping in enumerate([{"*": 4}, {"*": 8}, {"*": 4, "x": 4}, {"*": "quantize:bits=4"}]):
        (path := tmp_path / "plan.json").write_text(json.dumps(mapping))
        forms.add(FixedPlan(path).to_string())
        assert len(forms) == number + 1
    assert FixedPlan({"a": 1, "b": 2}).to_string() != FixedPlan({"b": 2, "a": 1}).to_string()


def test_a_plan_that_was_written_is_taken_back(tmp_path):
    ranks = Simulation(LAYERS, Quantize(4, 32), 2, controller=FixedPlan({"a": 2, "b": 8}))
    path = tmp_path / "plan.json"
    path.write_text(ranks.pipelines[0].plan.to_json())
    again = Simulation(LAYERS, Quantize(6, 32), 2, controller=FixedPlan(path))
    assert again.pipelines[0].plan.assignments == ranks.pipelines[0].plan.assignments
    assert levels(again) == [2, 8, 4, 4, None]


def test_a_plan_says_nothing_of_layers_that_travel_exactly():
    rows = [
        Assignment("head.weight", "quantize:bucket_size=512", 2),
        Assignment("bias", "cast:dtype=float32"),
    ]
    assert set(begin(Plan(7, tuple(rows)))) == {"head.weight"}
    with pytest.raises(ConfigError, match=r"'bias' is not controlled"):
        begin(Plan(7, (*rows[:1], Assignment("bias", "quantize:bucket_size=512", 2))))
    with pytest.raises(ConfigError, match=r"'gone'.*closest"):
        begin(Plan(7, (*rows, Assignment("gone", "quantize:bucket_size=512", 2))))


def test_names_in_a_plan_are_no_patterns():
    with pytest.raises(ConfigError, match=r"no controlled layer matches '\*'"):
        begin(Plan(0, (Assignment("*", "quantize:bucket_size=512", 2),)))


def test_patterns_without_a_layer_are_listed_with_the_closest_names():
    with pytest.raises(ConfigError, match=r"'haed\.\*' \(closest: 'head\.weight'.*; 'bias'"):
        begin({"haed.*": 8, "bias": 4, "*": 2})


def test_with_no_layer_up_for_choice_patterns_still_have_to_match_one():
    assert not begin({"*": 2}, [None] * 4)
    with pytest.raises(ConfigError, match=r"matches 'x' \(closest"):
        begin({"x": 2}, [None] * 4)


@pytest.mark.parametrize("warm_up", [0, 3])
def test_it_is_in_force_from_the_first_step_on(warm_up):
    compression = Warmup(Quantize(4, 32), warm_up) if warm_up else Quantize(4, 32)
    ranks = Simulation(LAYERS, compression, 2, controller=FixedPlan({"a": 2, "[bd]": "topk:density=0.1"}))
    for step in range(warm_up + 2):
        if step >= warm_up:
            assert levels(ranks) == [2, 0.1, 4, 0.1, None]
            assert ranks.pipelines[0].plan.version == bool(warm_up) * 2
        ranks.step().all_means()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not JSON"),
        ("[1, 2]", "not a mapping"),
        ("4", "not a mapping"),
        ('{"a": 1, "a": 2}', "'a' appears twice"),
        ("{}", "empty"),
        ('{"a": null}', "'a' must be a level"),
        ('{"a": true}', "'a' must be a level"),
        ('{"a": NaN}', "'a' must be a level"),
        ('{"a": [4]}', "'a' must be a level"),
        ('{"a": "nothing"}', "unknown compression"),
        ('{"a": "warmup[quantize:bits=4]:steps=5"}', "schedule"),
        ('{"version": 0, "assignments": 3}', "not a plan"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_bad_files(tmp_path, text, words):
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        FixedPlan(path)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read .*missing\.json"):
        FixedPlan(tmp_path / "missing.json")
    (path := tmp_path / "bytes").write_bytes(b"\xff\xfe{")
    with pytest.raises(ConfigError, match="cannot read"):
        FixedPlan(Path(path))


@pytest.mark.parametrize("bad", [4, None, ["a"], {3: 4}])
def test_plans_that_are_none(bad):
    with pytest.raises(ConfigError):
        FixedPlan(bad)
