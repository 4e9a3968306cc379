"""GraVAC: the compression factor of the next step, from what two factors would keep of this one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from gradcomp.control.base import Controller, ControllerRun, Environment
from gradcomp.control.checks import check_count
from gradcomp.control.gravac_run import ENERGY, NORM, GraVACRun
from gradcomp.control.gravac_search import Search
from gradcomp.core.errors import ConfigError

#: How candidates follow each other.
POLICIES = ("exponential", "geometric")

#: What a gain is.
GAINS = (NORM, ENERGY)


@dataclass(frozen=True)
class GraVAC(Controller):
    """Compress as much as the gradients bear: in every step the candidate factor, the minimum, or nothing at all.

    p = g + e;  g_min = C(p, theta_min);  g_c = C(g_min, theta_c / theta_min), both in every step
    delta(theta) = EWMA of sum ||g_theta|| / EWMA of sum ||g||      with ``gain="norm"``, as in the authors' code
                 = EWMA of (sum ||g_theta||^2 / sum ||p||^2)        with ``gain="energy"``, as printed
    sums over ranks and layers, averages per factor
    the next step sends g_c if delta(theta_c) >= epsilon, else g_min if delta(theta_min) >= epsilon, else p
    T(theta) = delta(theta) x the median of N / iteration seconds over the window's steps that sent theta; delta(1) = 1

    Every ``window`` steps: theta_min <- theta_c if their gains are within ``omega``, relative to delta(theta_min); then
    theta_c <- the next candidate; then, if the two largest T are within ``omega``, theta_c <- theta_ideal, the lower
    factor of the two, and theta_min <- min(theta_min, theta_ideal).

    A factor theta is a density of 1 / theta; a factor of 1 is dense. Candidates: ``minimum`` x 2^(0, 1, 2, 4, 8, ...)
    with ``policy="exponential"`` (10, 20, 40, 160, 1000), ``minimum`` x 2^(0, 1, 2, 3, ...) with ``"geometric"``
    (10, 20, ..., 1280, 2000 for a ``maximum`` of 2000; the paper's window is 2000 then), and ``maximum`` last.
    What a factor keeps of p may be more than g has, so a gain by norm may exceed 1. By energy it cannot, and is about
    0.5 for 10x on a ResNet-20: below any threshold of use, so that nothing is ever compressed.
    ``per_layer``: all of it for every layer by itself, on the model's iteration time.

    For compressors that select by density on every rank: TopK, DGC, RedSync, SIDCo, also inside of ErrorFeedback,
    MomentumCorrection and LocalClip. The density that they come with is not used. RandomK cannot work: what it keeps
    of p follows from theta alone, whatever the gradients are.

    Wire: as :class:`gradcomp.compress.TwoLevelSelection`, and one sum of 5 float64 a step beside the last bucket (2 + 3
    per layer with ``per_layer``). State: two averages, T and a count per factor, and a window of seconds.
    Errors: ConfigError for a minimum below 1, a maximum below the minimum, an epsilon outside (0, 1], a window below 1,
    a negative omega, an unknown policy or gain; where a layer travels under another compressor, or none is up for
    choice.
    Source: Tyagi and Swany 2023, Algorithm 1, sections III-C, IV-B, IV-C. Differs: the decision for a step uses gains
    up to the step before, so that no round is added; theta_min is promoted before theta_c is scaled; medians over a
    window, since omega is below the noise of single steps; gains and times are those of all ranks. The authors' code
    keeps one residual per factor and one average of ||g||; here there is one residual, and the average is of the steps
    in which the factor was measured. The first step is dense: no gain is known then.
    """

    name: ClassVar[str] = "gravac"

    minimum: float = 10
    maximum: float = 1000
    epsilon: float = 0.7
    window: int = 500
    omega: float = 0.01
    policy: str = "exponential"
    per_layer: bool = False
    gain: str = NORM

    def __post_init__(self) -> None:
        for name in ("minimum", "maximum", "epsilon", "omega"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise ConfigError(f"{name} must be a finite number, got {value!r}")
        if self.minimum < 1:
            raise ConfigError(f"minimum is a compression factor of at least 1, got {self.minimum!r}")
        if self.maximum < self.minimum:
            raise ConfigError(f"maximum must be at least the minimum {self.minimum!r}, got {self.maximum!r}")
        if not 0 < self.epsilon <= 1:
            raise ConfigError(f"epsilon must be in (0, 1], got {self.epsilon!r}")
        check_count("window", self.window)
        if self.omega < 0:
            raise ConfigError(f"omega must not be negative, got {self.omega!r}")
        if self.policy not in POLICIES:
            raise ConfigError(f"policy must be one of {', '.join(POLICIES)}, got {self.policy!r}")
        if self.gain not in GAINS:
            raise ConfigError(f"gain must be one of {', '.join(GAINS)}, got {self.gain!r}")
        if not isinstance(self.per_layer, bool):
            raise ConfigError(f"per_layer must be true or false, got {self.per_layer!r}")

    @property
    def by_times(self) -> bool:
        """Yes: by the seconds of iterations."""
        return True

    @property
    def candidates(self) -> tuple[float, ...]:
        """The factors that are tried, ascending, from the minimum to the maximum."""
        found, exponent = [float(self.minimum)], 1
        while found[-1] < self.maximum:
            found.append(min(self.minimum * 2.0 ** min(exponent, 1023), float(self.maximum)))
            exponent = 2 * exponent if self.policy == "exponential" else exponent + 1
        return tuple(found)

    def begin(self, environment: Environment) -> ControllerRun:
        """See :class:`gradcomp.control.gravac_run.GraVACRun`."""
        rows = len(environment.controlled) if self.per_layer else 1
        factors = (1.0, *(factor for factor in self.candidates if factor > 1))
        first = factors.index(float(self.minimum))
        search = Search(
            factors,
            first,
            environment.world,
            rows,
            epsilon=self.epsilon,
            window=self.window,
            omega=self.omega,
            by_norm=self.gain == NORM,
        )
        return GraVACRun(self.name, environment, search, self.per_layer)
