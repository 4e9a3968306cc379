"""What a kernel's struct of parameters says about them, checked at every launch of the stand-in.

All are eight bytes long, so that nothing else would tell a double from an integer.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import numpy as np

from gradcomp.kernels.cuda import modules
from gradcomp.kernels.cuda.layout import Integer, Parameter, Part, Real, Ref

_KERNEL = re.compile(r"KERNEL\([^)]*\)+ (\w+)\(const (\w+) __grid_constant__ \w+\)")
_FITTING: Any = {
    "std::uint64_t": (Ref, Part, Integer, int, np.integer),
    "std::int64_t": (Integer, int, np.integer),
    "double": (Real, float),
}


@cache
def kinds_of(name: str, kernel: str) -> tuple[str, ...]:
    """The types of a kernel's parameters, in order."""
    text = re.sub(r"//.*", "", modules.flat(name))
    structs = dict(_KERNEL.findall(text))
    body = re.search(rf"struct {structs[kernel]} {{(.*?)}};", text, re.S)
    assert body is not None
    kinds: list[str] = []
    for declaration in filter(str.strip, body[1].split(";")):
        kind, members = declaration.split(maxsplit=1)
        assert kind in _FITTING, f"{structs[kernel]}: {kind} is no type of a parameter"
        kinds += [kind] * len(members.split(","))
    return tuple(kinds)


def check(name: str, kernel: str, parameters: tuple[Parameter, ...]) -> None:
    """AssertionError unless there are as many, each of its kind."""
    kinds = kinds_of(name, kernel)
    assert len(parameters) == len(kinds), f"{kernel}: {len(parameters)} parameters for {len(kinds)}"
    for i, (kind, parameter) in enumerate(zip(kinds, parameters, strict=True)):
        assert isinstance(parameter, _FITTING[kind]), f"{kernel}: parameter {i} is {parameter!r}, no {kind}"
