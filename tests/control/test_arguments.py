"""Arguments that controllers refuse, and what the errors say."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import pytest
from control.observed import environment

from gradcomp import Accordion, AdaQS, Auto, ConfigError, GraVAC, KMeans, LGreCo, Linear, Quantize, Warmup
from gradcomp.control.grouped import Bayes
from gradcomp.control.schedule import FixedPlan, Schedule

GIVEN: dict[Any, dict[str, Any]] = {
    **{kind: {"low": 8, "high": 2, "every_steps": 3} for kind in (Accordion, AdaQS)},
    **{kind: {"every_steps": 5} for kind in (KMeans, Linear, Bayes, LGreCo)},
}
STEPS = (0, 1.5, True, "5", None)
SHARES = (0, -0.1, nan, inf, True, "0.1", None)
VALUES: dict[Any, dict[str, tuple[Any, ...]]] = {
    GraVAC: {
        "minimum": (0.5, 0, "10", None, True, nan, inf),
        "maximum": (9, inf, "1000", None),
        "epsilon": (0, 1.01, nan, None, True),
        "window": STEPS,
        "omega": (-0.01, nan, None),
        "policy": ("linear", None, 2),
        "per_layer": (1, None, "yes"),
        "gain": ("squared", None, 2),
    },
    Auto: {"warmup_steps": STEPS, "check_every": STEPS, "hidden": SHARES, "drift": SHARES},
    Accordion: {
        "low": (True,),
        "high": (nan, None),
        "eta": (0, inf, True),
        "rate_fall": (0, 1.5),
        "every_steps": (0,),
    },
    AdaQS: {"factor": (1.0, 0, nan, "x")},
    KMeans: {
        "every_steps": (0, -1, 1.5, True, "5"),
        "levels": ([2, True], [2, inf]),
        "alpha": (0, -1, nan, "1"),
        "clusters": (0, 2.5),
    },
    Linear: {"alpha": (0, -1, nan, "1")},
    Bayes: {"alpha": (0,), "trials": (0, 2.0), "clusters": (0,), "seed": (-1, 1 << 32, None)},
    LGreCo: {
        "every_steps": (0,),
        "levels": ([],),
        "alpha": (0, nan),
        "buckets": (0, 2.5),
        "objective": ("money",),
        "metric": ("max",),
        "accordion": (3,),
        "window": (0,),
        "samples": (0, 1.5),
        "memory_bytes": (-1,),
        "widen": (1,),
        "probes_per_step": (0, 1.5, True, None),
        "blocks": (0, -1, 257, 2.0, True, "8", None),
    },
}


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (kind, name, value)
        for kind, names in VALUES.items()
        for name, values in names.items()
        for value in values
    ],
)
def test_values_that_cannot_be(kind, name, value):
    with pytest.raises(ConfigError, match=name):
        kind(**{**GIVEN.get(kind, {}), name: value})


@pytest.mark.parametrize(
    ("kind", "given", "words"),
    [
        *[(kind, {"low": 2, "high": 2}, "differ") for kind in (Accordion, AdaQS)],
        (Accordion, {"low": 4, "high": "quantize:bits=2"}, "both"),
        (Accordion, {"high": "nothing"}, "unknown"),
        (AdaQS, {"low": 2, "high": 8}, "below low"),
        (AdaQS, {"low": 2, "high": 0}, "above 0"),
        (KMeans, {"levels": []}, "empty"),
        *[(KMeans, {"levels": bad}, "sequence") for bad in ("248", 4)],
        (KMeans, {"levels": ["nothing"]}, "unknown"),
        *[(kind, {"levels": "every"}, "hybrid") for kind in (LGreCo, KMeans, Linear)],
        (LGreCo, {"samples": 4, "window": 5}, "samples"),
        *[(Auto, {"choices": bad}, "one or more") for bad in ((), "none", Quantize(4))],
        (Auto, {"choices": ("none", "nonsense")}, "unknown"),
        (Auto, {"choices": ("none", 4)}, "got 4"),
        (Auto, {"choices": ("none", "none")}, "twice"),
        *[
            (Auto, {"choices": ("none", bad)}, "schedule, momentum or clipping")
            for bad in (Warmup(Quantize(4), 10), "dgc:density=0.01")
        ],
    ],
)
def test_arguments_that_cannot_be(kind, given, words):
    with pytest.raises(ConfigError, match=words):
        kind(**{**GIVEN.get(kind, {}), **given})


@pytest.mark.parametrize(
    ("controller", "words"),
    [
        *[(kind(99, 2, every_steps=3), "bits") for kind in (AdaQS, Accordion)],
        (Accordion(2, 8, every_steps=3), "swap low and high"),
        *[(kind(5, levels=[2, 3]), "outside") for kind in (KMeans, LGreCo)],
        (FixedPlan({"*": 99}), "bits"),
        (Schedule({0: 4, 900: 99}), "bits"),  # later steps are checked at the start too
        (Schedule({0: 4, 900: {"x": 4}}), r"step 900.*'x' \(closest: 'l0'\)"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
@pytest.mark.parametrize("world", [1, 2])
def test_levels_that_layers_cannot_take(controller, words, world):
    with pytest.raises(ConfigError, match=words):
        controller.begin(environment([64], world=world))
