"""Objects that nothing we hold leads to, such as a parameter's DistributedDataParallel: found among the living."""

from __future__ import annotations

import gc
from typing import Any, TypeVar

T = TypeVar("T")


def live(kind: type[T]) -> list[T]:
    """The instances of ``kind`` that the program still holds.

    Looks at every object: some 50 ms for half a million. What ``gc.freeze()`` has set aside is not found.
    """
    if not _instances(kind):
        return []
    gc.collect()  # what only a reference cycle keeps is gone for the program
    return _instances(kind)


def _instances(kind: type[T]) -> list[T]:
    # By the type itself: isinstance() asks the object for its class, and proxies run code then.
    kinds: set[type[Any]] = set()
    _add_with_subclasses(kind, kinds)
    objects = gc.get_objects()
    if kinds.isdisjoint(map(type, objects)):  # nearly always, and fast
        return []
    return [each for each in objects if type(each) in kinds]


def _add_with_subclasses(kind: type[Any], kinds: set[type[Any]]) -> None:
    if kind not in kinds:
        kinds.add(kind)
        for subclass in kind.__subclasses__():
            _add_with_subclasses(subclass, kinds)
