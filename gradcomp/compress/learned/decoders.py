"""LGC's parameter-server form has one encoder, and for each rank a decoder that is given its innovation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from gradcomp.compress.learned.autoencoder import DECODER, ENCODER, Autoencoder, Floats, as_samples, mean_of
from gradcomp.compress.learned.products import Whole


@dataclass(frozen=True)
class Decoders:
    """Compute E and D_1 ... D_K of :class:`Autoencoder`, whose last convolution has the innovation beside 32 channels.

        L = sum over k of ||D_k(E(s_j), i_k) - s_k||**2 + similarity sum over k, m != k of ||E(s_k) - E(s_m)||**2

    s_k: the values of rank k; i_k: those that rank k sends itself, zeros elsewhere; j: one rank. The second sum runs
    over ordered pairs, so each pair counts twice. Weights are one flat float32 array: those of E, then those of each D.
    All D have the same first weights. The weight of the innovation is 1 at first, so an untrained D returns nearly the
    innovation.

    Source: Abrahamyan et al. 2021, section IV-A, equations 3 to 7, with a lambda1 of 1, which the paper leaves open.
    """

    channels: int
    ranks: int
    similarity: float = 0.5

    @cached_property
    def pair(self) -> Autoencoder:
        """Return the autoencoder of E and one D."""
        return Autoencoder(self.channels, beside=1)

    @property
    def decoder_size(self) -> int:
        return self.pair.size - self.pair.encoder_size

    @property
    def size(self) -> int:
        return self.pair.encoder_size + self.ranks * self.decoder_size

    def first_weights(self, seed: int) -> Floats:
        first = self.pair.first_weights(seed)
        end = self.pair.encoder_size
        return np.concatenate([first[:end], np.tile(first[end:], self.ranks)])

    def adapted(self, weights: Floats, seed: int) -> Floats | None:
        """Return weights for this number of ranks, from those of another; new D have first weights.

        None if no number of ranks has so many weights.
        """
        end, step = self.pair.encoder_size, self.decoder_size
        if len(weights) < end + step or (len(weights) - end) % step:
            return None
        found = self.first_weights(seed)
        kept = min(len(found), len(weights))
        found[:kept] = weights[:kept]
        return found

    def code_length(self, values: int) -> int:
        return self.pair.code_length(values)

    def encode(self, weights: Floats, values: Floats) -> Floats:
        return self.pair.encode(weights, values)

    def decode(self, weights: Floats, code: Floats, innovations: Floats) -> Floats:
        """Return D_k of one code and each row of ``innovations``: (K, values), which are not normalised."""
        codes, beside = code.reshape(self.channels, 1, -1), as_samples(innovations)
        found = np.empty_like(innovations)
        for k, layers in enumerate(self._decoders(weights)):
            decoded, _ = self.pair.run_decoder(layers, codes, beside[:, k : k + 1])
            found[k] = decoded.reshape(-1)[: innovations.shape[1]]
        return found

    def train(
        self, weights: Floats, samples: Floats, innovations: Floats, drawn: int, rate: float
    ) -> tuple[Floats, float]:
        """Return the weights after one step of gradient descent on L, and the mean of L's first sum before it.

        ``samples`` and ``innovations``: (K, values). ``drawn``: the rank whose code all D are given. The mean is over
        ranks. Weights stay as they were if any would not be finite.
        """
        reconstruction, _, gradient = self.gradient(weights, samples, innovations, drawn)
        with np.errstate(all="ignore"):
            changed = weights - np.float32(rate) * gradient
        return (changed if np.isfinite(changed).all() else weights), reconstruction / self.ranks

    def gradient(
        self, weights: Floats, samples: Floats, innovations: Floats, drawn: int
    ) -> tuple[float, float, Floats]:
        """Return both sums of L, the second not weighted, and the gradient of L as a flat array."""
        pair, inputs, beside = self.pair, as_samples(samples), as_samples(innovations)
        encoder = pair.rounded(weights, ENCODER)
        errors: list[Floats] = []
        upper: list[Floats] = []
        with np.errstate(all="ignore"):
            codes, encoding = pair.run_encoder(encoder, inputs)
            apart = codes - mean_of(codes)
            # The gradient of the second sum: every pair with E(s_k) in it counts twice.
            behind = np.float32(4 * self.similarity * self.ranks) * apart
            for k, layers in enumerate(self._decoders(weights)):
                found, decoding = pair.run_decoder(layers, codes[:, drawn : drawn + 1], beside[:, k : k + 1])
                errors.append(found - inputs[:, k : k + 1])
                below, gradients = pair.decoder_back(layers, decoding, 2 * errors[-1])
                behind[:, drawn] += below[:, 0]
                upper += gradients
            lower = pair.encoder_back(encoder, encoding, behind)
            reconstruction = _squares(np.concatenate(errors))
            similarity = 2 * self.ranks * _squares(apart)
        return reconstruction, similarity, np.concatenate([g.reshape(-1) for g in (*lower, *upper)])

    def _decoders(self, weights: Floats) -> list[list[Whole]]:
        parts = weights[self.pair.encoder_size :].reshape(self.ranks, -1)
        return [self.pair.rounded(part, DECODER) for part in parts]


def _squares(values: Floats) -> float:
    """Return the sum of the squares, exactly rounded, whatever the order."""
    return math.fsum((values.astype(np.float64) ** 2).ravel().tolist())
