"""Spectral compressors decompose matrices on every rank and gather atoms: SpectralAtomo and BestRank."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from gradcomp.compress.base import Traits
from gradcomp.compress.bounds import Distortion
from gradcomp.compress.checks import check_flag
from gradcomp.compress.lowrank.base import LowRank, Matrices, clamped_rank, elements, matrix_shape
from gradcomp.compress.messages import Bytes, Exchange, Floats, Gather
from gradcomp.compress.registry import register
from gradcomp.core.errors import WireFormatError
from gradcomp.core.layers import LayerSpec
from gradcomp.kernels import philox
from gradcomp.kernels.codec import Draw, Group, Sizes
from gradcomp.kernels.segments import Factor
from gradcomp.kernels.step import StepContext

Doubles = npt.NDArray[np.float64]
Booleans = npt.NDArray[np.bool_]
Hashes = npt.NDArray[np.uint32]

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
    def choose(self, sigma: Doubles, rank: int, hashes: Hashes, draw: Draw) -> tuple[Booleans, Doubles]:
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
        group.device.kernels.contribute(table, found, context.factors(len(table)), decay=context.decay)
        m = vector.read(0, form.m_size)
        flags[matrices.low] |= found
        hashes = table["layer"]

        counts = np.zeros(len(table), dtype=np.int64)
        columns = []
        for stack in form.stacks:
            shape = len(stack.rows), stack.n, stack.m
            stacked = m[stack.start : stack.start + math.prod(shape)].reshape(shape).astype(np.float64)
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
            self.m_size += len(stack.rows) * n * m

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
        at, counts = 0 if self._fixed else 4 * len(self._most), self._most
        if len(payload) < at:
            raise _refusal(sender, f"{len(payload)} bytes are too few for {len(self._most)} counts")
        if not self._fixed:
            counts = payload[:at].copy().view("<u4").astype(np.int64)
            if (counts > self._most).any():
                row = int(np.argmax(counts > self._most))
                raise _refusal(sender, f"{counts[row]} atoms, at most {self._most[row]} are possible")
        if len(payload) != self._size(counts):
            raise _refusal(sender, f"{len(payload)} bytes where the counts ask for {self._size(counts)}")
        numbers = payload[at:].copy().view("<f4")
        p_size = int(counts @ self.matrices.rows)
        exact_at = len(numbers) - self.matrices.exact_size
        return Atoms(counts, numbers[:p_size], numbers[p_size:exact_at]), numbers[exact_at:]


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
    group.device.kernels.contribute(table, ignored, context.factors(len(table)), decay=context.decay)
    shapes = matrices.shapes._replace(ranks=atoms.counts)
    p = Factor(atoms.p, _begins(atoms.counts * matrices.rows))
    q = Factor(atoms.q, _begins(atoms.counts * matrices.columns))
    group.device.kernels.subtract(table, shapes, p, q)


def _expand(group: Group, context: StepContext, matrices: Matrices, sent: list[Atoms], flags: Bytes) -> None:
    """Write means to the outputs: each layer's atoms are added up in the order of the ranks."""
    counts = np.stack([atoms.counts for atoms in sent])
    shapes = matrices.shapes._replace(ranks=counts.sum(axis=0))
    p = _merge([atoms.p for atoms in sent], counts * matrices.rows)
    q = _merge([atoms.q for atoms in sent], counts * matrices.columns)
    table, found = group.table[matrices.low], flags[matrices.low]
    group.device.kernels.expand(table, found, shapes, p, q, divisor=context.divisor, scale=context.unscale)
    flags[matrices.low] |= found


def _merge(parts: list[Floats], sizes: Sizes) -> Factor:
    """Put all ranks' columns of a row side by side; ``sizes[rank, row]``: elements of each."""
    begins = _begins(sizes.sum(axis=0))
    merged = np.empty(int(sizes.sum()), dtype=np.float32)
    for part, size, at in zip(parts, sizes, begins + np.cumsum(sizes, axis=0) - sizes, strict=True):
        merged[np.arange(len(part)) + np.repeat(at - _begins(size), size)] = part
    return Factor(merged, begins)


@register("spectral_atomo")
@dataclass(frozen=True)
class SpectralAtomo(Spectral):
    """Send each of a layer's singular triplets with a probability, ``rank`` of them in expectation.

    With M = scale g on every rank, an n x m matrix, and its singular value decomposition M = sum of s_i u_i v_i^T:

        p_i = min(1, c s_i), with c such that their sum is r;  b_i = 1 with probability p_i, else 0
        mean = (1/N) sum over ranks of the sum of b_i (s_i / p_i) u_i v_i^T

    which is M's mean in expectation, with the least variance that independent draws of r atoms can have. This is a
    baseline: to decompose in every step is too slow for anything else (Vogels et al. 2019, Table 6: 948 ms per batch,
    where SGD takes 312 and PowerSGD 239). The first dimension of a tensor is n, all others together are m. Layers for
    which r (n + m) >= n m, vectors among them, travel exactly. The level is the rank, at most min(n, m).

    Wire: 4 + 4 k (n + m) bytes per layer, with k atoms, r in expectation and min(n, m) at most, to all ranks: (N - 1) d
    bytes per rank. One round, or two where payloads grow. s_i / p_i is part of the vectors.
    State: none.
    Errors: ConfigError for a rank below 1; WireFormatError for counts and lengths that cannot be;
    numpy.linalg.LinAlgError if LAPACK does not converge.
    Source: Wang et al. 2018 (ATOMO), as Vogels et al. 2019 describe it in section 2 and measure it in Table 6.
    Differs: layers are reshaped as for PowerSGD. Draws have 32 bits: a p_i below 2^-33 is 0.
    """

    fixed: ClassVar[bool] = False

    def distortion(self, layer: LayerSpec) -> Distortion:
        """Bound the variance: sum of s_i^2 (1 / p_i - 1) <= (sum of s_i)^2 / r - ||M||^2.

        That is at most (min(n, m) / r - 1) ||M||^2.
        """
        rank = clamped_rank(layer.shape, self.rank)
        return Distortion(min(matrix_shape(layer.shape)) / rank - 1.0 if rank else 0.0, True)

    def most_atoms(self, n: int, m: int, rank: int) -> int:
        return min(n, m)

    def choose(self, sigma: Doubles, rank: int, hashes: Hashes, draw: Draw) -> tuple[Booleans, Doubles]:
        """Choose every atom by a draw of its own."""
        likely = probabilities(sigma, rank)
        chosen = draws(hashes, sigma.shape[1], draw) < likely
        return chosen, np.divide(sigma, likely, out=np.zeros_like(sigma), where=chosen)


def probabilities(sigma: Doubles, rank: int) -> Doubles:
    """Return min(1, c sigma), which sums to ``rank``, or to the number of positive values if there are fewer.

    Args:
        sigma: float64, shape (matrices, values); each row not negative, in descending order.
        rank: 1 to the number of values.

    Returns:
        float64 of the same shape.
    """
    tails = np.cumsum(sigma[:, ::-1], axis=1)[:, ::-1]
    left = rank - np.arange(sigma.shape[1])
    # The first value whose fair share of the remaining sum is at most 1; those before it have probability 1.
    first = (sigma * left <= tails).argmax(axis=1)[:, None]
    tail = np.take_along_axis(tails, first, axis=1)
    share = sigma * (rank - first)
    fair = np.divide(share, tail, out=np.zeros_like(sigma), where=tail > 0)
    return np.where(np.arange(sigma.shape[1]) < first, 1.0, fair)


def draws(hashes: Hashes, count: int, draw: Draw) -> Doubles:
    """Draw ``count`` numbers in (0, 1) for each layer.

    They are word i % 4 of the Philox counter (2**32 - 1 - i // 4, layer, step, rank). Draws for the elements of a layer
    count up from 0 and do not reach these; draws of a shared random factor have the owner's number in place of a rank
    (see `random_factors.random_q`).
    """
    blocks = -(-count // 4)
    counter = np.empty((len(hashes), blocks, 4), dtype=np.uint32)
    counter[..., 0] = 0xFFFFFFFF - np.arange(blocks)
    counter[..., 1] = hashes[:, None]
    counter[..., 2:] = draw.step, draw.rank
    words = philox.philox4x32(counter, (draw.seed & 0xFFFFFFFF, draw.seed >> 32))
    numbers = words.reshape(len(hashes), 4 * blocks)[:, :count].astype(np.float64)
    return (numbers + 0.5) * 2.0**-32


@register("best_rank")
@dataclass(frozen=True)
class BestRank(Spectral):
    """Send each layer's ``rank`` largest singular values with their vectors.

    With M = scale g + decay e on every rank, an n x m matrix, and its singular value decomposition M = U S V^T:

        C = U_r S_r V_r^T;  mean = (1/N) sum over ranks of C;  e' = M - C

    This is a baseline that shows what PowerSGD loses by its single step of iteration. To decompose in every step is too
    slow for anything else: 673 ms where a whole step with PowerSGD takes 105 (Vogels et al. 2019, section 4.2). The
    first dimension of a tensor is n, all others together are m. Layers for which r (n + m) >= n m, vectors among them,
    travel exactly. The level is the rank, at most min(n, m). ``feedback=False``: there is no e.

    Wire: r (n + m) floats, sqrt(S_r) in both factors, to all ranks: (N - 1) d bytes per rank; one round.
    State: a residual per layer.
    Errors: ConfigError for a rank below 1; numpy.linalg.LinAlgError if LAPACK does not converge.
    Source: Vogels et al. 2019, Table 2 ("best approximation"). The paper does not say whether it approximates each
    worker's matrix or their mean, which would need a dense exchange. Here each rank's matrix is approximated, so the
    mean has a rank of up to N r where PowerSGD's has r; with one rank they are the same.
    """

    fixed: ClassVar[bool] = True

    feedback: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flag("feedback", self.feedback)

    @cached_property
    def traits(self) -> Traits:
        """Return a residual by default, because a truncation is biased."""
        return Traits(keeps_residual=self.feedback)

    def distortion(self, layer: LayerSpec) -> Distortion:
        """Bound the loss: the r largest of min(n, m) singular values hold at least r / min(n, m) of the energy."""
        rank = clamped_rank(layer.shape, self.rank)
        return Distortion(1.0 - rank / min(matrix_shape(layer.shape)) if rank else 0.0)

    def most_atoms(self, n: int, m: int, rank: int) -> int:
        return rank

    def choose(self, sigma: Doubles, rank: int, hashes: Hashes, draw: Draw) -> tuple[Booleans, Doubles]:
        """Choose the first ``rank`` atoms, weighted by their singular values."""
        return np.broadcast_to(np.arange(sigma.shape[1]) < rank, sigma.shape), sigma
