"""What benchmarks/gpu.py calls: codes, selections, factors. Everything that is large lies on the device."""

from __future__ import annotations

from typing import Any

import numpy as np
from gpu_machine import Array, Machine

from gradcomp.core.config import DEVICE_SLICE
from gradcomp.kernels import dispatch, segments
from gradcomp.kernels.segments import Draw, Factor, Shapes
from gradcomp.reduce.header import ByteHeader

SETS = 3  # of inputs that take turns
BUCKET_SIZE = 512
SLICE = DEVICE_SLICE  # elements of a row, as the engine cuts large layers
BITS = 4
DTYPES = {"float32": 0, "float16": 1}

_COMPILED = "native" in dispatch._backends
_HOST: Any = dispatch.named("native" if _COMPILED else "reference")
CHECKED_ROWS = None if _COMPILED else 1  # NumPy would take minutes for all; rows do not depend on each other


def _normal(length: int, seed: int) -> Any:
    """Numbers with the spread of a gradient; beyond some millions they repeat."""
    values = np.random.default_rng(seed).standard_normal(min(length, 1 << 24), np.float32)
    return np.resize(values, length)


def _rows(length: int) -> Any:
    """A table of slices, without addresses."""
    begins = np.arange(0, length, SLICE)
    table = np.zeros(len(begins), segments.SEGMENT)
    table["length"] = np.minimum(SLICE, length - begins)
    table["start"], table["level"], table["bucket_size"] = begins, BITS, BUCKET_SIZE
    return table


class Codes:
    """Four-bit min-max codes of one large gradient, in slices."""

    def __init__(self, machine: Machine, elements: int, dtype: str) -> None:
        self._machine, self._body = machine, machine.body
        kind = np.dtype(dtype)
        self.itemsize = kind.itemsize
        self._table = _rows(elements)
        self._table["dtype"] = DTYPES[dtype]
        sizes = np.array(
            [segments.wire_bytes(segments.MINMAX, int(n), BITS, BUCKET_SIZE) for n in self._table["length"]]
        )
        # Behind a header, as in a message.
        header = ByteHeader.size(len(self._table))
        self._table["payload"] = header + np.cumsum(sizes) - sizes
        self.payload_bytes = int(sizes.sum())
        self._message_bytes = header + self.payload_bytes
        self._flags = np.zeros(len(self._table), np.uint8)
        self._sets: list[dict[str, Array]] = []
        for number in range(SETS):
            values = _normal(elements, number)
            arrays = {"gradient": machine.array(elements, kind, values)}
            arrays |= {
                name: machine.array(elements, np.float32, 0.1 * values)
                for name in ("residual", "next_residual")
            }
            arrays["output"] = machine.array(elements, kind)
            arrays["payload"] = machine.array(self._message_bytes, np.uint8)
            self._sets.append(arrays)
        self._mean = machine.array(self._message_bytes, np.uint8, np.zeros(self._message_bytes, np.uint8))

    def _filled(self, arrays: dict[str, Any], *names: str) -> Any:
        table = self._table.copy()
        for name in names:
            array = arrays[name]
            address = array.address if isinstance(array, Array) else array.ctypes.data
            table[name] = address + array.itemsize * table["start"]
        return table

    def copy(self, number: int) -> None:
        arrays = self._sets[number % SETS]
        self._machine.copy(arrays["output"], arrays["gradient"])

    def add(self, number: int) -> None:
        arrays = self._sets[number % SETS]
        self._machine.add(arrays["next_residual"], arrays["gradient"], arrays["residual"])

    def _encode(
        self, body: Any, arrays: dict[str, Any], *, stochastic: bool, residual: bool, rows: int | None = None
    ) -> None:
        names = ("gradient", "residual", "next_residual") if residual else ("gradient",)
        draw = Draw(1, 2, 3) if stochastic else None
        table = self._filled(arrays, *names)[:rows]
        body.encode(
            segments.MINMAX, table, arrays["payload"], self._flags[:rows], draw=draw, scale=1.0, decay=1.0
        )

    def encode(self, number: int, *, stochastic: bool, residual: bool) -> None:
        self._encode(self._body, self._sets[number % SETS], stochastic=stochastic, residual=residual)

    def decode(self, number: int) -> None:
        arrays = self._sets[number % SETS]
        table = self._filled(arrays, "output")
        self._body.decode(segments.MINMAX, table, arrays["payload"], self._flags, divisor=1.0, scale=1.0)

    def reduce(self, number: int, ranks: int) -> None:
        payloads = [self._sets[(number + rank) % SETS]["payload"] for rank in range(ranks)]
        self._reduce(self._body, payloads, self._mean)

    def _reduce(self, body: Any, payloads: list[Any], mean: Any, rows: int | None = None) -> None:
        draw, divisor = Draw(1, 2, segments.OWNER_RANK), float(len(payloads))
        table, flags = self._table[:rows], self._flags[:rows]
        body.reduce(segments.MINMAX, table, payloads, mean, flags, draw=draw, divisor=divisor, decay=1.0)

    # -- the same on the host ------------------------------------------------------------------------------------

    def _on_host(self) -> dict[str, Any]:
        return {name: array.read() for name, array in self._sets[0].items()}

    def _same(self, found: dict[str, Any], expected: dict[str, Any], *names: str) -> bool:
        """In the rows that the host's kernels check."""
        elements = slice(int(self._table["length"][:CHECKED_ROWS].sum()))
        ends = [*self._table["payload"].tolist(), self._message_bytes]
        codes = slice(ends[0], ends[-1 if CHECKED_ROWS is None else CHECKED_ROWS])
        parts = {name: codes if name == "payload" else elements for name in names}
        return all(
            found[name][part].tobytes() == expected[name][part].tobytes() for name, part in parts.items()
        )

    def encoded_right(self, **settings: bool) -> bool:
        expected = self._on_host()
        self.encode(0, **settings)
        self._encode(_HOST, expected, **settings, rows=CHECKED_ROWS)
        return self._same(self._on_host(), expected, "payload", "next_residual")

    def decoded_right(self) -> bool:
        self.decode(0)
        found = self._on_host()
        expected = found | {"output": np.zeros_like(found["output"])}
        _HOST.decode(
            segments.MINMAX,
            self._filled(expected, "output")[:CHECKED_ROWS],
            expected["payload"],
            self._flags[:CHECKED_ROWS],
            divisor=1.0,
            scale=1.0,
        )
        return self._same(found, expected, "output")

    def reduced_right(self, ranks: int) -> bool:
        for number in range(SETS):
            self.encode(number, stochastic=False, residual=False)
        self.reduce(0, ranks)
        expected = np.zeros(self._message_bytes, np.uint8)
        read = [arrays["payload"].read() for arrays in self._sets]
        self._reduce(_HOST, [read[rank % SETS] for rank in range(ranks)], expected, rows=CHECKED_ROWS)
        return self._same({"payload": self._mean.read()}, {"payload": expected}, "payload")


class Selection:
    """One percent of one large gradient."""

    def __init__(self, machine: Machine, elements: int) -> None:
        self._machine, self._body = machine, machine.body
        self._gradients = [machine.array(elements, np.float32, _normal(elements, i)) for i in range(SETS)]
        self._next_residual = machine.array(elements)
        self.torch_tensor = machine.torch_tensor(self._gradients[0])
        self._tensors = [machine.torch_tensor(each) for each in self._gradients]
        self._table = np.zeros(1, segments.SEGMENT)
        self._table["length"] = elements
        self._flags, self._factors = np.zeros(1, np.uint8), np.ones(1, np.float32)
        self._counts = np.array([max(1, elements // 100)])
        self._limits, self._offsets = 2 * self._counts, np.zeros(1, np.int64)
        self._indices = machine.array(int(self._limits[0]), np.uint32)
        self._values = machine.array(int(self._limits[0]))
        self._found = np.zeros(1, np.int64)

    def _filled(self, gradient: int, next_residual: int) -> Any:
        table = self._table.copy()
        table["gradient"], table["next_residual"] = gradient, next_residual
        return table

    def _given(self, number: int) -> Any:
        return self._filled(self._gradients[number % SETS].address, self._next_residual.address)

    def torch_top(self, number: int, *, in_order: bool) -> None:
        self._machine.torch_top(self._tensors[number % SETS], int(self._counts[0]), in_order=in_order)

    def top(self, number: int) -> None:
        self._top(self._body, self._given(number), self._indices, self._values)

    def _top(self, body: Any, table: Any, *lists: Any) -> None:
        lists = self._counts, self._offsets, *lists, self._found
        body.select_top(table, self._flags, self._factors, *lists, decay=1.0, zeros=True)

    def sampled(self, number: int) -> None:
        self._sampled(self._body, self._given(number), self._indices, self._values)

    def _sampled(self, body: Any, table: Any, *lists: Any) -> None:
        thresholds = np.zeros(1, np.float32)
        body.contribute(table, self._flags, self._factors, decay=1.0)
        body.sample_thresholds(table, self._counts, thresholds, stride=100, phase=0)
        body.select_above(table, thresholds, self._limits, self._offsets, *lists, self._found)

    def _host_lists(self) -> tuple[Any, Any, Any, Any]:
        gradient = self._gradients[0].read()
        next_residual = np.zeros_like(gradient)
        lists = np.zeros(len(self._indices), np.uint32), np.zeros(len(self._values), np.float32)
        return gradient, next_residual, *lists

    def _same(self, kernel: Any, call: Any) -> bool:
        gradient, next_residual, *lists = self._host_lists()
        call(0)
        count = int(self._found[0]) if call == self.sampled else int(self._counts[0])
        kernel(_HOST, self._filled(gradient.ctypes.data, next_residual.ctypes.data), *lists)
        pairs = zip((self._indices, self._values), lists, strict=True)
        return all(there.read()[:count].tobytes() == here[:count].tobytes() for there, here in pairs)

    def top_right(self) -> bool:
        return self._same(self._top, self.top)

    def sampled_right(self) -> bool:
        return self._same(self._sampled, self.sampled)


class LowRank:
    """The matrices of a GPT of 125 M parameters, or of one layer of a narrow one."""

    def __init__(self, machine: Machine, *, small: bool) -> None:
        width, layers, words = (24, 1, 50) if small else (768, 12, 50_257)
        block = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
        shapes = layers * block + [(words, width), (16 if small else 1024, width)]
        self._machine, self._body = machine, machine.body
        self._rows, self._columns = np.array(shapes, np.int64).T.copy()
        self._ranks = np.full(len(shapes), 4, np.int64)
        lengths = self._rows * self._columns
        self.elements = int(lengths.sum())
        at = np.cumsum(lengths) - lengths
        self._table = np.zeros(len(shapes), segments.SEGMENT)
        self._table["length"], self._table["start"] = lengths, at  # the places in the arrays
        self._gradients = [
            machine.array(self.elements, np.float32, _normal(self.elements, i)) for i in range(SETS)
        ]
        self._next_residual, self._output = machine.array(self.elements), machine.array(self.elements)
        self._q_values = _normal(int((4 * self._columns).sum()), 99)
        self._p, self._q = machine.array(int((4 * self._rows).sum())), machine.array(len(self._q_values))
        self._q.write(self._q_values)
        self._p_at, self._q_at = (np.cumsum(4 * n) - 4 * n for n in (self._rows, self._columns))
        self._flags, self._factors = np.zeros(len(shapes), np.uint8), np.ones(len(shapes), np.float32)

    def step(self, number: int) -> None:
        addresses = (
            self._gradients[number % SETS].address,
            self._next_residual.address,
            self._output.address,
        )
        self._step(self._body, addresses, self._p, self._q)

    def _step(self, body: Any, addresses: tuple[int, int, int], p: Any, q: Any) -> None:
        table = self._table.copy()
        for name, address in zip(("gradient", "next_residual", "output"), addresses, strict=True):
            table[name] = address + 4 * self._table["start"]
        table["start"] = 0
        shapes = Shapes(self._rows, self._columns, self._ranks)
        factors = Factor(p, self._p_at), Factor(q, self._q_at)
        body.project(table, self._flags, self._factors, shapes, *factors[::-1], decay=1.0)
        body.orthogonalise(self._rows, self._ranks, factors[0])
        body.back_project(table, shapes, *factors)
        body.expand(table, self._flags, shapes, *factors, divisor=1.0, scale=1.0)

    def right(self) -> bool:
        """Products may be added up in another order, so the outputs are close and not equal."""
        self._q.write(self._q_values)
        self.step(0)
        gradient, p, q = self._gradients[0].read(), np.zeros(len(self._p), np.float32), self._q_values.copy()
        next_residual, output = np.zeros_like(gradient), np.zeros_like(gradient)
        self._step(_HOST, (gradient.ctypes.data, next_residual.ctypes.data, output.ctypes.data), p, q)
        difference = np.linalg.norm(self._output.read().astype(np.float64) - output)
        return bool(difference <= 1e-3 * np.linalg.norm(output.astype(np.float64)))


def launches(machine: Machine, layers: int) -> int:
    """Launches of a step over so many layers: codes there and back, a selection and its list, low rank."""
    body, length = machine.body, 64
    gradient, next_residual, output = (
        machine.array(layers * length, values=_normal(layers * length, 0)) for _ in range(3)
    )
    table = np.zeros(layers, segments.SEGMENT)
    table["length"], table["level"], table["bucket_size"] = length, BITS, BUCKET_SIZE
    for name, array in (("gradient", gradient), ("next_residual", next_residual), ("output", output)):
        table[name] = array.address + 4 * length * np.arange(layers)
    size = segments.wire_bytes(segments.MINMAX, length, BITS, BUCKET_SIZE)
    table["payload"] = size * np.arange(layers)
    payload, flags = machine.array(size * layers, np.uint8), np.zeros(layers, np.uint8)
    factors, offsets = np.ones(layers, np.float32), np.arange(layers)
    indices, values = machine.array(layers, np.uint32), machine.array(layers)
    eight, one = np.full(layers, 8), np.ones(layers, np.int64)
    p = Factor(machine.array(8 * layers), 8 * offsets)
    q = Factor(machine.array(8 * layers, values=_normal(8 * layers, 1)), 8 * offsets)
    before = machine.driver.launched
    body.encode(segments.MINMAX, table, payload, flags, draw=Draw(0, 0, 0), scale=1.0, decay=1.0)
    body.decode(segments.MINMAX, table, payload, flags, divisor=1.0, scale=1.0)
    found = np.zeros_like(one)
    body.select_top(table, flags, factors, one, offsets, indices, values, found, decay=1.0, zeros=True)
    lists = offsets.reshape(1, -1), one.reshape(1, -1), indices, values
    body.scatter_mean(table, flags, *lists, divisor=1.0, scale=1.0)
    shapes = Shapes(eight, eight, one)
    body.project(table, flags, factors, shapes, q, p, decay=1.0)
    body.orthogonalise(eight, one, p)
    body.back_project(table, shapes, p, q)
    body.expand(table, flags, shapes, p, q, divisor=1.0, scale=1.0)
    return int(machine.driver.launched - before)
