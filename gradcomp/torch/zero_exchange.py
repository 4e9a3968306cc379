"""The requests of ``ZeroOptimizer``: means of gradients for owners, and what owners changed for all."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import cast

import numpy as np
import torch

from gradcomp.compress import Policy
from gradcomp.exchange.exchanger import Exchanger
from gradcomp.exchange.fingerprint import NOTHING, Fingerprint
from gradcomp.exchange.request_group import Run
from gradcomp.exchange.requests import ALL_GATHER, REDUCE_SCATTER, PreparedRequest, Request, RequestResult
from gradcomp.torch.sharded.checks import compressor
from gradcomp.torch.sharded.exchange import ShardedStatistics, array_of
from gradcomp.torch.zero_parts import Part, flat

#: The requests of a step have about this many elements each; a larger parameter has one of its own.
CHUNK_ELEMENTS = 1 << 21


@dataclass(frozen=True, eq=False)
class _Chunk:
    """Consecutive parameters, which are reduced together and gathered together."""

    parts: Sequence[Part]
    scatter: PreparedRequest
    gather: PreparedRequest


class ZeroExchange:
    """Exchanges for one rank of several. Requests run one at a time, and share their working memory.

    ``draws`` numbers the steps for the random draws of their requests.
    """

    def __init__(
        self, exchanger: Exchanger, parts: Sequence[Part], gradients: Policy, weights: Policy
    ) -> None:
        self.exchanger = exchanger
        self.statistics = ShardedStatistics()
        self.draws = 0
        self._decoded = 0
        cuts: list[list[Part]] = [[]]
        for part in parts:
            if cuts[-1] and sum(each.layer.size for each in cuts[-1]) + part.layer.size > CHUNK_ELEMENTS:
                cuts.append([])
            cuts[-1].append(part)
        sizes = [sum(part.layer.size for part in cut) for cut in cuts]
        chunks: dict[int, _Chunk] = {}
        # The largest is made first, since the others then fit into its memory.
        for number in sorted(range(len(cuts)), key=lambda n: -sizes[n]):
            cut = cuts[number]
            name = f"{cut[0].name} to {cut[-1].name}"
            requests = [
                Request(kind, tuple(layers), tuple(compressor(one.layer, policy) for one in cut), name=name)
                for kind, layers, policy in (
                    (REDUCE_SCATTER, [one.layer for one in cut], gradients),
                    (ALL_GATHER, [one.gathered for one in cut], weights),
                )
            ]
            chunks[number] = _Chunk(cut, *(exchanger.prepare(request, apart=False) for request in requests))
        self._chunks = [chunks[number] for number in range(len(cuts))]
        self._scratch = torch.empty(max(sizes))

    def reduce(self, gradients: dict[Part, torch.Tensor | None], outcome: int, scalars: str) -> None:
        """Give every part the mean of its gradients; the first request tells what this rank did before."""
        self.draws += 1
        fingerprint = NOTHING
        if self.exchanger.compares:
            fingerprint = Fingerprint(np.zeros(1, np.uint32), scalars, self._decoded)
        for chunk in self._chunks:
            inputs = [gradients[part] for part in chunk.parts]
            means = [part.memory_for_mean(gradients[part]) for part in chunk.parts]
            result = self._run(chunk.scatter, inputs, means, outcome, fingerprint)
            outcome, fingerprint = 0, NOTHING
            for part, mean, present in zip(chunk.parts, means, result.present.tolist(), strict=True):
                part.take(mean, present=present)

    def gather(self) -> None:
        """Bring the replicas up to date with the masters of all ranks."""
        self._decoded = 0
        for chunk in self._chunks:
            ends = np.cumsum([0, *(part.layer.size for part in chunk.parts)]).tolist()
            decoded = [
                self._scratch[begin:end].view(part.dtype_gathered)[: part.layer.size]
                for part, begin, end in zip(chunk.parts, ends, ends[1:], strict=False)
            ]
            result = self._run(chunk.gather, [part.to_send() for part in chunk.parts], decoded)
            self._decoded = zlib.crc32(result.checksum.to_bytes(4, "little"), self._decoded)
            for part, values in zip(chunk.parts, decoded, strict=True):
                replica = flat(part.parameter)
                replica.add_(values) if part.by_difference else replica.copy_(values)

    def _run(
        self,
        request: PreparedRequest,
        inputs: Sequence[torch.Tensor | None],
        outputs: Sequence[torch.Tensor],
        outcome: int = 0,
        fingerprint: Fingerprint = NOTHING,
    ) -> RequestResult:
        transport, begin = self.exchanger.pipeline.transport, perf_counter()
        before = transport.bytes_sent
        given = [None if each is None else array_of(each) for each in inputs]
        taken = [array_of(each) for each in outputs]
        run = Run(request, given, taken, self.draws, outcome=outcome, fingerprint=fingerprint)
        self.exchanger.begin([run])
        self.exchanger.finish()
        result = cast(RequestResult, request.result)
        request.discard()  # frees its references to the arrays
        counted, sent = self.statistics, transport.bytes_sent - before
        whole = sum(layer.nbytes for layer in request.request.layers)
        if request.request.kind == REDUCE_SCATTER:
            counted.scatters += 1
            counted.gradient_bytes += sent
            counted.dense_bytes += whole - sum(each.nbytes for each in outputs)
        else:
            counted.gathers += 1
            counted.weight_bytes += sent
            counted.dense_bytes += (transport.size - 1) * sum(
                each.nbytes for each in inputs if each is not None
            )
        counted.exchange_seconds += perf_counter() - begin
        return result
