"""Lists the configurations that the contract suite and the golden payloads cover. A new compressor adds a row."""

from __future__ import annotations

import gradcomp as gc
from gradcomp.compress import TwoLevelSelection
from gradcomp.testing import Row

UNBIASED = {"unbiased": True, "draws": True}
SPARSE = {"constants": False, "sized": False}
LOW_RANK = {"constants": False, "draws": True, "products": True}
#: What LGC would leave exact.
EVERY_LAYER = {"ends": False, "least_parameters": 0}
LEARNED = {"constants": False, "draws": True, "overflows": False, "sized": False, "by_part": True}

ROWS = {
    "none": Row(gc.Identity(), error=1e-6),
    "fp32": Row(gc.Cast("float32"), error=1e-6),
    "fp16": Row(gc.Cast("float16"), error=2**-10),
    "bf16": Row(gc.Cast("bfloat16"), error=2**-7),
    "fp16-feedback": Row(gc.Cast("float16", feedback=True), error=2**-10),
    "bf16-feedback": Row(gc.Cast("bfloat16", feedback=True), error=2**-7),
    "minmax-4": Row(gc.Quantize(4, 64), **UNBIASED),
    "minmax-3-odd": Row(gc.Quantize(3, 33), **UNBIASED),
    "minmax-1": Row(gc.Quantize(1, 32), **UNBIASED),
    "minmax-4-shift": Row(gc.Quantize(4, 64, rounding="shift"), **UNBIASED),
    "minmax-blocks": Row(gc.Quantize((3, 5, 2, 4), 16, feedback=True), draws=True),
    "minmax-4-nearest": Row(gc.Quantize(4, 64, rounding="nearest")),
    "minmax-1-nearest-odd": Row(gc.Quantize(1, 33, rounding="nearest")),
    "l2-1-nearest": Row(gc.Quantize(1, 32, "l2", "nearest")),
    "l2-5-nearest": Row(gc.Quantize(5, 200, "l2", "nearest"), constants=False),
    "minmax-5-feedback": Row(gc.Quantize(5, 40, feedback=True), draws=True),
    "minmax-3-decay": Row(gc.Quantize(3, 100, rounding="nearest", decay=0.5), error=2 / 7),
    "minmax-2-no-feedback": Row(gc.Quantize(2, 16, rounding="nearest", feedback=False), error=2 / 3),
    "l2-8": Row(gc.Quantize(8, 128, "l2"), **UNBIASED, constants=False),
    "l2-1": Row(gc.Quantize(1, 32, "l2"), **UNBIASED, constants=False),
    "linf-6-feedback": Row(gc.Quantize(6, 50, "linf", feedback=True), draws=True),
    "linf-2-nearest": Row(gc.Quantize(2, 48, "linf", "nearest")),
    "error-feedback": Row(gc.ErrorFeedback(gc.Quantize(4, 64)), draws=True),
    "error-feedback-decay": Row(
        gc.ErrorFeedback(gc.Quantize(4, 64, rounding="nearest"), decay=0.9, follow_rate=True)
    ),
    "momentum-correction": Row(gc.MomentumCorrection(gc.Quantize(4, 64), factor=0.5), draws=True),
    "momentum-correction-exact": Row(gc.MomentumCorrection(gc.Identity()), error=1e-6),
    "momentum-correction-topk": Row(gc.MomentumCorrection(gc.TopK(0.1)), constants=False),
    "local-clip": Row(
        gc.LocalClip(gc.Quantize(4, 64), max_norm=2), constants=False, draws=True, overflows=False
    ),
    "local-clip-topk": Row(gc.LocalClip(gc.TopK(0.1), max_norm=0.5), constants=False, overflows=False),
    "ef21": Row(gc.EF21(gc.TopK(0.1)), constants=False),
    "ef21-quantize": Row(gc.EF21(gc.Quantize(5, 64)), draws=True),
    "ef21-momentum": Row(gc.EF21(gc.PowerSGD(2), momentum=0.5), **LOW_RANK),
    "flat": Row(gc.Flat(gc.Quantize(4, 64)), **UNBIASED, by_part=True),
    "flat-odd": Row(gc.Flat(gc.Quantize(3, 33, rounding="nearest", feedback=False)), by_part=True),
    "flat-cast": Row(gc.Flat(gc.Cast("float16")), error=2**-10, by_part=True),
    "flat-bits-by-bucket": Row(
        gc.Flat(gc.Quantize(4, 64, allocate="bucket")), **UNBIASED, sized=False, by_part=True
    ),
    "warmup": Row(gc.Warmup(gc.TopK(0.1), steps=1), constants=False),
    "density-schedule": Row(
        gc.DensitySchedule(gc.TopK(0.05), levels=(0.3, 0.1), steps_per_level=1), constants=False
    ),
    "powersgd": Row(gc.PowerSGD(2), **LOW_RANK),
    "powersgd-alternate": Row(gc.PowerSGD(1, alternate=True), **LOW_RANK, overflows=False, sized=False),
    "powersgd-cold-start": Row(gc.PowerSGD(2, warm_start=False), **LOW_RANK),
    "powersgd-no-feedback": Row(gc.PowerSGD(3, feedback=False), **LOW_RANK),
    "powersgd-momentum": Row(gc.MomentumCorrection(gc.PowerSGD(2)), **LOW_RANK),
    "unbiased-rank": Row(gc.UnbiasedRank(2), **UNBIASED, constants=False, products=True),
    "best-rank": Row(gc.BestRank(2)),
    "best-rank-no-feedback": Row(gc.BestRank(3, feedback=False)),
    "best-rank-momentum": Row(gc.MomentumCorrection(gc.BestRank(2))),
    "spectral-atomo": Row(gc.SpectralAtomo(2), **UNBIASED, sized=False),
    "spectral-atomo-momentum": Row(gc.MomentumCorrection(gc.SpectralAtomo(3)), draws=True, sized=False),
    "topk": Row(gc.TopK(0.1), constants=False),
    "topk-zeros": Row(gc.TopK(0.1, zeros=True), constants=False),
    "topk-zeros-4": Row(gc.TopK(0.1, values=gc.Quantize(4, 64), zeros=True), constants=False, draws=True),
    "chunked-topk": Row(gc.ChunkedTopK(0.1, chunk=50, zeros=False), constants=False),
    "chunked-topk-2": Row(
        gc.ChunkedTopK(0.1, 64, 0.95, values=gc.Quantize(2, 64, rounding="nearest")), constants=False
    ),
    "topk-raw": Row(gc.TopK(0.01, indices="raw"), constants=False),
    "topk-packed": Row(gc.TopK(0.2, indices="packed"), constants=False),
    "topk-bitmap": Row(gc.TopK(0.2, indices="bitmap"), constants=False),
    "topk-deflate": Row(gc.TopK(0.1, indices="deflate"), **SPARSE),
    "topk-all": Row(gc.TopK(1.0, feedback=False), error=1e-6),
    "topk-no-feedback": Row(gc.TopK(0.3, feedback=False), constants=False, error=1.0),
    "topk-bf16": Row(gc.TopK(0.1, values=gc.Cast("bfloat16")), constants=False),
    "topk-4": Row(gc.TopK(0.1, values=gc.Quantize(4, 64)), constants=False, draws=True),
    "sign": Row(gc.ScaledSign(64)),
    "sign-layer": Row(gc.ScaledSign(None)),
    "sign-no-feedback-odd": Row(gc.ScaledSign(33, feedback=False)),
    "signum": Row(gc.Signum(64), constants=False, overflows=False),
    "signum-odd": Row(gc.Signum(33, momentum=0.0), constants=False, overflows=False),
    "onebit": Row(gc.OneBit(64)),
    "onebit-layer": Row(gc.OneBit(None)),
    "onebit-no-feedback-odd": Row(gc.OneBit(33, feedback=False)),
    "terngrad": Row(gc.TernGrad(64), **UNBIASED),
    "terngrad-odd": Row(gc.TernGrad(33), **UNBIASED),
    "bits-by-bucket": Row(gc.Quantize(4, 64, allocate="bucket"), **UNBIASED, sized=False),
    "bits-by-bucket-feedback-odd": Row(
        gc.Quantize(3, 33, feedback=True, allocate="bucket"), draws=True, sized=False
    ),
    "bits-of-fixed-bytes": Row(gc.Quantize(4, 64, allocate="bytes"), **UNBIASED),
    "nuqsgd-4": Row(gc.NUQSGD(4, 64), **UNBIASED, constants=False),
    "nuqsgd-8-linf-odd": Row(gc.NUQSGD(8, 33, "linf"), **UNBIASED),
    "nuqsgd-3-nearest": Row(gc.NUQSGD(3, 48, "linf", "nearest")),
    "nuqsgd-5-feedback": Row(gc.NUQSGD(5, 40, "linf", feedback=True), draws=True),
    "block-float": Row(gc.BlockFloat("fp4_e2m1"), **UNBIASED, constants=False),
    "block-float-nearest": Row(gc.BlockFloat(block=32, rounding="nearest"), constants=False),
    "block-float-e5m2-odd": Row(gc.BlockFloat("fp8_e5m2", 33), **UNBIASED, constants=False),
    "nvfp4": Row(gc.BlockFloat("fp4_e2m1", 16, scale="e4m3"), **UNBIASED, constants=False, by_part=True),
    "nvfp4-nearest-odd": Row(
        gc.BlockFloat("fp4_e2m1", 33, "nearest", scale="e4m3"), constants=False, by_part=True
    ),
    "codebook": Row(gc.Codebook((0.125, 0.25, 0.5, 1), 64), **UNBIASED),
    "codebook-l2-odd": Row(gc.Codebook((1 / 3, 1), 33, "l2"), **UNBIASED, constants=False),
    "codebook-nearest": Row(gc.Codebook((0.1, 0.4, 1), 48, rounding="nearest")),
    "codebook-no-feedback-odd": Row(gc.Codebook((0.2, 0.6, 1), 33, rounding="nearest", feedback=False)),
    "codebook-minmax": Row(gc.Codebook((0, 0.3, 0.45, 0.6, 1), 64, "minmax"), **UNBIASED),
    "codebook-minmax-free": Row(gc.Codebook((0.1, 0.4, 0.55, 0.85), 33, "minmax", "nearest", feedback=False)),
    "codebook-feedback": Row(gc.Codebook((0.5, 1), 50, feedback=True), draws=True),
    "dgc": Row(gc.DGC(0.1, momentum_factor=0.0, sample=0.5), **SPARSE),
    "dgc-momentum": Row(gc.DGC(0.05, momentum_factor=0.5), **SPARSE),
    "dgc-no-mask": Row(gc.DGC(0.2, mask=False, values=gc.Cast("bfloat16")), **SPARSE),
    "dgc-clip": Row(gc.DGC(0.1, clip=0.5), **SPARSE, overflows=False),
    "dgc-clip-only": Row(gc.DGC(0.1, momentum_factor=0.0, clip=2.0), **SPARSE, overflows=False),
    "dgc-warmup": Row(gc.DGC(0.01, sample=0.3, warmup_steps=4), **SPARSE),
    "redsync": Row(gc.RedSync(0.05), **SPARSE),
    "redsync-dense": Row(gc.RedSync(0.7, tolerance=0.1, values=gc.Quantize(4, 64)), **SPARSE, draws=True),
    "sidco": Row(gc.SIDCo(0.05), **SPARSE),
    "sidco-pareto": Row(gc.SIDCo(0.02, stages=2, distribution="pareto"), **SPARSE),
    "adacomp": Row(gc.AdaComp(bin_size=20, limit=0.5), **SPARSE),
    "adacomp-limited": Row(gc.AdaComp(bin_size=50, limit=0.02, feedback=False), **SPARSE, error=1.0),
    "global-topk": Row(gc.GlobalTopK(0.1), **SPARSE),
    "global-topk-bf16": Row(gc.GlobalTopK(0.05, values=gc.Cast("bfloat16")), **SPARSE),
    "two-level": Row(TwoLevelSelection(gc.TopK(0.3), candidate=0.05), constants=False),
    "two-level-minimum": Row(
        TwoLevelSelection(gc.DGC(0.1, momentum_factor=0.5, sample=0.5), 0.01, "minimum"), **SPARSE
    ),
    "two-level-dense": Row(TwoLevelSelection(gc.TopK(0.1), 0.02, "dense"), error=1e-6, everything=True),
    "two-level-redsync": Row(TwoLevelSelection(gc.RedSync(0.2), 0.1), **SPARSE),
    "two-level-random": Row(TwoLevelSelection(gc.RandomK(0.3), 0.1), constants=False, draws=True),
    "two-level-random-minimum": Row(
        TwoLevelSelection(gc.RandomBlock(0.2), 0.1, "minimum"), constants=False, draws=True
    ),
    "two-level-momentum": Row(
        gc.MomentumCorrection(TwoLevelSelection(gc.TopK(0.1), 0.02, "dense"), 0.5),
        error=1e-6,
        everything=True,
    ),
    "two-level-clip": Row(
        gc.LocalClip(TwoLevelSelection(gc.DGC(0.2), 0.04), max_norm=0.5), **SPARSE, overflows=False
    ),
    "threshold": Row(gc.Threshold(0.5), **SPARSE, waits=True),
    "threshold-capacity": Row(gc.Threshold(0.5, capacity=0.1), **SPARSE),
    "threshold-no-feedback": Row(gc.Threshold(0.5, feedback=False), **SPARSE, error=1.0),
    "clt-k": Row(gc.CLTk(0.1), constants=False),
    "clt-k-deflate": Row(gc.CLTk(0.2, indices="deflate", refresh=3), **SPARSE, waits=True),
    "clt-k-no-feedback": Row(gc.CLTk(0.3, feedback=False), constants=False, error=1.0),
    "clt-k-momentum": Row(gc.MomentumCorrection(gc.CLTk(0.1)), constants=False),
    "random-k": Row(gc.RandomK(0.1), constants=False, draws=True),
    "random-k-scaled": Row(gc.RandomK(0.2, scaled=True), **UNBIASED, constants=False),
    "random-k-all": Row(gc.RandomK(1.0, feedback=False), error=1e-6),
    "random-block": Row(gc.RandomBlock(0.1), constants=False, draws=True),
    "random-block-scaled": Row(gc.RandomBlock(0.2, scaled=True), **UNBIASED, constants=False),
    "fake": Row(gc.Fake(2), constants=False, by_part=True, partial=True),
    "fake-whole": Row(gc.Fake(1), error=1e-6),
    "lgc": Row(gc.LGC(0.1, warmup_steps=1, train_steps=1, **EVERY_LAYER), **LEARNED),
    "lgc-training": Row(gc.LGC(0.1, 0.0, 0, 9, code_channels=1, indices="packed", **EVERY_LAYER), **LEARNED),
    "lgc-codes": Row(gc.LGC(0.2, 0.5, 0, 0, **EVERY_LAYER), **LEARNED, waits=True),
    "lgc-feedback": Row(
        gc.LGC(0.3, 0.0, 0, 0, 1, feedback=True, refresh=2, deconvolutions=4, **EVERY_LAYER),
        **LEARNED,
        waits=True,
    ),
    "lgc-feedback-five": Row(
        gc.LGC(0.3, 0.0, 0, 0, 1, feedback=True, refresh=2, **EVERY_LAYER), **LEARNED, waits=True
    ),
    "lgc-server": Row(
        gc.LGC(0.3, 0.0, 0, 0, form="server", feedback=True, refresh=2, deconvolutions=4, **EVERY_LAYER),
        **LEARNED,
        waits=True,
    ),
    "lgc-server-five": Row(
        gc.LGC(0.3, 0.0, 0, 0, form="server", feedback=True, refresh=2, **EVERY_LAYER), **LEARNED, waits=True
    ),
    "lgc-server-training": Row(
        gc.LGC(0.2, warmup_steps=0, train_steps=1, form="server", innovation=0.5, **EVERY_LAYER), **LEARNED
    ),
}
