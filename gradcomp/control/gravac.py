"""GraVAC chooses the compression factor of the next step from the gains of two factors in this step."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from gradcomp.compress import Compressor
from gradcomp.compress.checks import (
    check_flag,
    check_number,
    check_positive,
    check_whole,
    check_word,
    is_number,
)
from gradcomp.compress.policy import assign
from gradcomp.compress.sparse import two_level_selection as selection
from gradcomp.compress.sparse.base import elements_at
from gradcomp.control.base import Controller, ControllerRun, Doubles, Environment, Numbers, Step
from gradcomp.control.gravac_gains import (
    FORMS,
    GRADIENT,
    KEPT,
    KEPT_BY_CANDIDATE,
    NORM,
    SHARED,
    TOTAL,
    UNBOUNDED,
)
from gradcomp.control.gravac_search import Search, SearchState
from gradcomp.core.errors import ConfigError, StateError
from gradcomp.core.plan import Assignment, Plan
from gradcomp.core.run_lines import Account, Factor, Gains
from gradcomp.core.vectors import Floats
from gradcomp.kernels.step import Observations

logger = logging.getLogger("gradcomp")

#: The name of the only row where the whole model has one.
MODEL = "*"

#: The kind of state under which a rank keeps the seconds that it has not shared yet.
_SECONDS = "seconds"

#: The sums begin with this many numbers: seconds of an iteration, and the count of ranks that know theirs.
_TIMES = 2

#: theta_min, theta_c and the sent factor, as indices of factors.
Choice = tuple[int, int, int]


@dataclass
class GraVACState:
    """The saved state. ``untimed``: the factors by row of the last two iterations. ``layers``: the controlled layers.

    ``gain``: the form of the search's gains as :class:`gradcomp.control.gravac_gains.Form` names it.
    """

    search: SearchState
    untimed: list[dict[str, float] | None]
    in_force: bool
    layers: list[str]
    gain: str | None = None


class GraVACRun(ControllerRun):
    """The run of :class:`gradcomp.control.GraVAC` on one rank.

    Step s sums its own norms, and the seconds of iteration s - 2, which each rank knows once step s - 1 has ended: the
    two latest iterations are not timed yet. ``search`` holds gains, factors and their throughputs.
    """

    def __init__(
        self, name: str, environment: Environment, search: Search, per_layer: bool, gain: str
    ) -> None:
        super().__init__(name, environment)
        self.search = search
        self._gain = gain
        self.form = FORMS[gain]
        for layer in environment.controlled:
            compressor = environment.compressors[layer]
            assert compressor is not None, "the layer is up for choice"
            self.form.check(compressor, environment.layers[layer].name)
        self._layers = np.array(environment.controlled, dtype=np.int64)
        names = self._layer_names = [environment.layers[i].name for i in self._layers.tolist()]
        self._names = names if per_layer else [MODEL]
        self._row_of = np.arange(len(names)) if per_layer else np.zeros(len(names), dtype=np.int64)
        self._known: dict[tuple[int, Choice], tuple[Compressor, Assignment]] = {}
        self._ended = False  # true if a window ended with the last step
        self._in_force = False  # true once the plan has the current choices
        self._seconds = 0.0  # seconds of the last iteration but one, on this rank; 0 if not known
        # The factors that the last two iterations sent, None if they do not count.
        self._untimed: list[Numbers | None] = []
        self._vector: Doubles = np.zeros(0)
        self._number = 0
        self._summed: Doubles = np.zeros((len(SHARED), len(self._names)))  # the norms of that step
        self._accounted = 0  # steps that counted when the account was given
        self._choose()  # raises ConfigError for layers with another compressor

    @property
    def notable(self) -> bool:
        """Returns true at the end of a window; within a window plans alternate too often for the log."""
        return self._ended

    # -- a step ------------------------------------------------------------------------------------------------

    def observe(self, observations: Observations) -> None:
        """Sums the norms, or the squared norms, of the layers of every row."""
        sums = self.form.sums(observations, self._layers, self._row_of, len(self._names))
        self._vector = np.concatenate([[self._seconds, float(self._seconds > 0)], sums.reshape(-1)])

    def contribution(self, step: int) -> Doubles | None:
        """Returns the seconds, 1 if they are known, and four numbers per row."""
        return self._vector

    def finish(self, step: Step) -> bool:
        """Records times and gains, and chooses for the next step."""
        assert step.sums is not None, "every rank contributed"
        seconds, known = step.sums[:_TIMES].tolist()
        if len(self._untimed) == 2 and known == self.environment.world and self._untimed[0] is not None:
            self.search.time(seconds / known, self._untimed[0])
        # A checkpoint stores it as float32.
        self._seconds = float(np.float32(step.seconds))
        # Iterations before the first gain do not count: their factor was not chosen, and the first ones are slow.
        self._untimed = [*self._untimed, self.search.sent if self.search.taken else None][-2:]
        least, candidate = self.search.minimum.copy(), self.search.candidate.copy()
        before = self.search.sent
        sums = step.sums[_TIMES:].reshape(len(SHARED), -1)
        self._ended = self.search.step(*self.form.compared(sums))
        if np.isfinite(sums).all():
            self._number, self._summed = step.number, sums
        if self._ended:
            self.reason = self._account(step.number, least, candidate)
        now = self.search.minimum, self.search.candidate, self.search.sent
        changed = not self._in_force or not np.array_equal((least, candidate, before), now)
        self._in_force = True
        if changed:
            self._choose()
        return changed

    def _account(self, step: int, least: Numbers, candidate: Numbers) -> str:
        """Describes the result of a window for the first row, and counts the others."""
        search = self.search
        gains, factors = search.gains[0], search.factors
        speeds = zip(factors, search.throughput[0].tolist(), strict=True)
        measured = [f"{factor:g}x {speed:.4g}" for factor, speed in speeds if not math.isnan(speed)]
        more = f", and {len(self._names) - 1} more" if len(self._names) > 1 else ""
        return (
            f"window ends at step {step}: {self._names[0]}{more}: "
            f"gains {gains[least[0]]:.3f} at {factors[least[0]]:g}x, {gains[candidate[0]]:.3f} at "
            f"{factors[candidate[0]]:g}x; throughputs {', '.join(measured) or 'unknown'}; "
            f"now {factors[search.minimum[0]]:g}x to {factors[search.candidate[0]]:g}x"
        )

    # -- choices -----------------------------------------------------------------------------------------------

    def _choose(self) -> None:
        search = self.search
        columns = (search.minimum.tolist(), search.candidate.tolist(), search.sent.tolist())
        by_row: list[Choice] = list(zip(*columns, strict=True))
        rows = zip(self._layers.tolist(), self._row_of.tolist(), strict=True)
        self._chosen = {layer: self._made(layer, by_row[row]) for layer, row in rows}
        self.choices = {layer: compressor for layer, (compressor, _) in self._chosen.items()}

    def _made(self, layer: int, choice: Choice) -> tuple[Compressor, Assignment]:
        """Returns a layer's compressor and assignment for a choice; cached, as plans alternate between few choices."""
        if (layer, choice) not in self._known:
            least, candidate, sent = choice
            send = selection.CANDIDATE if sent == candidate else selection.MINIMUM
            send = send if sent else selection.DENSE
            own, factors = self.environment.compressors[layer], self.search.factors
            assert own is not None, "the layer is up for choice"
            made = selection.select_twice(own, 1 / factors[least], 1 / factors[candidate], send)
            name = self.environment.layers[layer].name
            self._known[layer, choice] = made, assign(name, made)
        return self._known[layer, choice]

    def plan(self, before: Plan) -> Plan:
        """Returns the same plan as the base class, from assignments that are made once."""
        rows = list(before.assignments)
        for layer, (_, assignment) in self._chosen.items():
            rows[layer] = assignment
        return Plan(before.version + 1, tuple(rows))

    # -- accounts ----------------------------------------------------------------------------------------------

    def account(self) -> Account:
        """Returns the search of every row; with ``per_layer`` only at the end of a window, as there are many."""
        search = self.search
        if search.taken == self._accounted or (len(self._names) > 1 and not self._ended):
            return ()
        self._accounted = search.taken
        gains, epsilon = search.gains, search.epsilon
        found = []
        for row, name in enumerate(self._names):
            norms = [float(f"{norm:.5g}") for norm in self._summed[:, row].tolist()]
            columns = (gains[row], search.throughput[row], search.steps[row])
            factors = tuple(
                Factor(factor, _finite(gain), _finite(speed), int(steps))
                for factor, gain, speed, steps in zip(search.factors, *columns, strict=True)
            )
            least, candidate = (search.factors[k[row]] for k in (search.minimum, search.candidate))
            post = norms[KEPT], norms[KEPT_BY_CANDIDATE]
            found.append(
                Gains(
                    self._number,
                    name,
                    epsilon,
                    least,
                    candidate,
                    norms[GRADIENT],
                    post,
                    factors,
                    norms[TOTAL],
                )
            )
        return found

    @property
    def steps_by_factor(self) -> dict[float, int]:
        """Returns the number of steps that sent each factor, 1 being dense; ``per_layer`` counts each layer's steps."""
        steps = self.search.steps.sum(axis=0).tolist()
        return {factor: n for factor, n in zip(self.search.factors, steps, strict=True) if n}

    @property
    def floats_sent(self) -> int:
        """Returns the values that this rank has sent since it began, without indices: the paper's measure."""
        return int((self._floats * self.search.steps[self._row_of]).sum())

    @property
    def dense_floats(self) -> int:
        """Returns the values that it would have sent if every step had been dense."""
        return int((self._floats[:, 0] * self.search.steps[self._row_of].sum(axis=1)).sum())

    @cached_property
    def _floats(self) -> Numbers:
        """Returns the number of values by layer and factor."""
        sizes = np.array([self.environment.layers[i].size for i in self._layers.tolist()], dtype=np.int64)
        counts = [elements_at(1 / factor, sizes) for factor in self.search.factors]
        return np.stack(counts, axis=1)

    # -- state -------------------------------------------------------------------------------------------------

    @property
    def state(self) -> GraVACState:
        """Returns the search, and the factors of iterations that are not timed yet."""
        factors = self.search.factors
        untimed = [
            None if sent is None else {n: factors[k] for n, k in zip(self._names, sent.tolist(), strict=True)}
            for sent in self._untimed
        ]
        found = self.search.state(self._names)
        return GraVACState(found, untimed, self._in_force, self._layer_names, self.form.saved)

    def own_state(self) -> dict[str, dict[str, Floats]]:
        """Returns the seconds of the last iteration but one."""
        return {_SECONDS: {self._layer_names[0]: np.array([self._seconds], dtype=np.float32)}}

    def adopt(self, saved: GraVACState, own: Mapping[str, Mapping[str, Any]]) -> None:
        """Continues the saved search.

        New rows start anew, as do gains of another form, together with their throughputs. But a run that was saved when
        ``gain="norm"`` named the unbounded form goes on with that one: nothing that the user chose has changed.

        If the number of ranks changed, the seconds may be those of another rank.
        """
        search, there, warning = saved.search, saved.gain, ""
        of_before = there == UNBOUNDED.saved and self._gain == NORM
        self.form = UNBOUNDED if of_before else FORMS[self._gain]
        self.search.of_averages = self.form.of_averages
        if of_before:
            warning = (
                "it was saved when gain='norm' had no residual below the line: the run goes on with that form"
            )
        elif there != self.form.saved:
            names = {form.saved: name for name, form in FORMS.items()}
            warning = f"its gains are by {names.get(there, there)}, but gain={self._gain!r} is set: gains begin anew"
            search = replace(search, rows={name: row.without_gains() for name, row in search.rows.items()})
        if warning and self.environment.rank == 0:
            logger.warning("%s: of the checkpoint: %s", self.name, warning)
        try:
            self.search.restore(self._names, search)
        except ValueError as error:
            raise StateError(f"not a state of {self.name}: {error!r}") from error
        numbers = self.search.numbers
        self._untimed = [
            np.array([numbers[one[name]] for name in self._names], dtype=np.int64)
            if one is not None and one.keys() == set(self._names) and set(one.values()) <= numbers.keys()
            else None
            for one in saved.untimed
        ]
        seconds = [float(value[0]) for value in own.get(_SECONDS, {}).values()]
        self._seconds = seconds[0] if seconds else 0.0
        # A plan for other layers has no choice for these.
        self._in_force = saved.in_force and saved.layers == self._layer_names
        self._choose()


def _finite(value: float) -> float | None:
    """Returns a number for the run log, which is short; None if it was not measured."""
    return float(f"{value:.5g}") if math.isfinite(value) else None


@dataclass(frozen=True)
class GraVAC(Controller):
    """Compresses as much as the gradients allow: each step sends the candidate factor, the minimum, or all values.

    p = g + e;  g_min = C(p, theta_min);  g_c = C(g_min, theta_c / theta_min), both in every step
    delta(theta) = EWMA of (sum ||g_theta|| / sum ||p||)        with ``gain="norm"``
                 = EWMA of (sum ||g_theta||^2 / sum ||p||^2)    with ``gain="energy"``, as printed
                 = EWMA of sum ||g_min|| / EWMA of sum ||g||    with ``gain="released"``, as in the authors' code, for
                                                                the candidate too
    sums over ranks and layers, averages per factor
    the next step sends g_c if delta(theta_c) >= epsilon, else g_min if delta(theta_min) >= epsilon, else p
    T(theta) = delta(theta) x the median of N / iteration seconds over the window's steps that sent theta; delta(1) = 1

    Every ``window`` steps: theta_min <- theta_c if their gains are within ``omega``, relative to delta(theta_min); then
    theta_c <- the next candidate; then, if the two largest T are within ``omega``, theta_c <- theta_ideal, the lower
    factor of the two, and theta_min <- min(theta_min, theta_ideal).

    A factor theta is a density of 1 / theta; a factor of 1 is dense. Candidates end at ``maximum``; they are
    ``minimum`` x 2^(0, 1, 2, 4, 8, ...) with ``policy="exponential"`` (10, 20, 40, 160, 1000), and
    ``minimum`` x 2^(0, 1, 2, 3, ...) with ``"geometric"`` (10, 20, ..., 1280, 2000 for a ``maximum`` of 2000, for
    which the paper's window is 2000). A gain by norm or energy lies in [0, 1]. One of the released form may be any
    number, since p has the residual and g has not.

    The compressor must select by density on every rank: TopK, DGC, RedSync, SIDCo, and RandomK and RandomBlock unless
    they are ``scaled``; also inside of ErrorFeedback, MomentumCorrection and LocalClip. Its own density is not used. A
    random selection's gain by norm is about 1 / sqrt(theta): with an epsilon of 0.7 no theta above 2 is sent.

    Args:
        minimum: the lowest compression factor, at least 1.
        maximum: the highest compression factor.
        epsilon: the gain that a factor must have to be sent, in (0, 1].
        window: steps between two changes of theta_min and theta_c.
        omega: relative difference below which two gains, or two throughputs, count as equal.
        policy: ``"exponential"`` or ``"geometric"``.
        per_layer: decides for every layer separately, with the iteration time of the model.
        gain: ``"norm"``, ``"energy"`` or ``"released"``.

    Wire: as :class:`gradcomp.compress.TwoLevelSelection`, and one sum of 6 float64 a step with the last exchange
    bucket (2 + 4 per layer with ``per_layer``).

    State: two averages, T and a count per factor, and a window of seconds.

    Errors: ConfigError for a minimum below 1, a maximum below the minimum, an epsilon outside (0, 1], a window below 1,
    a negative omega, an unknown policy or gain; if a layer uses another compressor, or a random selection by energy; or
    if no layer is controlled.

    Source: Tyagi and Swany 2023, Algorithm 1, sections III-C, IV-B, IV-C.
    Differences: the decision for a step uses gains up to the step before, so that no round is added; theta_min is
    promoted before theta_c is scaled; medians over a window are compared, since omega is below the noise of single
    steps; gains and times are those of all ranks. The default gain is the printed one without the squares: a tenth of
    the elements of a ResNet-20's gradient has half of its energy, so that no useful epsilon would ever be met. The
    authors' code keeps one residual per factor and one average of ||g||; here there is one residual, and the average is
    of the steps in which the factor was measured. The first step is dense, because no gain is known then.
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
        for name in ("minimum", "maximum"):
            check_positive(name, getattr(self, name))
        if self.minimum < 1:
            raise ConfigError(f"minimum is a compression factor of at least 1, got {self.minimum!r}")
        if self.maximum < self.minimum:
            raise ConfigError(f"maximum must be at least the minimum {self.minimum!r}, got {self.maximum!r}")
        check_number("epsilon", self.epsilon, "(0, 1]")
        check_whole("window", self.window)
        if not is_number(self.omega) or not 0 <= self.omega < math.inf:
            raise ConfigError(f"omega must be a finite number of at least 0, got {self.omega!r}")
        check_word("policy", self.policy, ("exponential", "geometric"))
        check_word("gain", self.gain, tuple(FORMS))
        check_flag("per_layer", self.per_layer)

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

    def search(self, world: int, rows: int) -> Search:
        """Returns a new search over the candidates, for ``rows`` rows."""
        factors = (1.0, *(factor for factor in self.candidates if factor > 1))
        first, of_averages = factors.index(float(self.minimum)), FORMS[self.gain].of_averages
        return Search(factors, first, world, rows, self.epsilon, self.window, self.omega, of_averages)

    def begin(self, environment: Environment) -> ControllerRun:
        rows = len(environment.controlled) if self.per_layer else 1
        search = self.search(environment.world, rows)
        return GraVACRun(self.name, environment, search, self.per_layer, self.gain)
