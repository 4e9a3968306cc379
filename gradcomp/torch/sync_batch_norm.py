"""Batch normalisation over the batches of all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import batch_norm
from torch.nn.modules.batchnorm import _BatchNorm

from gradcomp.job.process_sets import Members, members
from gradcomp.job.reduce_op import Sum
from gradcomp.torch.collectives import allgather, allreduce


class SyncBatchNorm(_BatchNorm):
    """Batch normalisation whose mean and variance, in training, are those of all ranks' batches together.

        y = (x - mean) / sqrt(var + eps) * weight + bias, by channel, the second dimension
        n = sum of n_k;  mean = sum of n_k mean_k / n;  n var = sum of n_k (var_k + (mean_k - mean)^2), in rank order

    It replaces BatchNorm1d, 2d and 3d: inputs have two dimensions or more, are float16, bfloat16, float32 or float64,
    and on any device. Batches may differ in size between ranks, and be empty on some. Statistics are float32, or
    float64 with such inputs, and the same bits on all ranks. Gradients of weight and bias are those of the rank's own
    batch, because the optimizer averages them. In evaluation with running statistics, and in a world of one, nothing is
    exchanged.

    Wire: an allgather of 2 C + 1 numbers in forward and an allreduce of 2 C in backward, for C channels. All ranks of
    ``process_set`` must run it the same number of times, in the same order.
    Errors: ValueError for an input of less than two dimensions or another number of channels, and on all ranks if
    together they have at most one value per channel. Other errors are those of the collectives.
    Source: Ioffe and Szegedy 2015; variances are merged as Chan et al. 1979 do.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        process_set: Members = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self.process_set = process_set

    def _check_input_dim(self, x: torch.Tensor) -> None:
        if x.dim() < 2:
            raise ValueError(f"expected an input of at least 2 dimensions, got {x.dim()}")
        if x.shape[1] != self.num_features:
            raise ValueError(f"expected {self.num_features} channels, got {x.shape[1]}")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise ``x``, of shape (batch, channels, ...)."""
        self._check_input_dim(x)
        of_batch = self.training or self.running_mean is None
        if not of_batch or len(members(self.process_set)) == 1:
            return self._alone(x, of_batch)
        mean, variance, count = _statistics(x, self.process_set)
        if self.training and self.running_mean is not None:
            self._update(mean, variance * (count / max(count - 1, 1)))
        found: torch.Tensor = _Normalise.apply(  # type: ignore[no-untyped-call]
            x, self.weight, self.bias, mean, torch.rsqrt(variance + self.eps), count, self.process_set
        )
        return found

    def _alone(self, x: torch.Tensor, of_batch: bool) -> torch.Tensor:
        mean, variance, momentum = self.running_mean, self.running_var, 0.0
        if self.training and mean is not None:
            momentum = self._momentum()
        return batch_norm(x, mean, variance, self.weight, self.bias, of_batch, momentum, self.eps)

    def _momentum(self) -> float:
        """Count the step and return its momentum; with ``momentum=None`` running statistics are means over steps."""
        assert self.num_batches_tracked is not None, "it exists where running statistics do"
        self.num_batches_tracked.add_(1)
        return 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum

    @torch.no_grad()
    def _update(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        momentum = self._momentum()
        for kept, fresh in ((self.running_mean, mean), (self.running_var, variance)):
            assert kept is not None, "the running mean and variance exist together"
            kept.lerp_(fresh.to(kept.dtype), momentum)


def _others(x: torch.Tensor) -> list[int]:
    """Return all dimensions but that of the channels."""
    return [0, *range(2, x.dim())]


def _along(values: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Reshape values by channel so that they broadcast over ``x``."""
    return values.view(1, -1, *(1,) * (x.dim() - 2))


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


@torch.no_grad()
def _statistics(x: torch.Tensor, process_set: Members) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Compute mean and variance by channel over all ranks, and the number of values per channel."""
    wide, channels = _wide(x), x.shape[1]
    count = x.numel() // channels if channels else 0
    own = torch.zeros(1, 2 * channels + 1, dtype=wide.dtype, device=x.device)
    if count:
        variance, mean = torch.var_mean(wide, _others(x), correction=0)
        own[0, :channels], own[0, channels:-1] = mean, variance
    own[0, -1] = count
    ranks = allgather(own, process_set=process_set)
    counts, means, variances = ranks[:, -1:], ranks[:, :channels], ranks[:, channels:-1]
    total = int(counts.sum())
    if total <= 1:
        raise ValueError(f"the ranks have {total} values per channel together, and variances need two")
    mean, variance = torch.zeros_like(means[0]), torch.zeros_like(means[0])
    for n, each in zip(counts, means, strict=True):
        mean += n / total * each
    for n, each, spread in zip(counts, means, variances, strict=True):
        variance += n / total * (spread + (each - mean) ** 2)
    return mean, variance, total


class _Normalise(torch.autograd.Function):
    """Normalises with given statistics, through which gradients flow.

    x' = (x - mean) / std;  dx = weight / std * (dy - mean of dy - x' * mean of dy x'), means over all ranks
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mean: torch.Tensor,
        inverse: torch.Tensor,
        count: int,
        process_set: Members,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight, mean, inverse)
        ctx.count, ctx.process_set, ctx.has_bias = count, process_set, bias is not None
        scale = inverse if weight is None else inverse * _wide(weight)
        shift = -mean * scale if bias is None else _wide(bias) - mean * scale
        return (_wide(x) * _along(scale, x) + _along(shift, x)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, mean, inverse = ctx.saved_tensors
        dy = _wide(gradients[0])
        normal = (_wide(x) - _along(mean, x)) * _along(inverse, x)
        own = torch.stack([dy.sum(_others(x)), (dy * normal).sum(_others(x))])
        dx = None
        # All ranks need the sums, even if this rank's input requires no gradient.
        sums = allreduce(own, op=Sum, process_set=ctx.process_set) / ctx.count
        if ctx.needs_input_grad[0]:
            scale = inverse if weight is None else inverse * _wide(weight)
            dx = (_along(scale, x) * (dy - _along(sums[0], x) - normal * _along(sums[1], x))).to(x.dtype)
        dweight = own[1].to(weight.dtype) if weight is not None else None
        dbias = own[0].to(weight.dtype if weight is not None else x.dtype) if ctx.has_bias else None
        return dx, dweight, dbias, None, None, None, None
