"""Suggests what a mistaken name or string form was probably meant to be."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from difflib import get_close_matches
from typing import Any

from gradcomp.core.errors import ConfigError
from gradcomp.core.forms import outside_brackets, split

#: Inner compressors in examples of wrappers; the first one that fits is shown.
_INNER = ("topk:density=0.01", "quantize:bits=4")

#: Words that are not names of compressors here, and their string forms: bits, then formats, then names of methods.
_WORDS = {
    r"(?:int|u?q|qsgd|quanti[sz]e)?[-_ ]?([1-8])[-_ ]?(?:bits?)?": r"quantize:bits=\1",
    r"fp?8|float8|e4m3": "block_float:format=fp8_e4m3",
    r"fp?4|float4|e2m1|nvfp4|mxfp4": "block_float:format=fp4_e2m1",
    r"float16|half|f16": "fp16",
    r"bfloat16|brain_?float": "bf16",
    r"float32|fp32|f32|off|no|false": "none",
    r"qsgd": "quantize:bits=4,scaling=l2",
    r"sign_?sgd": "scaled_sign",
    r"rank[-_ ]?(\d+)": r"powersgd:rank=\1",
}


def closest(word: str, known: Iterable[str]) -> str | None:
    """Returns the known word that is meant, ignoring case and separators; None if none is near."""
    by_letters = {_letters(one): one for one in known}
    match = get_close_matches(_letters(word), by_letters, n=1)
    return by_letters[match[0]] if match else None


def _letters(word: str) -> str:
    return re.sub(r"[-_ ]", "", word).lower()


@dataclass(frozen=True)
class Form:
    """The syntax of one name's string forms: its fields with their defaults, and the field that a bare value is for."""

    values: Mapping[str, Any]
    bare: str | None
    wraps: bool
    shown: str = ""  # an example, if the bare field has no default to make one of

    @staticmethod
    def of(kind: Any, bare: str | None, shown: str = "") -> Form:
        """Returns the form of a dataclass; its field ``inner``, if any, holds the compressor that it wraps."""
        values = {one.name: _default(one) for one in fields(kind)}
        return Form(
            {name: value for name, value in values.items() if name != "inner"},
            bare if bare in values else None,
            "inner" in values,
            shown,
        )

    def example(self, name: str, inner: str | None) -> str:
        """Returns a string of this form, with the field that matters most."""
        if self.shown:
            return self.shown
        head = f"{name}[{inner or _INNER[0]}]" if self.wraps else name
        value = None if self.bare is None else self.values[self.bare]
        return head if value is None else f"{head}:{self.bare}={value}"


def _default(field: Field[Any]) -> Any:
    return None if field.default is MISSING else field.default


def hint(text: str, forms: Mapping[str, Form], parse: Callable[[str], object], example: str = "") -> str:
    """Returns a suggestion for the error about ``text``: `` (did you mean 'topk:density=0.01'?)``, or an example.

    Every suggestion parses. It is empty if only a value is wrong, which the error itself explains.
    """
    for candidate in _candidates(text.strip(), forms):
        if candidate == text.strip() and ":" in candidate:
            return ""
        if _parses(candidate, parse):
            return f" (did you mean {candidate!r}?)"
    name = closest(head_of(text), forms)
    if name is not None:
        shown = (forms[name].example(name, inner) for inner in _INNER)
        example = next((one for one in shown if _parses(one, parse)), "")
    return f" (for example {example!r})" if example else ""


def head_of(text: str) -> str:
    """Returns the name that a string form begins with."""
    return text.strip().partition(":")[0].partition("[")[0].strip()


def hinted(error: ConfigError, said: str) -> ConfigError:
    """Returns the error with a hint, inserted before its list of all names."""
    problem, known, names = str(error).partition("; known: ")
    return ConfigError(problem + said + known + names)


def _parses(text: str, parse: Callable[[str], object]) -> bool:
    try:
        parse(text)
    except ConfigError:
        return False
    return True


def _candidates(text: str, forms: Mapping[str, Form]) -> Iterable[str]:
    """Yields the string forms that may be meant, the likeliest first."""
    for pattern, said in _WORDS.items():
        if (match := re.fullmatch(pattern, text.lower())) and text not in forms:
            yield match.expand(said)
    for inner in _INNER:
        if (candidate := _repaired(text, forms, inner)) is not None:
            yield candidate


def _repaired(text: str, forms: Mapping[str, Form], inner_example: str) -> str | None:
    """Returns the form with the nearest name and fields; None if nothing is near."""
    try:
        name, inner, rest = split(text.strip())
    except ConfigError:
        return None
    known = name if name in forms else closest(name, forms)
    if known is None or (inner is not None and not forms[known].wraps):
        return None
    form = forms[known]
    if known != name and not rest and inner is None:
        return form.example(known, inner_example)
    head = known
    if form.wraps:
        within = inner_example if inner is None else _repaired(inner, forms, inner_example)
        head = f"{known}[{inner if within is None else within}]"
    arguments: dict[str, str] = {}
    for item in filter(None, outside_brackets(rest) if form.values else []):
        argument = _argument(item, form)
        if argument is None:
            return None
        arguments.setdefault(*argument)
    written = ",".join(f"{key}={value}" for key, value in arguments.items())
    return f"{head}:{written}" if written else head


def _argument(item: str, form: Form) -> tuple[str, str] | None:
    """Returns the field and the value of an item: ``0.01`` is a bare density, ``bit=4`` means bits=4.

    A field without a value, as ``density``, gets its default.
    """
    key, equals, value = (part.strip() for part in item.partition("="))
    if not equals and form.bare is not None and re.fullmatch(r"[-+.\de]*\d[-+.\de]*", key):
        return form.bare, key
    field = key if key in form.values else closest(key, form.values)
    if field is None or (not equals and form.values[field] is None):
        return None
    return field, value if equals else str(form.values[field]).lower()
