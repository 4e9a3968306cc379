"""GraVAC chooses the compression factor of the next step from the gains of two factors in this step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from gradcomp.control.base import Controller, ControllerRun, Environment
from gradcomp.control.checks import check_count
from gradcomp.control.gravac_run import ENERGY, NORM, GraVACRun
from gradcomp.control.gravac_search import Search
from gradcomp.core.errors import ConfigError

#: Rules by which candidate factors grow.
POLICIES = ("exponential", "geometric")

#: Definitions of the gain.
GAINS = (NORM, ENERGY)


@dataclass(frozen=True)
class GraVAC(Controller):
    """Compresses as much as the gradients allow: each step sends the candidate factor, the minimum, or all values.

    p = g + e;  g_min = C(p, theta_min);  g_c = C(g_min, theta_c / theta_min), both in every step
    delta(theta) = EWMA of sum ||g_theta|| / EWMA of sum ||g||      with ``gain="norm"``, as in the authors' code
                 = EWMA of (sum ||g_theta||^2 / sum ||p||^2)        with ``gain="energy"``, as printed
    sums over ranks and layers, averages per factor
    the next step sends g_c if delta(theta_c) >= epsilon, else g_min if delta(theta_min) >= epsilon, else p
    T(theta) = delta(theta) x the median of N / iteration seconds over the window's steps that sent theta; delta(1) = 1

    Every ``window`` steps: theta_min <- theta_c if their gains are within ``omega``, relative to delta(theta_min); then
    theta_c <- the next candidate; then, if the two largest T are within ``omega``, theta_c <- theta_ideal, the lower
    factor of the two, and theta_min <- min(theta_min, theta_ideal).

    A factor theta is a density of 1 / theta; a factor of 1 is dense. Candidates end at ``maximum``; they are
    ``minimum`` x 2^(0, 1, 2, 4, 8, ...) with ``policy="exponential"`` (10, 20, 40, 160, 1000), and
    ``minimum`` x 2^(0, 1, 2, 3, ...) with ``"geometric"`` (10, 20, ..., 1280, 2000 for a ``maximum`` of 2000, for
    which the paper's window is 2000). The selection of p may have a larger norm than g, so a gain by norm may exceed 1.
    A gain by energy cannot; it is about 0.5 at 10x on a ResNet-20, below any useful threshold, so nothing is ever
    compressed with it.

    The compressor must select by density on every rank: TopK, DGC, RedSync, SIDCo, also inside of ErrorFeedback,
    MomentumCorrection and LocalClip. Its own density is not used. RandomK cannot work: its selection from p depends on
    theta alone, whatever the gradients are.

    Args:
        minimum: the lowest compression factor, at least 1.
        maximum: the highest compression factor.
        epsilon: the gain that a factor must have to be sent, in (0, 1].
        window: steps between two changes of theta_min and theta_c.
        omega: relative difference below which two gains, or two throughputs, count as equal.
        policy: ``"exponential"`` or ``"geometric"``.
        per_layer: decides for every layer separately, with the iteration time of the model.
        gain: ``"norm"`` or ``"energy"``.

    Wire: as :class:`gradcomp.compress.TwoLevelSelection`, and one sum of 5 float64 a step beside the last exchange
    bucket (2 + 3 per layer with ``per_layer``).

    State: two averages, T and a count per factor, and a window of seconds.

    Errors: ConfigError for a minimum below 1, a maximum below the minimum, an epsilon outside (0, 1], a window below 1,
    a negative omega, an unknown policy or gain; if a layer uses another compressor, or no layer is controlled.

    Source: Tyagi and Swany 2023, Algorithm 1, sections III-C, IV-B, IV-C.
    Differences: the decision for a step uses gains up to the step before, so that no round is added; theta_min is
    promoted before theta_c is scaled; medians over a window are compared, since omega is below the noise of single
    steps; gains and times are those of all ranks. The authors' code keeps one residual per factor and one average of
    ||g||; here there is one residual, and the average is of the steps in which the factor was measured. The first step
    is dense, because no gain is known then.
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
        return True

    @property
    def candidates(self) -> tuple[float, ...]:
        """Returns the factors to try, ascending, from the minimum to the maximum."""
        found, exponent = [float(self.minimum)], 1
        while found[-1] < self.maximum:
            found.append(min(self.minimum * 2.0 ** min(exponent, 1023), float(self.maximum)))
            exponent = 2 * exponent if self.policy == "exponential" else exponent + 1
        return tuple(found)

    def begin(self, environment: Environment) -> ControllerRun:
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
