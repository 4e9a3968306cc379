"""Spectral compressors decompose matrices on every rank, gather atoms, and add them up.

An atom is one singular triplet with a weight w in place of its singular value: w u v^T. It travels as the two columns
sqrt(w) u and sqrt(w) v, neither of which overflows where their product does not.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from gradcomp.compress.lowrank.base import LowRank, Matrices, elements
from gradcomp.compress.messages import Bytes, Exchange, Floats, Gather
from gradcomp.core.errors import WireFormatError
from gradcomp.kernels import lowrank
from gradcomp.kernels.codec import Draw, Group, Sizes
from gradcomp.kernels.selection import contribute
from gradcomp.kernels.step import StepContext

Doubles = npt.NDArray[np.float64]
Booleans = npt.NDArray[np.bool_]

_EPSILON = 2.0**-52


@dataclass(frozen=True, eq=False)
class Stack:
    """Describe the layers of one shape and rank: ``rows`` of the approximated layers.

    Their matrices M lie side by side from ``start`` on.
    """

    rows: Sizes
    n: int
    m: int
    rank: int
    start: int

    @property
    def end(self) -> int:
        return self.start + len(self.rows) * self.n * self.m


@dataclass(frozen=True, eq=False)
class Atoms:
    """Hold one rank's atoms, ``counts[i]`` of row i.

    Their columns lie row by row in ``p`` (of length n) and ``q`` (of length m).
    """

    counts: Sizes
    p: Floats
    q: Floats


@dataclass(frozen=True)
class Spectral(LowRank):
    """Base of the compressors that send some of each layer's atoms; mean = (1/N) sum over ranks of weighted atoms.

    Decomposition is in float64 and batched by shape, so that the float32 columns depend little on the LAPACK. The sign
    of u and v is arbitrary; it is chosen so that the element of u with the largest magnitude is positive. Singular
    values that are rounding errors, up to max(n, m) 2^-52 of the largest, count as zero.
    """

    #: True if a layer's size and level alone decide how many atoms are sent.
    fixed: ClassVar[bool]

    @abstractmethod
    def most_atoms(self, n: int, m: int, rank: int) -> int:
        """Return how many atoms of a matrix are sent: exactly if :attr:`fixed`, else at most."""

    @abstractmethod
    def choose(
        self, sigma: Doubles, rank: int, hashes: npt.NDArray[np.uint32], draw: Draw
    ) -> tuple[Booleans, Doubles]:
        """Choose each matrix's atoms and their weights; ``sigma``: its singular values in a row, descending."""

    def wire_bytes(self, group: Group) -> Sizes:
        """Return the bytes of both columns of every atom, and of the count where it varies."""
        overhead = 0 if self.fixed else 1
        return 4 * elements(group, lambda n, m, r: overhead + self.most_atoms(n, m, r) * (n + m))

    def exchange(self, group: Group, context: StepContext) -> Exchange:
        form = group.scratch.once("form", lambda: SpectralFormat(self, group))
        matrices = form.matrices

        def write(view: Bytes) -> tuple[Bytes, int]:
            flags = np.zeros(len(group.table), dtype=np.uint8)
            atoms = self._decompose(group, context, form, flags)
            exact = group.scratch.array("exact", matrices.exact_size)
            found = flags[matrices.exact]
            matrices.write_exact(group, context, exact, found)  # zeros if not finite: its flag travels
            flags[matrices.exact] |= found
            if group.feedback:
                _keep_rest(group, context, matrices, atoms)
            return flags, form.write(atoms, exact, view)

        reply = yield Gather(form.max_bytes, write, self.fixed)
        flags = reply.flags.copy()
        total = np.zeros(matrices.exact_size, dtype=np.float32)
        sent = []
        for rank, payload in enumerate(reply.data):
            atoms, exact = form.read(payload, rank)
            sent.append(atoms)
            with np.errstate(all="ignore"):
                total += exact
        found = flags[matrices.exact]
        matrices.read_exact(group, context, total, found)
        flags[matrices.exact] |= found
        _expand(group, context, matrices, sent, flags)
        return flags

    def _decompose(self, group: Group, context: StepContext, form: SpectralFormat, flags: Bytes) -> Atoms:
        matrices = form.matrices
        vector = group.scratch.vector("m", form.m_size)
        table = group.inputs[matrices.low]
        table["next_residual"] = vector.address + 4 * form.m_at
        found = np.zeros(len(table), dtype=np.uint8)
        contribute(table, found, context.factors(len(table)), decay=context.decay)
        m = vector.read(0, form.m_size)
        flags[matrices.low] |= found
        hashes = table["layer"]

        counts = np.zeros(len(table), dtype=np.int64)
        columns = []
        for stack in form.stacks:
            stacked = m[stack.start : stack.end].reshape(len(stack.rows), stack.n, stack.m).astype(np.float64)
            stacked[found[stack.rows] != 0] = 0.0
            u, sigma, vt = np.linalg.svd(stacked, full_matrices=False)
            sigma[sigma <= max(stack.n, stack.m) * _EPSILON * sigma[:, :1]] = 0.0
            chosen, weights = self.choose(sigma, stack.rank, hashes[stack.rows], context.draw)
            counts[stack.rows] = chosen.sum(axis=1)
            columns.append(_columns(u, vt, chosen, weights))
        p, q = np.empty(counts @ matrices.rows, np.float32), np.empty(counts @ matrices.columns, np.float32)
        for stack, (left, right) in zip(form.stacks, columns, strict=True):
            _place(left, p, _begins(counts * matrices.rows)[stack.rows], counts[stack.rows])
            _place(right, q, _begins(counts * matrices.columns)[stack.rows], counts[stack.rows])
        return Atoms(counts, p, q)


class SpectralFormat:
    """Encode and decode a group's payload: ``[counts][p of every row][q of every row][the exact layers]``.

    The counts, 4 bytes for every approximated layer, are there only where they vary.
    """

    def __init__(self, compressor: Spectral, group: Group) -> None:
        self.matrices = matrices = Matrices.of(group)
        shapes = np.stack(matrices.shapes, axis=1)
        self._fixed = compressor.fixed
        self._most = np.array([compressor.most_atoms(*shape) for shape in shapes.tolist()], dtype=np.int64)
        self.max_bytes = self._size(self._most)
        self.stacks: list[Stack] = []
        self.m_size = 0
        self.m_at = np.zeros(len(shapes), dtype=np.int64)
        kinds, kind = np.unique(shapes, axis=0, return_inverse=True)
        for number, (n, m, rank) in enumerate(kinds.tolist()):
            stack = Stack(np.flatnonzero(kind.reshape(-1) == number), n, m, rank, self.m_size)
            self.m_at[stack.rows] = stack.start + n * m * np.arange(len(stack.rows))
            self.stacks.append(stack)
            self.m_size = stack.end

    def _size(self, counts: Sizes) -> int:
        columns = int(counts @ (self.matrices.rows + self.matrices.columns))
        return 4 * ((0 if self._fixed else len(counts)) + columns + self.matrices.exact_size)

    def write(self, atoms: Atoms, exact: Floats, view: Bytes) -> int:
        """Fill the payload; return the bytes used."""
        counts = np.zeros(0, "<u4") if self._fixed else atoms.counts.astype("<u4")
        payload = np.concatenate([part.view(np.uint8) for part in (counts, atoms.p, atoms.q, exact)])
        view[: len(payload)] = payload
        return len(payload)

    def read(self, payload: Bytes, sender: int) -> tuple[Atoms, Floats]:
        """Return rank ``sender``'s atoms and exact layers. WireFormatError for an impossible payload."""
        at, counts = 0, self._most
        if not self._fixed:
            at = 4 * len(self._most)
            if len(payload) < at:
                raise self._refusal(sender, f"{len(payload)} bytes are too few for {len(self._most)} counts")
            counts = payload[:at].copy().view("<u4").astype(np.int64)
            if (counts > self._most).any():
                row = int(np.argmax(counts > self._most))
                raise self._refusal(sender, f"{counts[row]} atoms, at most {self._most[row]} are possible")
        if len(payload) != self._size(counts):
            raise self._refusal(sender, f"{len(payload)} bytes where the counts ask for {self._size(counts)}")
        numbers = payload[at:].copy().view("<f4")
        p_size = int(counts @ self.matrices.rows)
        exact_at = len(numbers) - self.matrices.exact_size
        return Atoms(counts, numbers[:p_size], numbers[p_size:exact_at]), numbers[exact_at:]

    @staticmethod
    def _refusal(sender: int, why: str) -> WireFormatError:
        return WireFormatError(f"rank {sender} sent an impossible low-rank payload: {why}")


def _begins(sizes: Sizes) -> Sizes:
    begins: Sizes = np.cumsum(sizes) - sizes
    return begins


def _columns(u: Doubles, vt: Doubles, chosen: Booleans, weights: Doubles) -> tuple[Floats, Floats]:
    """Return sqrt(w) u and sqrt(w) v of the chosen atoms, one row each, matrix by matrix."""
    matrix, atom = np.nonzero(chosen)
    left, right = u.transpose(0, 2, 1)[matrix, atom], vt[matrix, atom]
    largest = np.take_along_axis(left, np.abs(left).argmax(axis=1, keepdims=True), axis=1)
    factor = np.copysign(np.sqrt(weights[matrix, atom])[:, None], largest)
    # Adding 0 turns the -0 that a layer of zeros has into 0.
    return (factor * left).astype(np.float32) + 0, (factor * right).astype(np.float32) + 0


def _place(columns: Floats, into: Floats, begins: Sizes, counts: Sizes) -> None:
    """Copy the rows of ``columns`` one after the other, each matrix's first to its place in ``begins``."""
    within = np.arange(len(columns)) - np.repeat(_begins(counts), counts)
    at = np.repeat(begins, counts) + within * columns.shape[1]
    into[at[:, None] + np.arange(columns.shape[1])] = columns


def _keep_rest(group: Group, context: StepContext, matrices: Matrices, atoms: Atoms) -> None:
    """Write M minus what was sent to the next residuals."""
    table = group.inputs[matrices.low]
    ignored = np.zeros(len(table), dtype=np.uint8)
    contribute(table, ignored, context.factors(len(table)), decay=context.decay)
    shapes = matrices.shapes._replace(ranks=atoms.counts)
    p = lowrank.Factor(atoms.p, _begins(atoms.counts * matrices.rows))
    q = lowrank.Factor(atoms.q, _begins(atoms.counts * matrices.columns))
    lowrank.subtract(table, shapes, p, q)


def _expand(group: Group, context: StepContext, matrices: Matrices, sent: list[Atoms], flags: Bytes) -> None:
    """Write means to the outputs: each layer's atoms are added up in the order of the ranks."""
    counts = np.stack([atoms.counts for atoms in sent])
    shapes = matrices.shapes._replace(ranks=counts.sum(axis=0))
    p = _merge([atoms.p for atoms in sent], counts * matrices.rows)
    q = _merge([atoms.q for atoms in sent], counts * matrices.columns)
    found = flags[matrices.low]
    lowrank.expand(
        group.table[matrices.low],
        found,
        shapes,
        p,
        q,
        divisor=context.divisor,
        scale=context.unscale,
    )
    flags[matrices.low] |= found


def _merge(parts: list[Floats], sizes: Sizes) -> lowrank.Factor:
    """Put all ranks' columns of a row side by side; ``sizes[rank, row]``: elements of each."""
    begins = _begins(sizes.sum(axis=0))
    merged = np.empty(int(sizes.sum()), dtype=np.float32)
    for part, size, at in zip(parts, sizes, begins + np.cumsum(sizes, axis=0) - sizes, strict=True):
        merged[np.arange(len(part)) + np.repeat(at - _begins(size), size)] = part
    return lowrank.Factor(merged, begins)
