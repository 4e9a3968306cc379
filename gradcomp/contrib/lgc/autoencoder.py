"""The autoencoder of LGC has convolutions and deconvolutions in one dimension, as matrix products.

There is no bias, so that coding commutes with multiplication by a positive number, and zeros give zeros. Products are
those of :func:`product`, which have the same bits in whatever order a BLAS adds; everything else is elementwise in a
fixed order. Equal weights and values therefore give equal bits on every machine.

Activations have the shape (channels, samples, length); the weights of a kernel have (output channels, taps x input
channels) in convolutions, and (input channels, taps x output channels) in deconvolutions.
"""

from __future__ import annotations

import ctypes
import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from gradcomp.kernels import philox

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

#: Whole numbers up to 2**53 in magnitude are exact in float64, and so is every sum below that.
_EXACT_BITS = 53
#: The number of multiply-adds up to which OpenBLAS computes a product on one thread.
_ONE_THREAD = 1 << 18
#: The number of multiply-adds above which several threads make a product faster.
_SEVERAL_THREADS = 1 << 26
#: The function that returns the number of threads of NumPy's BLAS has one of these names.
_THREADS = (
    "scipy_openblas_get_num_threads64_",
    "scipy_openblas_get_num_threads",
    "openblas_get_num_threads64_",
    "openblas_get_num_threads",
)

#: The number of input values that one position of the code represents.
STRIDE = 16
_ENCODER_CHANNELS = (64, 128, 256, 64)
_ENCODER_STRIDES = (2, 2, 2, 2, 1)
#: The layers of E, and those of D.
ENCODER, DECODER = slice(5), slice(5, None)
_TAPS = 3
_SLOPE = np.float32(0.01)
# This number stands for the layer in the random counter of the first weights.
_DRAWN_FOR = 0x4C474331


@dataclass(frozen=True)
class Upsampling:
    """Describe a decoder: channels and strides of its deconvolutions, and the taps of its last convolution."""

    channels: tuple[int, ...]
    strides: tuple[int, ...]
    last_taps: int


#: The decoders, by their number of deconvolutions: the paper's, and that of earlier versions.
DECODERS = {
    5: Upsampling((32, 64, 128, 32, 32), (1, 2, 2, 2, 2), 3),
    4: Upsampling((32, 64, 128, 32), (2, 2, 2, 2), 1),
}


@dataclass(frozen=True, eq=False)
class Whole:
    """Hold a factor: ``values`` are whole numbers of magnitude up to 2**``bits``, in units of ``unit``."""

    values: Doubles
    unit: float
    bits: int

    @property
    def T(self) -> Whole:
        return Whole(self.values.T, self.unit, self.bits)

    @property
    def terms(self) -> int:
        return int(max(self.values.shape))

    def first(self, taps: int, channels: int) -> Whole:
        """Return the weights of one output channel for the first input channels."""
        inputs = self.values.reshape(taps, -1)[:, :channels]
        return Whole(inputs.reshape(1, -1), self.unit, self.bits)

    def in_bits(self, bits: int) -> Whole:
        """Return the factor rounded once more, to at most ``bits`` bits."""
        fewer = self.bits - bits
        return self if fewer <= 0 else Whole(np.rint(self.values * 2.0**-fewer), self.unit * 2.0**fewer, bits)


def whole(values: Floats, terms: int) -> Whole:
    """Round to multiples of 2**(e - bits), where the largest magnitude is below 2**e.

    ``terms``: the bits are the most for which terms 2**(2 bits) stays below 2**53. NaN everywhere if a value is not
    finite.
    """
    bits = _bits(terms)
    largest = max(float(values.max(initial=0)), -float(values.min(initial=0)))
    if not math.isfinite(largest):
        return Whole(np.full(values.shape, np.nan), 1.0, bits)
    exponent = math.frexp(largest)[1] - bits
    if abs(exponent) > 100:  # beyond float32
        return Whole(np.rint(values.astype(np.float64) * 2.0**-exponent), 2.0**exponent, bits)
    found = values * np.float32(2.0**-exponent)
    return Whole(np.rint(found, out=found).astype(np.float64), 2.0**exponent, bits)


def product(a: Whole, b: Whole) -> Floats:
    """Return a b. Sums are exact, so that their order does not matter; each is rounded once, to float32.

    Factors of more bits than k terms allow are rounded once more: to 21 for k = 768. NaN everywhere if a factor is NaN.

    a: (m, k), b: (k, n). Returns (m, n), float32.
    """
    bits = _bits(a.values.shape[1])
    if a.bits + b.bits > 2 * bits:
        a, b = a.in_bits(bits), b.in_bits(bits)
    found = np.empty((len(a.values), b.values.shape[1]), np.float32)
    with np.errstate(over="ignore"):  # the caller looks for infinite values
        np.multiply(_multiply(a.values, b.values), a.unit * b.unit, out=found, casting="same_kind")
    return found


def _bits(terms: int) -> int:
    return (_EXACT_BITS - terms.bit_length()) // 2


def _multiply(a: Doubles, b: Doubles) -> Doubles:
    """Return a b, in blocks that one thread computes, unless it is large.

    Ranks that share cores have more threads than cores if each takes several, and threads then mostly wait for each
    other. Blocks take 1.6 times as long as the whole, so a BLAS that has only one thread computes the whole.
    """
    (rows, terms), columns = a.shape, b.shape[1]
    if not _ONE_THREAD < rows * terms * columns <= _SEVERAL_THREADS or _threads()() == 1:
        return a @ b
    found = np.empty((rows, columns))
    elements = max(_ONE_THREAD // terms, 1)
    width = min(columns, max(math.isqrt(elements), 1))
    height = min(rows, max(elements // width, 1))
    width = max(elements // height, 1)
    for i in range(0, rows, height):
        for j in range(0, columns, width):
            found[i : i + height, j : j + width] = a[i : i + height] @ b[:, j : j + width]
    return found


@cache
def _threads() -> Callable[[], int]:
    """Return a function that returns the number of threads of NumPy's BLAS, or 0 if that is not known."""
    user = importlib.util.find_spec("numpy.linalg._umath_linalg")
    try:
        library = ctypes.CDLL(user.origin if user is not None else None)  # and its dependencies
    except OSError:
        return lambda: 0
    for name in _THREADS:
        function = getattr(library, name, None)
        if function is not None:
            function.restype, function.argtypes = ctypes.c_int, []
            found: Callable[[], int] = function
            return found
    return lambda: 0


@dataclass(frozen=True)
class Autoencoder:
    """Compute an encoder E and a decoder D for codes of ``channels`` floats for every 16 values.

    E: 1 -> 64 -> 128 -> 256 -> 64 -> ``channels``, kernels of 3, strides 2, 2, 2, 2, 1. D: ``channels`` -> 32 -> 64 ->
    128 -> 32 -> 32 by deconvolutions of kernel 3, strides 1, 2, 2, 2, 2, then a convolution of kernel 3 to one channel.
    Leaky ReLU of slope 0.01 follows all layers but those of the code and the result. Weights are one flat float32
    array: 219,552 with four channels.

    ``beside``: the number of additional input channels of D's last convolution, each as long as the values; their
    initial weights are 1 in the middle of the kernel and 0 elsewhere. ``deconvolutions``: 4 is the decoder of earlier
    versions, which has no deconvolution of stride 1 and a last kernel of 1.

    Source: Abrahamyan et al. 2021, section IV-C, which gives five convolutions, five deconvolutions, a final
    convolution, and kernels of one dimension. Differs: channels, strides and kernel sizes are not given. Those of E,
    and the channels of D, are those of a later re-implementation; D's strides are E's in reverse.
    """

    channels: int
    beside: int = 0
    deconvolutions: int = 5

    @cached_property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """Return the shapes of the weights, layer by layer."""
        down = (1, *_ENCODER_CHANNELS, self.channels)
        up = (self.channels, *self.up.channels)
        encoder = [(after, _TAPS * before) for before, after in pairwise(down)]
        decoder = [(before, _TAPS * after) for before, after in pairwise(up)]
        return (*encoder, *decoder, (1, self.up.last_taps * (up[-1] + self.beside)))

    @property
    def up(self) -> Upsampling:
        return DECODERS[self.deconvolutions]

    @property
    def variants(self) -> list[Autoencoder]:
        """Return the autoencoder with each number of deconvolutions, the largest first."""
        return [replace(self, deconvolutions=number) for number in DECODERS]

    def of(self, weights: Floats) -> Autoencoder:
        """Return the autoencoder, of any number of deconvolutions, that has as many weights as these."""
        return next(net for net in self.variants if net.size == len(weights))

    @property
    def size(self) -> int:
        """Return the number of weights of both nets."""
        return sum(rows * columns for rows, columns in self.shapes)

    @property
    def encoder_size(self) -> int:
        """Return the number of weights of E, which come first."""
        return sum(rows * columns for rows, columns in self.shapes[ENCODER])

    def first_weights(self, seed: int) -> Floats:
        """Draw uniform weights of variance 2 / ((1 + slope**2) n), with n the terms of a layer's sum (He et al. 2015).

        Those of the last layer are a tenth of it: an untrained net then gives nearly zeros, a loss of 1, where it would
        give values that are several times too large.
        """
        drawn = philox.uniform(0, self.size, seed=seed, layer=_DRAWN_FOR, step=0, rank=0)
        drawn = np.float32(2) * drawn - np.float32(1)
        up, layers = self.up, self.layers(drawn)
        terms: list[float] = [weights.shape[1] for weights in layers[ENCODER]]
        # In a deconvolution of stride 2, one and a half taps on average reach an output.
        terms += [_TAPS / stride * len(rows) for rows, stride in zip(layers[5:], up.strides, strict=False)]
        terms.append(up.last_taps * up.channels[-1])
        for weights, count in zip(layers, terms, strict=True):
            weights[:] *= np.float32(math.sqrt(6.0 / ((1.0 + float(_SLOPE) ** 2) * count)))
        taps = layers[-1].reshape(up.last_taps, -1)
        taps[:] *= np.float32(0.1)
        taps[:, up.channels[-1] :] = (np.arange(up.last_taps) == up.last_taps // 2)[:, None]
        return drawn

    def code_length(self, values: int) -> int:
        """Return the floats of a code; ``values`` are padded with zeros to a multiple of 16."""
        return self.channels * (_padded(values) // STRIDE)

    def encode(self, weights: Floats, values: Floats) -> Floats:
        codes, _ = self.run_encoder(self.rounded(weights, ENCODER), as_samples(values[None]))
        return codes.reshape(-1)

    def decode(self, weights: Floats, code: Floats, values: int) -> Floats:
        found, _ = self.run_decoder(
            self.rounded(weights[self.encoder_size :], DECODER), code.reshape(self.channels, 1, -1)
        )
        return found.reshape(-1)[:values]

    def train(self, weights: Floats, samples: Floats, rate: float) -> tuple[Floats, float]:
        """Return the weights after one step of gradient descent, and the loss before it.

            loss = ||D((1/N) sum of E(s_k)) - (1/N) sum of s_k||**2

        ``samples``: (N, values), one row for each rank. Weights stay as they were if any would not be finite.
        """
        loss, gradient = self.gradient(weights, samples)
        with np.errstate(all="ignore"):
            gradient *= -np.float32(rate)
            changed = np.add(gradient, weights, out=gradient)
        return (changed if np.isfinite(changed).all() else weights), loss

    def gradient(self, weights: Floats, samples: Floats) -> tuple[float, Floats]:
        """Return the loss of :meth:`train`, and its gradient as a flat array."""
        inputs = as_samples(samples)
        with np.errstate(all="ignore"):
            encoder = self.rounded(weights, ENCODER)
            decoder = self.rounded(weights[self.encoder_size :], DECODER)
            codes, encoding = self.run_encoder(encoder, inputs)
            found, decoding = self.run_decoder(decoder, mean_of(codes))
            error = found - mean_of(inputs)
            loss = squares(error)
            behind, upper = self.decoder_back(decoder, decoding, 2 * error)
            behind = np.repeat(behind / np.float32(inputs.shape[1]), inputs.shape[1], axis=1)
            lower = self.encoder_back(encoder, encoding, behind)
        return loss, np.concatenate([g.reshape(-1) for g in (*lower, *upper)])

    def layers(self, weights: Floats, which: slice = slice(None)) -> list[Floats]:
        """Return views of the flat array: the weights of every layer, or of those in ``which``."""
        shapes = self.shapes[which]
        ends = np.cumsum([rows * columns for rows, columns in shapes]).tolist()
        begins = [0, *ends[:-1]]
        return [weights[a:b].reshape(shape) for a, b, shape in zip(begins, ends, shapes, strict=True)]

    def rounded(self, weights: Floats, which: slice) -> list[Whole]:
        """Return layers as factors, all of a layer with the bits that its larger dimension allows."""
        return [whole(layer, max(layer.shape)) for layer in self.layers(weights, which)]

    def run_encoder(self, layers: Sequence[Whole], x: Floats) -> tuple[Floats, list[Passed]]:
        """Return the codes of samples, and what :meth:`encoder_back` needs."""
        passed = []
        for i, stride in enumerate(_ENCODER_STRIDES):
            columns = _columns(whole(x, layers[i].terms), stride)
            before = product(layers[i], columns).reshape(len(layers[i].values), x.shape[1], -1)
            passed.append(Passed(columns, before))
            x = before if i == len(_ENCODER_STRIDES) - 1 else _leak(before)
        return x, passed

    def encoder_back(self, layers: Sequence[Whole], passed: Sequence[Passed], behind: Floats) -> list[Floats]:
        """Return the gradients of E's layers, from that of the codes."""
        gradients: list[Floats] = []
        for i in reversed(range(len(passed))):
            if i < len(passed) - 1:
                behind = _leak_back(passed[i].before, behind)
            flat = whole(behind.reshape(len(behind), -1), layers[i].terms)
            gradients.insert(0, product(flat, passed[i].inputs.T))
            if i:
                behind = _add_up(product(layers[i].T, flat), behind.shape, _ENCODER_STRIDES[i])
        return gradients

    def run_decoder(
        self, layers: Sequence[Whole], x: Floats, beside: Floats | None = None
    ) -> tuple[Floats, list[Passed]]:
        """Return the values that codes decode to, and the intermediate results that :meth:`decoder_back` needs.

        ``beside`` has the additional inputs, of shape (channels, samples, length).
        """
        passed = []
        for weights, stride in zip(layers, self.up.strides, strict=False):
            flat = whole(x.reshape(len(x), -1), weights.terms)
            before = _add_up(product(weights.T, flat), x.shape, stride)
            passed.append(Passed(flat, before))
            x = _leak(before)
        inputs = x if beside is None else np.concatenate([x, beside])
        last = _columns(whole(inputs, layers[-1].terms), 1, self.up.last_taps)
        passed.append(Passed(last, x))
        return product(layers[-1], last).reshape(1, x.shape[1], -1), passed

    def decoder_back(
        self, layers: Sequence[Whole], passed: Sequence[Passed], behind: Floats
    ) -> tuple[Floats, list[Floats]]:
        """Return the gradient of the codes and those of D's layers, from that of what was decoded."""
        up, samples = self.up, behind.shape[1]
        flat = whole(behind.reshape(1, -1), layers[-1].terms)
        gradients = [product(flat, passed[-1].inputs.T)]
        last = layers[-1].first(up.last_taps, up.channels[-1])
        behind = _add_up(product(last.T, flat), behind.shape, 1, up.last_taps)
        for i in reversed(range(len(up.strides))):
            before = whole(_leak_back(passed[i].before, behind), layers[i].terms)
            columns = _columns(before, up.strides[i])
            gradients.insert(0, product(passed[i].inputs, columns.T))
            behind = product(layers[i], columns).reshape(len(layers[i].values), samples, -1)
        return behind, gradients


@dataclass(frozen=True, eq=False)
class Passed:
    """Hold the inputs of a layer's backward pass: the factor of its weights, and its output before the leaky ReLU."""

    inputs: Whole
    before: Floats


def _padded(values: int) -> int:
    return max(-(-values // STRIDE), 1) * STRIDE


def as_samples(rows: Floats) -> Floats:
    """Reshape (N, values) to (1, N, length), padded with zeros at the end."""
    found = np.zeros((1, len(rows), _padded(rows.shape[1])), np.float32)
    found[0, :, : rows.shape[1]] = rows
    return found


def squares(values: Floats) -> float:
    """Return the sum of the squares. It is rounded once, so it does not depend on the order."""
    return math.fsum((values.astype(np.float64) ** 2).ravel().tolist())


def mean_of(x: Floats) -> Floats:
    """Return the mean over samples, added in their order."""
    total = x[:, 0].copy()
    for k in range(1, x.shape[1]):
        total += x[:, k]
    return (total / np.float32(x.shape[1]))[:, None]


def _leak(x: Floats) -> Floats:
    found: Floats = np.maximum(x, _SLOPE * x)
    return found


def _leak_back(x: Floats, behind: Floats) -> Floats:
    slopes = (x > 0).astype(np.float32)  # faster than np.where
    slopes *= np.float32(1) - _SLOPE
    slopes += _SLOPE  # 1, exactly, where x > 0
    slopes *= behind
    return slopes


def _columns(x: Whole, stride: int, taps: int = _TAPS) -> Whole:
    """Return the inputs of a kernel at every ``stride``-th position, as (taps channels, samples outputs).

    For a kernel of 3 both ends are padded with zeros. A kernel of 1 has a stride of 1.
    """
    channels, samples, length = x.values.shape
    if taps == 1:
        return Whole(x.values.reshape(channels, -1), x.unit, x.bits)
    outputs = length // stride
    found = np.zeros((_TAPS, channels, samples, outputs))
    found[0, :, :, 1:] = x.values[:, :, stride - 1 : -1 : stride]
    found[1] = x.values[:, :, ::stride]
    found[2, :, :, : (length - 2) // stride + 1] = x.values[:, :, 1::stride]
    return Whole(found.reshape(_TAPS * channels, samples * outputs), x.unit, x.bits)


def _add_up(columns: Floats, shape: tuple[int, ...], stride: int, taps: int = _TAPS) -> Floats:
    """Apply the adjoint of :func:`_columns`; ``shape`` is (..., samples, outputs), which ``columns`` has flattened."""
    _, samples, outputs = shape
    if taps == 1:
        return columns.reshape(-1, samples, outputs)
    parts = columns.reshape(_TAPS, -1, samples, outputs)
    wide = np.zeros((parts.shape[1], samples, stride * outputs + 2), np.float32)
    for k in range(_TAPS):
        wide[:, :, k : k + stride * outputs : stride] += parts[k]
    return wide[:, :, 1:-1]
