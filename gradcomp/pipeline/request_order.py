"""Ranks that can predict which group of requests runs next need not ask each other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradcomp.pipeline.requests import PreparedRequest

#: A prediction is used once this many before it were right.
TRUSTED = 3

#: The length of the history in groups. A step of up to a quarter of it is predicted without a break.
_MOST = 16384

#: The texts of a group's requests, and whether some rank had new inputs.
_Key = tuple[tuple[str, ...], bool]


class RequestOrder:
    """Predicts the next group from those that all ranks have run.

    If the last p groups are equal to the p groups before them, the next one is the one that ran p groups ago; p is
    the largest for which this holds. So an exception amid equal steps, such as an evaluation, is not expected a
    second time; two steps after it suffice to predict again. All ranks record the same groups, so they predict the
    same. Memory: 128 KiB; a request stays referenced while it is in the history.
    """

    def __init__(self) -> None:
        self._numbers: dict[_Key, int] = {}
        self._keys: list[_Key] = []
        #: By text, the request that the ranks ran last; all ranks agree on the number of its runs.
        self._requests: dict[str, PreparedRequest] = {}
        self._history = np.zeros(_MOST, dtype=np.int32)
        #: How many groups up to each one equal as many at the end of the history.
        self._equal = np.zeros(_MOST, dtype=np.int32)
        self._count = 0
        self._next = -1
        self._right = 0

    @property
    def predicted(self) -> PreparedRequest | None:
        """Return the request that runs next, alone and on new inputs; None if the ranks have to compare."""
        if self._right < TRUSTED or self._next < 0:
            return None
        texts, changed = self._keys[self._next]
        request = self._requests[texts[0]] if changed and len(texts) == 1 else None
        return None if request is None or request.keeps_state else request

    def note(self, requests: Sequence[PreparedRequest], changed: bool) -> None:
        """Record what all ranks have agreed to run; ``changed`` says that some rank had new inputs."""
        if self._count == _MOST:
            self._drop_half()
        key = tuple(request.text for request in requests), changed
        number = self._numbers.setdefault(key, len(self._keys))
        if number == len(self._keys):
            self._keys.append(key)
        self._requests.update((request.text, request) for request in requests)
        self._right = self._right + 1 if number == self._next else 0
        count = self._count
        self._history[count] = number
        longer = self._equal[: count - 1] + 1 if count > 1 else self._equal[:0]
        self._equal[:count] = self._history[:count] == number
        self._equal[1:count] *= longer
        self._count = count + 1
        self._next = self._predict()

    def _predict(self) -> int:
        """Return what came after the longest repetition that is as long as its distance, or -1."""
        last = self._count - 1
        repeats = self._equal[:last] >= np.arange(last, 0, -1)
        first = int(repeats.argmax()) if last > 0 else 0
        return int(self._history[first + 1]) if last > 0 and repeats[first] else -1

    def _drop_half(self) -> None:
        """Forget the older half, and the requests that only it has."""
        half = _MOST // 2
        kept, numbers = np.unique(self._history[half:], return_inverse=True)
        self._history[:half] = numbers
        self._equal[:half] = self._equal[half:]
        self._next = int(np.flatnonzero(kept == self._next)[0]) if self._next in kept else -1
        self._count = half
        self._keys = [self._keys[number] for number in kept.tolist()]
        self._numbers = {key: number for number, key in enumerate(self._keys)}
        texts = {text for texts, _ in self._keys for text in texts}
        self._requests = {text: request for text, request in self._requests.items() if text in texts}
