"""The rows of the convergence benchmark: what is trained, how its gradients are compressed, and what must hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

DIGITS, LSTM, RESNET = TASKS = ("digits", "lstm", "resnet")
GPT, PAIRS = ON_REQUEST = ("gpt", "pairs")  # GPTs on words and on byte pairs, only where they are asked for
#: Metric of each task, and the sign of a change for the worse.
METRICS = {
    DIGITS: ("accuracy", -1.0), LSTM: ("perplexity", 1.0), RESNET: ("accuracy", -1.0), GPT: ("perplexity", 1.0),
    PAIRS: ("perplexity", 1.0),
}  # fmt: skip

REFERENCE = "none"
_MAIN, _CNN = TASKS, (DIGITS, RESNET)


@dataclass(frozen=True)
class Arm:
    """A compression. The reference is what all others are compared with, pair by pair.

    ``by_task``: other settings for single tasks. ``tasks``: where it is measured unless it is asked for elsewhere.
    ``bar``: at most 1% worse is required. ``control``: at most 1% worse must not be reached. ``note``: what a paper
    says of it. ``rates``: factors on the learning rate, by task, for results that have no magnitude.
    """

    key: str
    title: str
    compression: str
    tasks: Sequence[str] = (DIGITS,)
    bar: bool = False
    control: bool = False
    note: str = ""
    by_task: Mapping[str, str] = field(default_factory=dict)
    rates: Mapping[str, float] = field(default_factory=dict)

    def on(self, task: str) -> str:
        """The compression in this task."""
        return self.by_task.get(task, self.compression)


# DGC's density falls over the first four epochs, as in its paper; 200 steps of the LSTM, whose epochs are long. Its
# clipping is local, where the task clips at all.
_DGC = {
    DIGITS: "dgc:density=0.001,warmup_steps=56",
    LSTM: "dgc:density=0.001,warmup_steps=200,clip=0.25",
    RESNET: "dgc:density=0.001,warmup_steps=312",
}
# Equal bytes (Vogels et al. 2019, Table 4): as many as PowerSGD of rank 3 on the digits (about 1 bit an element) and
# rank 2 on ResNet-20 (1.5 bits).
_EQUAL_K = {DIGITS: 0.0327, RESNET: 0.0474}
_EQUAL_TOPK = {DIGITS: 0.0267, RESNET: 0.0393}


def _equal(name: str, densities: Mapping[str, float]) -> dict[str, str]:
    return {task: f"{name}:density={density}" for task, density in densities.items()}


ARMS = (
    Arm(REFERENCE, "uncompressed", "none", _MAIN),
    Arm("4bit", "4 bits, stochastic", "quantize:bits=4", _MAIN, bar=True),
    Arm(
        "4bit-feedback",
        "4 bits, nearest, feedback",
        "quantize:bits=4,rounding=nearest",
        (DIGITS, LSTM),
        bar=True,
    ),
    Arm("topk", "TopK 1%", "topk:density=0.01", _MAIN, bar=True),
    Arm("dgc", "DGC 0.1%", _DGC[DIGITS], _MAIN, bar=True, by_task=_DGC),
    Arm("powersgd-2", "PowerSGD, rank 2", "powersgd:rank=2", _MAIN, bar=True),
    Arm("powersgd-4", "PowerSGD, rank 4", "powersgd:rank=4", _MAIN, bar=True),
    Arm("scaled-sign", "ScaledSign", "scaled_sign", _MAIN, bar=True),
    Arm("random-k", "RandomK 10%", "random_k:density=0.1", _MAIN, note="Tyagi and Swany 2023: fails"),
    # Sparse
    Arm("random-k-scaled", "RandomK 10%, unbiased", "random_k:density=0.1,scaled=true"),
    Arm("random-block", "RandomBlock 10%", "random_block:density=0.1", note="Vogels et al. 2019: fails"),
    Arm("threshold", "Threshold 4.72e-3", "threshold:threshold=0.00472"),
    Arm("redsync", "RedSync 1%", "redsync:density=0.01"),
    Arm("clt-k", "CLT-k 1%", "clt_k:density=0.01"),
    Arm("sidco", "SIDCo 1%", "sidco:density=0.01"),
    Arm("adacomp", "AdaComp", "adacomp", note="Markov 2024: fails on language"),
    Arm("global-topk", "GlobalTopK 1%", "global_topk:density=0.01"),
    Arm("topk-momentum", "TopK 1%, momentum correction", "momentum_correction[topk:density=0.01]:factor=0.9"),
    # Composed
    Arm("topk-fp16", "TopK 1%, values fp16", "topk:density=0.01,values=[cast:dtype=float16]"),
    Arm("topk-4bit", "TopK 1%, values 4 bits", "topk:density=0.01,values=[quantize:bits=4]"),
    Arm("topk-signs", "TopK 1%, one mean per sign", "topk:density=0.01,values=[one_bit]"),
    # Sign and quantise
    Arm(
        "signum",
        "Signum",
        "signum:momentum=0.9",
        (DIGITS, LSTM),
        note="Vogels et al. 2019: fails on the LSTM",
        # Its steps are of the size of the learning rate; on the LSTM clipping sees to that.
        rates={DIGITS: 0.01, RESNET: 0.01},
    ),
    Arm("one-bit", "OneBit", "one_bit"),
    Arm("terngrad", "TernGrad", "terngrad"),
    Arm("nuqsgd", "NUQSGD, 4 bits", "nuqsgd:bits=4"),
    Arm("codebook", "Codebook, 7 levels", "codebook:levels=0.015625/0.03125/0.0625/0.125/0.25/0.5/1"),
    Arm("fp8", "BlockFloat, FP8 (E4M3)", "block_float"),
    Arm("fp4", "BlockFloat, FP4 (E2M1)", "block_float:format=fp4_e2m1"),
    Arm("nvfp4", "BlockFloat, NVFP4", "block_float:format=fp4_e2m1,block=16,scale=e4m3"),
    # the ablations of Vogels et al. 2019
    Arm("powersgd-2-alternate", "PowerSGD, rank 2, half-iterations", "powersgd:rank=2,alternate=true", _CNN),
    Arm("powersgd-2-cold", "PowerSGD, rank 2, no warm start", "powersgd:rank=2,warm_start=false", _CNN),
    Arm("powersgd-2-no-feedback", "PowerSGD, rank 2, no feedback", "powersgd:rank=2,feedback=false", _CNN),
    Arm("unbiased-rank-2", "UnbiasedRank, rank 2", "unbiased_rank:rank=2", _CNN),
    Arm("best-rank-2", "BestRank, rank 2", "best_rank:rank=2", _CNN),
    Arm("atomo-2", "SpectralAtomo, rank 2", "spectral_atomo:rank=2", _CNN),
    Arm("equal-powersgd", "equal bytes: PowerSGD, rank 3", "powersgd:rank=3"),
    Arm("equal-topk", "equal bytes: TopK", "", _CNN, by_task=_equal("topk", _EQUAL_TOPK)),
    Arm("equal-random-k", "equal bytes: RandomK", "", _CNN, by_task=_equal("random_k", _EQUAL_K)),
    Arm(
        "equal-random-block",
        "equal bytes: RandomBlock",
        "",
        _CNN,
        note="Vogels et al. 2019: fails",
        by_task=_equal("random_block", _EQUAL_K),
    ),
    Arm(
        "control",
        "control: 1 bit, nearest, no feedback",
        "quantize:bits=1,rounding=nearest,feedback=false",
        _MAIN,
        control=True,
    ),
)


def choose(keys: str | None, compressions: Sequence[str], task: str) -> list[Arm]:
    """The task's rows, the reference first; those of ``keys`` if given. SystemExit for a key that does not exist."""
    extra = [Arm(text, text, text) for text in compressions]
    if keys is None:
        return [arm for arm in ARMS if task in arm.tasks] + extra
    known = {arm.key: arm for arm in ARMS}
    wanted = keys.split(",")
    if unknown := [key for key in wanted if key not in known]:
        raise SystemExit(f"--rows: unknown {', '.join(unknown)}; there are {', '.join(known)}")
    chosen = [known[key] for key in dict.fromkeys([REFERENCE, *wanted])]
    return [arm for arm in chosen if arm.on(task)] + extra
