"""String forms of controllers: ``"lgreco:every_steps=500,objective=time"``."""

from __future__ import annotations

import dataclasses
from typing import Any

from gradcomp.compress import from_string
from gradcomp.control.accordion import Accordion
from gradcomp.control.adaqs import AdaQS
from gradcomp.control.auto import Auto
from gradcomp.control.base import Controller
from gradcomp.control.bayes import Bayes
from gradcomp.control.fixed_plan import FixedPlan
from gradcomp.control.gravac import GraVAC
from gradcomp.control.kmeans import KMeans
from gradcomp.control.lgreco import LGreCo
from gradcomp.control.linear import Linear
from gradcomp.control.schedule import Schedule
from gradcomp.core.errors import ConfigError
from gradcomp.core.forms import arguments_of, split, value_of

BUILT_IN: tuple[type[Controller], ...] = (
    LGreCo,
    GraVAC,
    Accordion,
    KMeans,
    Linear,
    Bayes,
    AdaQS,
    Schedule,
    FixedPlan,
    Auto,
)

#: Fields that hold a path, whose slashes separate nothing.
_PATHS = frozenset({"plan"})


def controller_from_string(text: str) -> Controller:
    """Parse a string form; brackets hold compressors and controllers, slashes separate several values.

    ConfigError says what is wrong and what exists.
    """
    known = {kind.name: kind for kind in BUILT_IN}
    name, inner, rest = split(text.strip())
    if name not in known or inner is not None:
        raise ConfigError(f"unknown controller {text!r}; known: {', '.join(sorted(known))}")
    kind = known[name]
    fields = {f.name for f in dataclasses.fields(kind)}
    arguments = arguments_of(
        text, rest, fields, lambda key, value: value if key in _PATHS else value_of(value, _nested)
    )
    try:
        return kind(**arguments)
    except TypeError as error:
        raise ConfigError(f"{text!r}: {error}") from error


def _nested(text: str) -> Any:
    """What stands in brackets: a controller if one has that name, else a compressor."""
    if text.partition(":")[0] in {kind.name for kind in BUILT_IN}:
        return controller_from_string(text)
    return from_string(text)
