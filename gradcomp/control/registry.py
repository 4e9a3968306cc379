"""Parses string forms of controllers: ``"lgreco:every_steps=500,objective=time"``."""

from __future__ import annotations

import dataclasses
from typing import Any

from gradcomp.compress import from_string
from gradcomp.compress.registry import OF_CONTROLLERS, registered
from gradcomp.control.auto import Auto
from gradcomp.control.base import Controller
from gradcomp.control.gravac import GraVAC
from gradcomp.control.grouped import Bayes, KMeans, Linear
from gradcomp.control.lgreco import LGreCo
from gradcomp.control.schedule import FixedPlan, Schedule
from gradcomp.control.two_levels import Accordion, AdaQS
from gradcomp.control.what_if import WhatIf
from gradcomp.core.errors import ConfigError
from gradcomp.core.strings import Form, arguments_of, build, head_of, hint, hinted, split, value_of

BUILT_IN: tuple[type[Controller], ...]
BUILT_IN = (LGreCo, GraVAC, Accordion, KMeans, Linear, Bayes, AdaQS, Schedule, FixedPlan, Auto, WhatIf)

#: Examples in error messages, of controllers that have no default for ``every_steps``.
_SHOWN = {kind.name: f"{kind.name}:every_steps=500" for kind in (KMeans, Linear, Bayes)}
_SHOWN |= {kind.name: f"{kind.name}:low=8,high=2,every_steps=500" for kind in (Accordion, AdaQS)}

OF_CONTROLLERS.update({kind.name: f"controller={kind.name!r}" for kind in BUILT_IN})
OF_CONTROLLERS[Auto.name] = 'compression="auto", by itself'


def controller_from_string(text: str) -> Controller:
    """Parses a string form; brackets hold compressors and controllers, slashes separate several values.

    ConfigError says what is wrong, lists the known names, and suggests what was probably meant.
    """
    try:
        return _parse(text)
    except ConfigError as error:
        forms = {kind.name: Form.of(kind, "every_steps", _SHOWN.get(kind.name, "")) for kind in BUILT_IN}
        said = "" if head_of(text) in registered() else hint(text, forms, _parse, "lgreco:every_steps=500")
        raise hinted(error, said) from error.__cause__


def _parse(text: str) -> Controller:
    known = {kind.name: kind for kind in BUILT_IN}
    name, inner, rest = split(text.strip())
    if name in registered():
        raise ConfigError(f"{name} is a compressor, not a controller; use compression={text.strip()!r}")
    if name not in known or inner is not None:
        raise ConfigError(f"unknown controller {text!r}; known: {', '.join(sorted(known))}")
    kind = known[name]
    fields = {f.name for f in dataclasses.fields(kind)}
    # A plan may be a path, whose slashes do not separate values.
    arguments = arguments_of(
        text, rest, fields, lambda key, value: value if key == "plan" else value_of(value, _nested)
    )
    return build(kind, text, arguments)


def _nested(text: str) -> Any:
    """Parses the text in brackets: a controller if one has that name, else a compressor."""
    if text.partition(":")[0] in {kind.name for kind in BUILT_IN}:
        return _parse(text)
    return from_string(text)
