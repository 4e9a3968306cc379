"""Settings: who wins, what is refused, what is documented."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from gradcomp import Config, ConfigError
from gradcomp.core.config import unknown_variables

PAGE = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"
FIELDS = {field.name: field for field in dataclasses.fields(Config)}


@pytest.fixture
def toml(tmp_path: Path):
    def write(text: str) -> dict[str, str]:
        path = tmp_path / "gradcomp.toml"
        path.write_text(text)
        return {"GRADCOMP_CONFIG": str(path)}

    return write


def test_argument_beats_environment_beats_file_beats_default(toml):
    environ = toml("seed = 1\ntrace_spans = 1\nslice_elements = 100\n")
    environ |= {"GRADCOMP_SEED": "2", "GRADCOMP_TRACE_SPANS": "2"}
    config = Config.resolve(environ, seed=3)
    assert (config.seed, config.trace_spans, config.slice_elements) == (3, 2, 100)
    assert config.timeout_seconds == Config().timeout_seconds


def test_none_means_not_given_and_nothing_given_is_the_default():
    assert Config.resolve({"GRADCOMP_SEED": "2"}, seed=None).seed == 2
    assert Config.resolve({}) == Config()
    assert Config.resolve({}, timeout_seconds=30).timeout_seconds == 30.0  # a whole number of seconds is fine


@pytest.mark.parametrize("name", FIELDS)
def test_every_setting_is_a_variable(name: str):
    default = FIELDS[name].default
    texts = {
        "kernels": "reference", "isa": "baseline", "log_level": "debug", "run_log": "run.jsonl",
        "timeline": "timeline.json", "reduction": "ring", "transport": "shm", "what_if": "1,4x1,2",
        "store": "host:29400", "backend_compression": "none",
    }  # fmt: skip
    other = texts.get(name) or (not default if isinstance(default, bool) else default + 8)
    assert getattr(Config.resolve({f"GRADCOMP_{name.upper()}": f" {other} "}), name) == other


def test_booleans_in_variables():
    for texts, value in ((("1", "yes", "ON"), True), (("0", "false", "No"), False)):
        assert [Config.resolve({"GRADCOMP_OVERLAP": text}).overlap for text in texts] == [value] * 3


BAD_VARIABLES = {
    "GRADCOMP_SEED": ["-1", str(2**64), "x", "1.5", ""],
    "GRADCOMP_SLICE_ELEMENTS": ["7", "1e6"],
    "GRADCOMP_OVERLAP": ["2", "maybe", ""],
    "GRADCOMP_COLD_AFTER_STEPS": ["0"],
    "GRADCOMP_STATISTICS_EVERY_STEPS": ["-1"],
    "GRADCOMP_TIMEOUT_SECONDS": ["0", "-1", "nan", "soon"],
    "GRADCOMP_STALL_WARNING_SECONDS": ["nan"],
    "GRADCOMP_KERNELS": ["cuda", "Native"],
    "GRADCOMP_ISA": ["sse"],
    "GRADCOMP_THREADS": ["-1", "all", "1.5", ""],
}


@pytest.mark.parametrize(
    ("variable", "text"), [(name, text) for name, texts in BAD_VARIABLES.items() for text in texts]
)
def test_bad_variable_is_refused_by_name(variable: str, text: str):
    with pytest.raises(ConfigError) as caught:
        Config.resolve({variable: text})
    assert variable.removeprefix("GRADCOMP_").lower() in str(caught.value).lower()


@pytest.mark.parametrize(
    "arguments", [{"seed": "1"}, {"seed": True}, {"overlap": 1}, {"timeout_seconds": "600"}, {"kernels": 1}]
)
def test_argument_of_another_type_is_refused(arguments):
    with pytest.raises(ConfigError, match=next(iter(arguments))):
        Config.resolve({}, **arguments)


def test_unknown_argument_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match="did you mean slice_elements"):
        Config.resolve({}, slice_element=10)


def test_unknown_variables_are_named_with_those_that_were_meant():
    unknown = dict.fromkeys(("GRADCOMP_TRANSPRT", "GRADCOMP_SECRT", "GRADCOMP_ZZZ", "OTHER"), "x")
    environ = {**unknown, "GRADCOMP_SEED": "7", "GRADCOMP_SECRET": "x"}
    assert Config.resolve(environ) == Config(seed=7)
    assert unknown_variables(environ) == [
        "unknown variable GRADCOMP_SECRT is ignored: did you mean GRADCOMP_SECRET?",
        "unknown variable GRADCOMP_TRANSPRT is ignored: did you mean GRADCOMP_TRANSPORT?",
        "unknown variable GRADCOMP_ZZZ is ignored",
    ]


BAD_FILES = {
    "unknown key": "sede = 1",
    "wrong type": 'seed = "1"',
    "invalid value": "slice_elements = 1",
    "not toml": "seed 1",
    "a table": "[seed]\nx = 1",
}


@pytest.mark.parametrize("text", BAD_FILES.values(), ids=BAD_FILES)
def test_bad_file_is_refused(toml, text: str):
    with pytest.raises(ConfigError):
        Config.resolve(toml(text))


def test_a_setting_of_earlier_versions_is_refused_with_what_to_do_instead(toml):
    said = "residuals are float32; leave the setting out"
    for environ, arguments in (
        ({"GRADCOMP_RESIDUALS": "bfloat16"}, {}),
        (toml('residuals = "bfloat16"'), {}),
        ({}, {"residuals": "float32"}),
    ):
        with pytest.raises(ConfigError, match=said):
            Config.resolve(environ, **arguments)


def test_missing_file_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="cannot read"):
        Config.resolve({"GRADCOMP_CONFIG": str(tmp_path / "none.toml")})


def test_the_warning_comes_no_later_than_the_end():
    assert Config(timeout_seconds=5.0).stall_warning_seconds == 5.0


def test_what_is_particular_to_a_rank_is_not_compared():
    shared = set(Config().shared())
    assert {"seed", "slice_elements", "overlap", "reorder", "cold_after_steps"} <= shared
    assert (
        not {"timeout_seconds", "stall_warning_seconds", "kernels", "isa", "threads", "trace_spans"} & shared
    )


def test_what_somebody_changed_is_told_apart():
    assert Config().changed() == {}
    config = Config(seed=3, overlap=False)
    assert config.changed() == {"seed": 3, "overlap": False}
    assert config.settings().keys() == FIELDS.keys()
    assert Config(**config.settings()) == config


def test_the_page_holds_the_table():
    assert f"\n{Config.table()}\n" in PAGE.read_text(), "put Config.table() into docs/configuration.md"
