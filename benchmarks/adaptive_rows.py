"""The rows of the controllers' benchmark: a family with its uniform level, and what chooses levels for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

LSTM, RESNET, GPT = TASKS = ("lstm", "resnet", "gpt")

UNIFORM, DENSE = "uniform", "none"

T = TypeVar("T")


def _of(text: T, images: T) -> dict[str, T]:
    """Settings by task: both language models have those of the papers' language models."""
    return {LSTM: text, GPT: text, RESNET: images}


#: A uniform level and L-GreCo with that level as its reference, for several levels of each family.
SWEEP = "sweep"
LEVELS = {
    "bits": _of(("3", "4", "6", "8"), ("3", "4", "6", "8")),
    "density": _of(("0.02", "0.05", "0.1", "0.2"), ("0.002", "0.005", "0.01", "0.02")),
    "rank": _of(("8", "16", "32", "64"), ("1", "2", "4", "8")),
}

#: Steps between decisions: an epoch of the ResNet's, and a tenth of the other runs as they are by default.
EVERY = _of(100, 78)


@dataclass(frozen=True)
class Family:
    """A compression with the papers' reference level of each task, and Accordion's two levels around it."""

    key: str
    title: str
    compression: dict[str, str]
    low: dict[str, str]
    high: dict[str, str]
    target: float | None  # bytes of uniform over those of L-GreCo, issue and Markov et al. 2024


#: Compressors that no controller sets: what Markov 2024, section 4.6.3, compares L-GreCo over TopK with.
DENSITIES = {
    "adacomp": _of("adacomp", "adacomp"),
    "threshold": _of("threshold:threshold=0.00472", "threshold:threshold=0.00472"),
    "threshold-tuned": _of("threshold:threshold=0.000203", "threshold:threshold=0.0209"),
    "global-topk": _of("global_topk:density=0.0493", "global_topk:density=0.00528"),
}


FAMILIES = (
    Family("bits", "QSGD", _of("quantize:bits=4", "quantize:bits=4"), _of("4", "4"), _of("3", "3"), 1.1),
    Family(
        "density",
        "TopK",
        _of("topk:density=0.1", "topk:density=0.01"),
        _of("0.2", "0.02"),
        _of("0.05", "0.005"),
        2.0,
    ),
    Family(
        "rank", "PowerSGD", _of("powersgd:rank=32", "powersgd:rank=4"), _of("64", "8"), _of("16", "2"), 1.4
    ),
)


@dataclass(frozen=True)
class Arm:
    """One run: a family's compression, and the controller on top of it; none for uniform."""

    key: str
    title: str
    compression: str
    controller: str
    family: Family | None = None
    exact: str = "float32"


#: GraVAC's compressors; the density that they come with is not used. Only "momentum" has momentum, and the optimizer
#: has none then. Random-k begins at 1.5 x, as in Figure 11 of Tyagi and Swany 2023.
RANDOM = "random"
GRAVAC = {
    "topk": "topk",
    "dgc": "dgc:momentum_factor=0",
    "redsync": "redsync",
    "momentum": "dgc",
    RANDOM: "random_k",
}
EPSILONS = (0.5, 0.7, 0.9, 0.99)
#: Those of the paper, which the name of a form alone asks for.
USUAL_EPSILONS = (0.7, 0.9)

#: Factors that rows named "gravac-fixed" send in every step but the first, whatever their gain: for figures of gains.
FIXED = {"topk": ("10", "1000"), RANDOM: ("1.5", "12", "48")}

#: The forms of its gain, and what begins the keys of their rows.
GAINS = {"norm": "gravac", "energy": "gravac-energy", "released": "gravac-released"}


def gravac_arms(task: str, every_steps: int | None = None) -> list[Arm]:
    """GraVAC over its compressors; the paper's candidates, with windows for runs that are ten times shorter."""
    window = every_steps or _of(100, 156)[task]
    usual, random = "minimum=10,maximum=1000", "minimum=1.5,maximum=1000,policy=geometric"
    fixed = [
        Arm(
            f"gravac-fixed-{name}-{factor}",
            f"GraVAC, {name}, always {factor} x",
            GRAVAC[name],
            f"gravac:minimum={factor},maximum={factor},epsilon=0.000001,window={window}",
        )
        for name, factors in FIXED.items()
        for factor in factors
    ]
    return fixed + [
        Arm(
            f"{begin}-{name}-{epsilon:g}",
            f"GraVAC by {gain}, {name}, epsilon {epsilon:g}",
            form,
            f"gravac:{random if name == RANDOM else usual},epsilon={epsilon:g},window={window},gain={gain}",
        )
        for gain, begin in GAINS.items()
        for name, form in GRAVAC.items()
        if (gain, name) != ("energy", RANDOM)
        for epsilon in EPSILONS
    ]


def sweep_arms(task: str, family: Family) -> list[Arm]:
    """Each of the family's levels as one more family, whose uniform level it is."""
    rows = []
    for level in LEVELS[family.key][task]:
        text = f"{family.compression[task].partition('=')[0]}={level}"
        there = replace(
            family, key=f"{family.key}@{level}", compression={**family.compression, task: text}, target=None
        )
        for name, form in ((UNIFORM, ""), ("lgreco", f"lgreco:every_steps={EVERY[task]}")):
            rows.append(Arm(f"{there.key}-{name}", f"{family.title} {level}, {name}", text, form, there))
    return rows


def arms(
    task: str, families: Sequence[str], controllers: Sequence[str], every_steps: int | None = None
) -> list[Arm]:
    """The rows of a task: uncompressed first, then by family uniform and what was asked for; last GraVAC's."""
    every = every_steps or EVERY[task]
    rows = [Arm(DENSE, "uncompressed", "none", "")]
    for family in FAMILIES:
        if family.key not in families:
            continue
        ends = f"low={family.low[task]},high={family.high[task]},every_steps={every}"
        forms = {
            UNIFORM: "",
            "lgreco": f"lgreco:every_steps={every}",
            "lgreco-window": f"lgreco:every_steps={every},window={every}",
            "lgreco-norm": f"lgreco:every_steps={every},metric=norm",
            "lgreco-adam": f"lgreco:every_steps={every},metric=adam",
            "lgreco-blocks": f"lgreco:every_steps={every},blocks=32",
            "lgreco-adam-blocks": f"lgreco:every_steps={every},metric=adam,blocks=32",
            "lgreco-8": f"lgreco:every_steps={every},samples=8",
            "lgreco-narrow": f"lgreco:every_steps={every},widen=false",
            "lgreco-time": f"lgreco:every_steps={every},objective=time",
            "lgreco-position": f"lgreco:every_steps={every},objective=position",
            "kmeans": f"kmeans:every_steps={every}",
            "kmeans-plain": f"kmeans:every_steps={every},points=plain,alpha=none",
            "linear": f"linear:every_steps={every}",
            "bayes": f"bayes:every_steps={every}",
            "adaqs": f"adaqs:{ends}",
            "accordion": f"accordion:{ends}",
            "lgreco-accordion": f"lgreco:every_steps={every},accordion=[accordion:{ends}]",
            "hybrid": f"lgreco:every_steps={every},levels=hybrid",
            "hybrid-window": f"lgreco:every_steps={every},levels=hybrid,window={every}",
        }
        forms |= {f"{name}-bf16": forms[name] for name in (UNIFORM, "lgreco")}
        forms |= {f"{UNIFORM}-zeros": ""} if family.key == "density" else {}
        rows += [
            Arm(
                f"{family.key}-{name}",
                f"{family.title}, {name}",
                family.compression[task] + (",zeros=true" if name.endswith("-zeros") else ""),
                form,
                family,
                "bf16" if name.endswith("-bf16") else "float32",
            )
            for name, form in forms.items()
            if name in controllers or (name == UNIFORM and set(controllers) != {SWEEP})
        ]
        rows += sweep_arms(task, family) if SWEEP in controllers else []
        if family.key == "density":
            rows += [
                Arm(f"density-{name}", f"{name}: {form[task]}", form[task], "", family)
                for name, form in DENSITIES.items()
                if name in controllers
            ]
    asked = set(controllers)  # a gain's rows of the usual epsilons, or one row by its key
    for form in asked & set(GAINS.values()):
        asked |= {f"{form}-{name}-{epsilon:g}" for name in GRAVAC for epsilon in USUAL_EPSILONS}
    return rows + [arm for arm in gravac_arms(task, every_steps) if arm.key in asked]


#: What a run without ``--controllers`` compares.
DEFAULT = ("lgreco", "kmeans", "linear", "bayes", "accordion", "lgreco-accordion", "hybrid", "gravac")
