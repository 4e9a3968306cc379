"""Every compressor configuration that the contract suite and the golden payloads run through: a newcomer adds a row."""

from __future__ import annotations

from gradcomp import (
    DGC,
    EF21,
    LGC,
    NUQSGD,
    AdaComp,
    BestRank,
    BlockFloat,
    Cast,
    CLTk,
    Codebook,
    DensitySchedule,
    ErrorFeedback,
    GlobalTopK,
    Identity,
    LocalClip,
    MomentumCorrection,
    OneBit,
    PowerSGD,
    Quantize,
    RandomBlock,
    RandomK,
    RedSync,
    ScaledSign,
    SIDCo,
    Signum,
    SpectralAtomo,
    TernGrad,
    Threshold,
    TopK,
    UnbiasedRank,
    Warmup,
)
from gradcomp.compress import TwoLevelSelection
from gradcomp.testing import Row

LEARNED = {"constants": False, "draws": True, "overflows": False, "sized": False, "by_part": True}

ROWS = {
    "none": Row(Identity(), error=1e-6),
    "fp32": Row(Cast("float32"), error=1e-6),
    "fp16": Row(Cast("float16"), error=2**-10),
    "bf16": Row(Cast("bfloat16"), error=2**-7),
    "fp16-feedback": Row(Cast("float16", feedback=True), error=2**-10),
    "bf16-feedback": Row(Cast("bfloat16", feedback=True), error=2**-7),
    "minmax-4": Row(Quantize(4, 64), unbiased=True, draws=True),
    "minmax-3-odd": Row(Quantize(3, 33), unbiased=True, draws=True),
    "minmax-1": Row(Quantize(1, 32), unbiased=True, draws=True),
    "minmax-4-shift": Row(Quantize(4, 64, rounding="shift"), unbiased=True, draws=True),
    "minmax-blocks": Row(Quantize((3, 5, 2, 4), 16, feedback=True), draws=True),
    "minmax-4-nearest": Row(Quantize(4, 64, rounding="nearest")),
    "minmax-1-nearest-odd": Row(Quantize(1, 33, rounding="nearest")),
    "l2-1-nearest": Row(Quantize(1, 32, "l2", "nearest")),
    "l2-5-nearest": Row(Quantize(5, 200, "l2", "nearest"), constants=False),
    "minmax-5-feedback": Row(Quantize(5, 40, feedback=True), draws=True),
    "minmax-3-decay": Row(Quantize(3, 100, rounding="nearest", decay=0.5), error=2 / 7),
    "minmax-2-no-feedback": Row(Quantize(2, 16, rounding="nearest", feedback=False), error=2 / 3),
    "l2-8": Row(Quantize(8, 128, "l2"), unbiased=True, draws=True, constants=False),
    "l2-1": Row(Quantize(1, 32, "l2"), unbiased=True, draws=True, constants=False),
    "linf-6-feedback": Row(Quantize(6, 50, "linf", feedback=True), draws=True),
    "linf-2-nearest": Row(Quantize(2, 48, "linf", "nearest")),
    "error-feedback": Row(ErrorFeedback(Quantize(4, 64)), draws=True),
    "error-feedback-decay": Row(
        ErrorFeedback(Quantize(4, 64, rounding="nearest"), decay=0.9, follow_rate=True)
    ),
    "momentum-correction": Row(MomentumCorrection(Quantize(4, 64), factor=0.5), draws=True),
    "momentum-correction-exact": Row(MomentumCorrection(Identity()), error=1e-6),
    "momentum-correction-topk": Row(MomentumCorrection(TopK(0.1)), constants=False),
    "local-clip": Row(LocalClip(Quantize(4, 64), max_norm=2), constants=False, draws=True, overflows=False),
    "local-clip-topk": Row(LocalClip(TopK(0.1), max_norm=0.5), constants=False, overflows=False),
    "ef21": Row(EF21(TopK(0.1)), constants=False),
    "ef21-quantize": Row(EF21(Quantize(5, 64)), draws=True),
    "ef21-momentum": Row(EF21(PowerSGD(2), momentum=0.5), constants=False, draws=True, products=True),
    "warmup": Row(Warmup(TopK(0.1), steps=1), constants=False),
    "density-schedule": Row(
        DensitySchedule(TopK(0.05), levels=(0.3, 0.1), steps_per_level=1), constants=False
    ),
    "powersgd": Row(PowerSGD(2), constants=False, draws=True, products=True),
    "powersgd-alternate": Row(
        PowerSGD(1, alternate=True), constants=False, draws=True, overflows=False, sized=False, products=True
    ),
    "powersgd-cold-start": Row(PowerSGD(2, warm_start=False), constants=False, draws=True, products=True),
    "powersgd-no-feedback": Row(PowerSGD(3, feedback=False), constants=False, draws=True, products=True),
    "powersgd-momentum": Row(MomentumCorrection(PowerSGD(2)), constants=False, draws=True, products=True),
    "unbiased-rank": Row(UnbiasedRank(2), unbiased=True, draws=True, constants=False, products=True),
    "best-rank": Row(BestRank(2)),
    "best-rank-no-feedback": Row(BestRank(3, feedback=False)),
    "best-rank-momentum": Row(MomentumCorrection(BestRank(2))),
    "spectral-atomo": Row(SpectralAtomo(2), unbiased=True, draws=True, sized=False),
    "spectral-atomo-momentum": Row(MomentumCorrection(SpectralAtomo(3)), draws=True, sized=False),
    "topk": Row(TopK(0.1), constants=False),
    "topk-zeros": Row(TopK(0.1, zeros=True), constants=False),
    "topk-zeros-4": Row(TopK(0.1, values=Quantize(4, 64), zeros=True), constants=False, draws=True),
    "topk-raw": Row(TopK(0.01, indices="raw"), constants=False),
    "topk-packed": Row(TopK(0.2, indices="packed"), constants=False),
    "topk-bitmap": Row(TopK(0.2, indices="bitmap"), constants=False),
    "topk-deflate": Row(TopK(0.1, indices="deflate"), constants=False, sized=False),
    "topk-all": Row(TopK(1.0, feedback=False), error=1e-6),
    "topk-no-feedback": Row(TopK(0.3, feedback=False), constants=False, error=1.0),
    "topk-bf16": Row(TopK(0.1, values=Cast("bfloat16")), constants=False),
    "topk-4": Row(TopK(0.1, values=Quantize(4, 64)), constants=False, draws=True),
    "sign": Row(ScaledSign(64)),
    "sign-layer": Row(ScaledSign(None)),
    "sign-no-feedback-odd": Row(ScaledSign(33, feedback=False)),
    "signum": Row(Signum(64), constants=False, overflows=False),
    "signum-odd": Row(Signum(33, momentum=0.0), constants=False, overflows=False),
    "onebit": Row(OneBit(64)),
    "onebit-layer": Row(OneBit(None)),
    "onebit-no-feedback-odd": Row(OneBit(33, feedback=False)),
    "terngrad": Row(TernGrad(64), unbiased=True, draws=True),
    "terngrad-odd": Row(TernGrad(33), unbiased=True, draws=True),
    "bits-by-bucket": Row(Quantize(4, 64, allocate="bucket"), unbiased=True, draws=True, sized=False),
    "bits-by-bucket-feedback-odd": Row(
        Quantize(3, 33, feedback=True, allocate="bucket"), draws=True, sized=False
    ),
    "bits-of-fixed-bytes": Row(Quantize(4, 64, allocate="bytes"), unbiased=True, draws=True),
    "nuqsgd-4": Row(NUQSGD(4, 64), unbiased=True, draws=True, constants=False),
    "nuqsgd-8-linf-odd": Row(NUQSGD(8, 33, "linf"), unbiased=True, draws=True),
    "nuqsgd-3-nearest": Row(NUQSGD(3, 48, "linf", "nearest")),
    "nuqsgd-5-feedback": Row(NUQSGD(5, 40, "linf", feedback=True), draws=True),
    "block-float": Row(BlockFloat("fp4_e2m1"), unbiased=True, draws=True, constants=False),
    "block-float-nearest": Row(BlockFloat(block=32, rounding="nearest"), constants=False),
    "block-float-e5m2-odd": Row(BlockFloat("fp8_e5m2", 33), unbiased=True, draws=True, constants=False),
    "nvfp4": Row(
        BlockFloat("fp4_e2m1", 16, scale="e4m3"), unbiased=True, draws=True, constants=False, by_part=True
    ),
    "nvfp4-nearest-odd": Row(
        BlockFloat("fp4_e2m1", 33, "nearest", scale="e4m3"), constants=False, by_part=True
    ),
    "codebook": Row(Codebook((0.125, 0.25, 0.5, 1), 64), unbiased=True, draws=True),
    "codebook-l2-odd": Row(Codebook((1 / 3, 1), 33, "l2"), unbiased=True, draws=True, constants=False),
    "codebook-nearest": Row(Codebook((0.1, 0.4, 1), 48, rounding="nearest")),
    "codebook-no-feedback-odd": Row(Codebook((0.2, 0.6, 1), 33, rounding="nearest", feedback=False)),
    "codebook-feedback": Row(Codebook((0.5, 1), 50, feedback=True), draws=True),
    "dgc": Row(DGC(0.1, momentum_factor=0.0, sample=0.5), constants=False, sized=False),
    "dgc-momentum": Row(DGC(0.05, momentum_factor=0.5), constants=False, sized=False),
    "dgc-no-mask": Row(DGC(0.2, mask=False, values=Cast("bfloat16")), constants=False, sized=False),
    "dgc-clip": Row(DGC(0.1, clip=0.5), constants=False, sized=False, overflows=False),
    "dgc-clip-only": Row(
        DGC(0.1, momentum_factor=0.0, clip=2.0), constants=False, sized=False, overflows=False
    ),
    "dgc-warmup": Row(DGC(0.01, sample=0.3, warmup_steps=4), constants=False, sized=False),
    "redsync": Row(RedSync(0.05), constants=False, sized=False),
    "redsync-dense": Row(
        RedSync(0.7, tolerance=0.1, values=Quantize(4, 64)), constants=False, sized=False, draws=True
    ),
    "sidco": Row(SIDCo(0.05), constants=False, sized=False),
    "sidco-pareto": Row(SIDCo(0.02, stages=2, distribution="pareto"), constants=False, sized=False),
    "adacomp": Row(AdaComp(bin_size=20, limit=0.5), constants=False, sized=False),
    "adacomp-limited": Row(
        AdaComp(bin_size=50, limit=0.02, feedback=False), constants=False, sized=False, error=1.0
    ),
    "global-topk": Row(GlobalTopK(0.1), constants=False, sized=False),
    "global-topk-bf16": Row(GlobalTopK(0.05, values=Cast("bfloat16")), constants=False, sized=False),
    "two-level": Row(TwoLevelSelection(TopK(0.3), candidate=0.05), constants=False),
    "two-level-minimum": Row(
        TwoLevelSelection(DGC(0.1, momentum_factor=0.5, sample=0.5), 0.01, "minimum"),
        constants=False,
        sized=False,
    ),
    "two-level-dense": Row(TwoLevelSelection(TopK(0.1), 0.02, "dense"), error=1e-6, everything=True),
    "two-level-redsync": Row(TwoLevelSelection(RedSync(0.2), 0.1), constants=False, sized=False),
    "two-level-momentum": Row(
        MomentumCorrection(TwoLevelSelection(TopK(0.1), 0.02, "dense"), 0.5), error=1e-6, everything=True
    ),
    "two-level-clip": Row(
        LocalClip(TwoLevelSelection(DGC(0.2), 0.04), max_norm=0.5),
        constants=False,
        sized=False,
        overflows=False,
    ),
    "threshold": Row(Threshold(0.5), constants=False, sized=False, waits=True),
    "threshold-capacity": Row(Threshold(0.5, capacity=0.1), constants=False, sized=False),
    "threshold-no-feedback": Row(Threshold(0.5, feedback=False), constants=False, sized=False, error=1.0),
    "clt-k": Row(CLTk(0.1), constants=False),
    "clt-k-deflate": Row(CLTk(0.2, indices="deflate", refresh=3), constants=False, sized=False, waits=True),
    "clt-k-no-feedback": Row(CLTk(0.3, feedback=False), constants=False, error=1.0),
    "clt-k-momentum": Row(MomentumCorrection(CLTk(0.1)), constants=False),
    "random-k": Row(RandomK(0.1), constants=False, draws=True),
    "random-k-scaled": Row(RandomK(0.2, scaled=True), unbiased=True, constants=False, draws=True),
    "random-k-all": Row(RandomK(1.0, feedback=False), error=1e-6),
    "random-block": Row(RandomBlock(0.1), constants=False, draws=True),
    "random-block-scaled": Row(RandomBlock(0.2, scaled=True), unbiased=True, constants=False, draws=True),
    "lgc": Row(LGC(0.1, warmup_steps=1, train_steps=1, ends=False, least_parameters=0), **LEARNED),
    "lgc-training": Row(
        LGC(0.1, 0.0, 0, 9, code_channels=1, ends=False, least_parameters=0, indices="packed"), **LEARNED
    ),
    "lgc-codes": Row(LGC(0.2, 0.5, 0, 0, ends=False, least_parameters=0), **LEARNED, waits=True),
    "lgc-feedback": Row(
        LGC(0.3, 0.0, 0, 0, code_channels=1, ends=False, least_parameters=0, feedback=True, refresh=2),
        **LEARNED,
        waits=True,
    ),
    "lgc-server": Row(
        LGC(0.3, 0.0, 0, 0, form="server", ends=False, least_parameters=0, feedback=True, refresh=2),
        **LEARNED,
        waits=True,
    ),
    "lgc-server-training": Row(
        LGC(
            0.2, warmup_steps=0, train_steps=1, form="server", innovation=0.5, ends=False, least_parameters=0
        ),
        **LEARNED,
    ),
}
