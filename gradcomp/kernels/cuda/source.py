"""The text of a CUDA source, with everything it includes, and the options of its compilation.

NVRTC is given one text that needs no other files, so that a cache by text notices a change in any header. The headers
of `native/` lie beside the sources once the package is built, and in the repository's `native/` before.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Final

_HERE: Final = Path(__file__).parent
_NATIVE: Final = (_HERE / "native", _HERE.parents[2] / "native")
_INCLUDE: Final = re.compile(r'^#include "([^"]+)"$')
_LIBRARY: Final = re.compile(r"^#include <[^>]+>$")

#: No contraction, no flush to zero, division and roots rounded by IEEE 754: the same bytes as on a CPU.
OPTIONS: Final = (
    "--std=c++20",
    "-default-device",
    "--fmad=false",
    "--ftz=false",
    "--prec-div=true",
    "--prec-sqrt=true",
    "-DGRADCOMP_CUDA",
    "-DGRADCOMP_BODY=cuda",
)

PRELUDE: Final = "prelude.cuh"


@cache
def flat(name: str) -> str:
    """Returns the source with its headers in place of ``#include``, once each, without the standard library's."""
    lines: list[str] = []
    _append(_HERE / name, set(), lines)
    return "\n".join(lines) + "\n"


def options(defines: Mapping[str, object]) -> tuple[str, ...]:
    """Returns OPTIONS and the macro definitions of one module."""
    return (*OPTIONS, *(f"-D{name}={value}" for name, value in defines.items()))


def _append(path: Path, seen: set[Path], lines: list[str]) -> None:
    path = path.resolve()
    if path in seen:
        return
    seen.add(path)
    for line in path.read_text(encoding="utf-8").splitlines():
        if found := _INCLUDE.match(line):
            _append(_find(path, found[1]), seen, lines)
        elif line != "#pragma once" and not _LIBRARY.match(line):
            lines.append(line)


def _find(includer: Path, name: str) -> Path:
    if name.startswith("native/"):
        return next(root / name.removeprefix("native/") for root in _NATIVE if root.is_dir())
    return includer.parent / name
