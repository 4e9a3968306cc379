"""Text from outside: made printable, parsed as string forms, and compared with known names."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from difflib import get_close_matches
from inspect import Parameter, signature
from typing import Any, TypeVar

from gradcomp.core.errors import ConfigError

_MOST_CHARACTERS = 2000

Made = TypeVar("Made")
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


def printable(text: str | bytes, most: int = _MOST_CHARACTERS) -> str:
    """Returns the text on one line of at most ``most`` characters: escapes what a terminal could act on, cuts the rest.

    Control and format characters, line ends, and bytes that are not UTF-8 are escaped. Text that was made printable
    stays the same.
    """
    whole = len(text)
    if isinstance(text, bytes):
        text = text[: 4 * most + 4].decode(errors="backslashreplace")  # a character has up to four bytes
    # One character more than fits, so that a cut shows.
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[: most + 1])
    if len(shown) <= most:
        return shown
    end = f" ... (cut, of {whole})"
    return shown[: most - len(end)] + end


def split(text: str) -> tuple[str, str | None, str]:
    """Splits ``name[inner]:fields`` into its parts; inner is None without brackets."""
    name, bracket, rest = text.partition("[")
    if not bracket or ":" in name:
        name, _, rest = text.partition(":")
        return name, None, rest
    depth = 1
    for at, character in enumerate(rest):
        depth += (character == "[") - (character == "]")
        if depth == 0:
            after = rest[at + 1 :]
            if after and not after.startswith(":"):
                raise ConfigError(f"{text!r}: expected ':' after ']', got {after!r}")
            return name, rest[:at], after[1:]
    raise ConfigError(f"{text!r}: a bracket is not closed")


def outside_brackets(text: str, separator: str = ",") -> list[str]:
    """Splits the text at separators that are not inside brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += (character == "[") - (character == "]")
        if character == separator and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def arguments_of(
    text: str, rest: str, fields: Collection[str], read: Callable[[str, str], Any]
) -> dict[str, Any]:
    """Parses ``field=value,...`` into arguments; ``read(field, value)`` makes a value, ``text`` is for errors."""
    arguments: dict[str, Any] = {}
    for item in filter(None, outside_brackets(rest)):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals or key not in fields:
            known = f"one of {', '.join(sorted(fields))}" if fields else "of none: it has no fields"
            raise ConfigError(f"{text!r}: expected field=value with field {known}")
        if key in arguments:
            raise ConfigError(f"{text!r}: {key} is given twice")
        arguments[key] = read(key, value)
    return arguments


def build(kind: Callable[..., Made], text: str, arguments: dict[str, Any]) -> Made:
    """Returns ``kind(**arguments)``; a ConfigError about ``text`` names the required fields that are missing."""
    needed = [name for name, one in signature(kind).parameters.items() if one.default is Parameter.empty]
    if missing := [name for name in needed if name not in arguments]:
        raise ConfigError(f"{text!r} lacks {', '.join(missing)}")
    return kind(**arguments)


def value_of(text: str, nested: Callable[[str], Any]) -> Any:
    """Parses a number, a word, ``true``, ``none``, ``a/b`` as a tuple, or in brackets what ``nested`` parses."""
    parts = outside_brackets(text, "/")
    if len(parts) > 1:
        return tuple(value_of(part, nested) for part in parts if part)
    if text.startswith("[") and text.endswith("]"):
        return nested(text[1:-1])
    lowered = text.lower()
    if lowered in ("true", "false"):
        return lowered == "true"
    if lowered == "none":
        return None
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


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
        values = {one.name: None if one.default is MISSING else one.default for one in fields(kind)}
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


def hint(text: str, forms: Mapping[str, Form], parse: Callable[[str], object], example: str = "") -> str:
    """Returns a suggestion for the error about ``text``: `` (did you mean 'topk:density=0.01'?)``, or an example.

    Every suggestion parses. It is empty if only a value is wrong, which the error itself explains.
    """
    for candidate in _candidates(text.strip(), forms):
        if candidate == text.strip() and ":" in candidate:
            return ""
        if parses(candidate, parse):
            return f" (did you mean {candidate!r}?)"
    name = closest(head_of(text), forms)
    if name is not None:
        shown = (forms[name].example(name, inner) for inner in _INNER)
        example = next((one for one in shown if parses(one, parse)), "")
    return f" (for example {example!r})" if example else ""


def is_word(text: str) -> bool:
    """Returns whether the text is another word for a compressor, such as ``half``, for which there is a suggestion."""
    return any(re.fullmatch(pattern, text.lower()) for pattern in _WORDS)


def head_of(text: str) -> str:
    """Returns the name that a string form begins with."""
    return text.strip().partition(":")[0].partition("[")[0].strip()


def hinted(error: ConfigError, said: str) -> ConfigError:
    """Returns the error with a hint, inserted before its list of all names."""
    problem, known, names = str(error).partition("; known: ")
    return ConfigError(problem + said + known + names)


def parses(text: str, parse: Callable[[str], object]) -> bool:
    """Returns whether ``parse`` takes the text; False for a ConfigError."""
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
