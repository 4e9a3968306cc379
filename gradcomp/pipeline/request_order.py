"""In which order groups of requests run: ranks that know it need not ask each other what comes next."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradcomp.pipeline.requests import PreparedRequest

#: A prediction is used once so many before it were right.
TRUSTED = 3

#: Groups that are kept. A step of up to a quarter of them is predicted without a break.
_MOST = 16384

#: The texts of a group's requests, and whether some rank had new inputs.
_Key = tuple[tuple[str, ...], bool]


class RequestOrder:
    """Predicts the next group from those that all ranks have run.

    If the last p groups are the p groups before them, the next one is the one that ran p groups ago; p is the largest
    for which this holds. So an exception in the midst of equal steps, as an evaluation is, is not expected a second
    time; after it two steps are needed. All ranks note the same groups, so they predict the same. Memory: 128 KiB;
    and a request stays referenced while it is among the groups that are kept.
    """

    def __init__(self) -> None:
        self._numbers: dict[_Key, int] = {}
        self._keys: list[_Key] = []
        #: By text, the request that the ranks ran last. Its runs have the same number on all of them.
        self._requests: dict[str, PreparedRequest] = {}
        self._history = np.zeros(_MOST, dtype=np.int32)
        #: By group: how many groups up to it equal as many at the end of the history.
        self._equal = np.zeros(_MOST, dtype=np.int32)
        self._count = 0
        self._next = -1
        self._right = 0

    @property
    def predicted(self) -> PreparedRequest | None:
        """The request that runs next, alone and on new inputs; None: the ranks have to compare."""
        if self._right < TRUSTED or self._next < 0:
            return None
        texts, changed = self._keys[self._next]
        request = self._requests[texts[0]] if changed and len(texts) == 1 else None
        return None if request is None or request.keeps_state else request

    def note(self, requests: Sequence[PreparedRequest], changed: bool) -> None:
        """All ranks have agreed to run these. ``changed``: some rank had new inputs."""
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
        """What came behind the longest repetition that is as long as its distance; -1 without one."""
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
