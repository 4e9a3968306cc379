"""Finds objects by class that nothing else refers us to, such as the DistributedDataParallel around a parameter."""

from __future__ import annotations

import gc
from typing import Any, TypeVar

T = TypeVar("T")


def live(kind: type[T]) -> list[T]:
    """Return the instances of ``kind`` that the program still refers to.

    It visits every object that Python's garbage collector tracks: about 50 ms for half a million. Objects
    that ``gc.freeze()`` has set aside are not found.
    """
    if not _instances(kind):
        return []
    gc.collect()  # the program no longer has objects that only a reference cycle keeps
    return _instances(kind)


def _instances(kind: type[T]) -> list[T]:
    # type() and not isinstance(), which asks an object for its __class__: proxies run code then.
    kinds: set[type[Any]] = set()
    _add_with_subclasses(kind, kinds)
    objects = gc.get_objects()
    if kinds.isdisjoint(map(type, objects)):  # the usual case, made fast
        return []
    return [each for each in objects if type(each) in kinds]


def _add_with_subclasses(kind: type[Any], kinds: set[type[Any]]) -> None:
    if kind not in kinds:
        kinds.add(kind)
        for subclass in kind.__subclasses__():
            _add_with_subclasses(subclass, kinds)
