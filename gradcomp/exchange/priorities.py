"""The order in which exchange buckets travel, where the next forward pass waits for single means."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator, Sequence

import numpy as np
import numpy.typing as npt

from gradcomp.core.errors import WireFormatError
from gradcomp.exchange.layout import Layout
from gradcomp.exchange.waiting import Waiting, collective
from gradcomp.transport.base import AllGather, Transport

Seconds = npt.NDArray[np.float64]

#: Rank 0 measures these steps of a run, in which buffers exist and buckets have their final order.
_FIRST, LAST_MEASURED = 2, 5


class Priorities:
    """Chooses which exchange bucket travels next: of those whose gradients are there, the one that forward needs first.

    All ranks must issue the same collectives in the same order, so none of them looks at its own arrivals. Rank 0
    measures when layers are ready and how long a byte takes, and sends that once, with the order in which its forward
    pass used the layers. Every rank then computes the same order from it, for every layout. Buckets keep their content,
    and so do the sums in them. ``uses()`` returns layers in the order of their first use.
    """

    def __init__(self, layers: int, uses: Callable[[], Sequence[int]]) -> None:
        self._layers, self._uses = layers, uses
        self._steps = 0
        self._ready: list[Seconds] = []  # of each measured step, by layer
        self._seconds_per_byte: list[float] = []
        #: What rank 0 has sent: by layer the seconds until it is ready, by layer its place in forward, one rate.
        self._agreed: tuple[Seconds, Seconds, float] | None = None

    def after_step(
        self,
        layout: Layout,
        travel: Sequence[int],
        opened: float,
        complete: Seconds,
        ended: Seconds,
        transport: Transport,
    ) -> Generator[Waiting, None, bool]:
        """Measure a step, and agree after the last measured one; return whether the ranks agreed. Collective.

        ``complete`` and ``ended`` have the times at which the gradients of each bucket were there, and its means.
        """
        step, self._steps = self._steps, self._steps + 1
        if travel and _FIRST <= step <= LAST_MEASURED:
            self._measure(layout, travel, opened, complete, ended)
        if step != LAST_MEASURED:
            return False
        yield from self._agree(transport)
        return True

    def _measure(
        self, layout: Layout, travel: Sequence[int], opened: float, complete: Seconds, ended: Seconds
    ) -> None:
        ready = np.zeros(self._layers)
        busy, free_at = 0.0, 0.0
        for number in travel:
            layers = layout.buckets[number].layers
            ready[layers] = np.maximum(ready[layers], complete[number] - opened)
            busy += max(0.0, ended[number] - max(complete[number], free_at))
            free_at = max(free_at, ended[number])
        self._ready.append(ready)
        self._seconds_per_byte.append(busy / max(1, sum(bucket.payload_bytes for bucket in layout.buckets)))

    def _agree(self, transport: Transport) -> Generator[Waiting, None, None]:
        layers = self._layers
        table = np.zeros(2 * layers + 1, dtype="<f8")
        if transport.rank == 0 and self._ready:
            table[:layers] = np.median(self._ready, axis=0)
            used = list(dict.fromkeys(self._uses()))
            table[layers:-1] = layers
            table[layers + np.array(used, dtype=np.int64)] = np.arange(len(used))
            table[-1] = np.median(self._seconds_per_byte)
        counts = [table.nbytes * (rank == 0) for rank in range(transport.size)]
        yield from collective(AllGather(table.view(np.uint8), counts), transport)
        if not (np.isfinite(table).all() and (table >= 0).all()):
            raise WireFormatError("rank 0 sent priorities of layers that are not numbers from 0")
        self._agreed = table[:layers], table[layers:-1], float(table[-1])

    def order(self, layout: Layout) -> tuple[int, ...]:
        """Return the numbers of the layout's buckets in the order in which they travel; theirs until all agreed."""
        if self._agreed is None:
            return tuple(range(len(layout.buckets)))
        ready, needed, seconds_per_byte = self._agreed
        coming = [(ready[b.layers].max(), needed[b.layers].min(), b.number) for b in layout.buckets]
        heapq.heapify(coming)
        waiting: list[tuple[float, int]] = []
        order: list[int] = []
        now = 0.0
        while coming or waiting:
            if not waiting:
                now = max(now, coming[0][0])
            while coming and coming[0][0] <= now:
                _, need, number = heapq.heappop(coming)
                heapq.heappush(waiting, (need, number))
            _, number = heapq.heappop(waiting)
            order.append(number)
            now += seconds_per_byte * layout.buckets[number].payload_bytes
        return tuple(order)
