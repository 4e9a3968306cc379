"""What every frontend promises: the same bad arguments are refused in the same words, and a step makes the same means.

A frontend is a class derived from :class:`FrontendContract`; ``tests/torch/test_frontends.py`` and
``tests/tf/test_frontends.py`` have them and run the :func:`cases` of each on two ranks.
"""

from __future__ import annotations

import tempfile
from typing import Any, ClassVar

import numpy as np
import pytest

import gradcomp
from gradcomp.core.errors import ConfigError, PlanMismatchError
from gradcomp.job import runtime
from gradcomp.job.process_sets import ProcessSet
from gradcomp.job.reduce_op import Average, Sum

#: Shapes of the model's two layers.
SHAPES = ((6, 4), (5,))
Arrays = list[np.ndarray]


class FrontendContract:
    """One way to exchange the gradients of a model with two parameters, which are zero."""

    name: ClassVar[str]
    #: ``gradcomp.torch`` or ``gradcomp.tf``.
    gc: ClassVar[Any]
    #: The arguments that the wrapper has beside ``compression`` and ``controller``.
    takes: ClassVar[tuple[str, ...]] = ()
    #: Those of them of which any value but the default is an error.
    only_default: ClassVar[tuple[str, ...]] = ()
    #: Those of them that all ranks must have alike.
    compared: ClassVar[set[str]] = {"op", "sparse_as_dense", "gradient_predivide_factor"}

    def make_model(self) -> None:
        """Make the parameters."""
        raise NotImplementedError

    def wrap(self, compression: Any = "none", **arguments: Any) -> None:
        """Call the wrapper; a tape checks the rest at its first gradient, which is a part of this."""
        raise NotImplementedError

    def step(self, *passes: Arrays) -> None:
        """Take one step of these gradients, one list of them for each backward pass."""
        raise NotImplementedError

    def means(self) -> Arrays:
        """The gradients with which the last step was taken."""
        raise NotImplementedError

    def save(self, path: str) -> None:
        self.gc.save(path, self.state)

    def load(self, path: str) -> None:
        self.gc.load(path, self.state)


#: By name: a bad argument, its value, and the text of the ConfigError.
BAD: dict[str, tuple[str, Any, str]] = {
    "compressor": ("compression", "quantise:bits=4", "unknown compression 'quantise'"),
    "bits": ("compression", "quantize:bits=9", "1 to 8"),
    "field": ("compression", "quantize:bit=4", "field one of"),
    "twice": ("compression", "quantize:bits=4,bits=4", "twice"),
    "no compression": ("compression", 4, "compression must be"),
    "no controller": ("controller", 4, "controller must be a controller such as"),
    "controller's class": ("controller", gradcomp.LGreCo, "controller must be a controller such as"),
    "controller": ("controller", "nonsense", "controller 'nonsense'"),
    "op": ("op", "average", "op must be"),
    "no passes": (
        "backward_passes_per_step",
        0,
        "backward_passes_per_step must be a whole number of at least 1",
    ),
    "half a pass": ("backward_passes_per_step", 1.5, "backward_passes_per_step must be a whole number"),
    "a boolean": ("backward_passes_per_step", True, "backward_passes_per_step must be a whole number"),
    "predivide": ("gradient_predivide_factor", 0.0, "gradient_predivide_factor must be positive"),
    "negative": ("gradient_predivide_factor", -2.0, "gradient_predivide_factor must be positive"),
    "not a number": ("gradient_predivide_factor", float("nan"), "gradient_predivide_factor must be positive"),
    "reduction": ("reduction", "rings", "no reduction is named 'rings' .did you mean 'ring'"),
    "servers": ("reduction", "parameter_server:servers=0", "servers must be a whole number of at least 1"),
    "dedicated": ("reduction", "parameter_server:servers=1,dedicated=true", "parameter_server:servers=k"),
    "skips": ("on_skip", "never", 'on_skip must be "raise" or "agree"'),
    "finish": ("finish", "later", 'finish must be "backward", "step" or "forward"'),
    "layers": ("layers", 0, "layers must be True or False"),
    "residuals": ("residuals", "bfloat16", "residuals='bfloat16': this setting was removed; .* float32"),
    "process set": ("process_set", 3, "process_set must be a ProcessSet"),
    "group": ("groups", -1, "groups must be"),
    "groups": ("groups", "2", "groups must be"),
    "scaler": ("grad_scaler", True, "grad_scaler must be a torch.amp.GradScaler, None or False"),
    "scaler's name": ("grad_scaler", "auto", "grad_scaler must be a torch.amp.GradScaler, None or False"),
}


def refuses(frontend: FrontendContract, case: str) -> None:
    """The bad argument is a ConfigError on every rank; the checks that follow show that the job goes on."""
    argument, value, text = BAD[case]
    frontend.make_model()
    with pytest.raises(ConfigError, match=text):
        frontend.wrap(**{argument: value})


#: By name: what ``layers=False`` does not take, and the text of the ConfigError.
BY_LAYER: dict[str, tuple[dict[str, Any], str]] = {
    "policy": ({"compression": gradcomp.Policy(gradcomp.Quantize(4))}, "takes one compressor.*got Policy"),
    "auto": ({"compression": "auto"}, "takes one compressor.*got 'auto'"),
    "controller": ({"compression": "quantize", "controller": "lgreco"}, "nothing to a controller"),
    "residual": ({"compression": "quantize:rounding=nearest"}, "keeps no residual"),
    "nothing": ({"compression": "none"}, "takes a quantiser"),
}


def refuses_without_layers(frontend: FrontendContract, case: str) -> None:
    arguments, text = BY_LAYER[case]
    frontend.make_model()
    with pytest.raises(ConfigError, match=text):
        frontend.wrap(layers=False, **arguments)


def joins_layers(frontend: FrontendContract) -> None:
    """Both layers share one scale on all ranks; after a change of compression too, and when a run resumes."""
    directory = frontend.gc.broadcast_object(tempfile.mkdtemp(prefix="gradcomp-test-"))
    means = []
    for first in (0, 3):
        frontend.make_model()
        frontend.wrap("quantize:bits=2", layers=False)
        if first:
            frontend.load(directory)
        for step in range(first, 6):
            frontend.step(own(step))
            means.append(np.concatenate([mean.reshape(-1) for mean in frontend.means()]))
            if step == 2:
                frontend.save(directory)
            if step == 3:
                frontend.state.set_compression("quantize:bits=3")
    for step, mean in enumerate(means[:6]):
        wanted = np.concatenate([layer.reshape(-1) for layer in over_ranks(step, runtime.size())])
        assert np.unique(mean).size <= 4 or (step == 5 and np.unique(mean).size <= 8)
        assert 0 < np.abs(mean - wanted).max() < 4
    assert_equal(means[6:], means[3:6])
    everyone = frontend.gc.allgather_object(b"".join(mean.tobytes() for mean in means))
    assert len(set(everyone)) == 1


def refuses_on_one_rank(frontend: FrontendContract) -> None:
    """A bad argument on one rank is told to the others, and the job goes on."""
    last = runtime.rank() == runtime.size() - 1
    frontend.make_model()
    with pytest.raises(
        ConfigError if last else PlanMismatchError,
        match="controller must be" if last else r"rank 1 failed: ConfigError.*controller must be",
    ):
        frontend.wrap(controller=4 if last else None)
    steps(frontend)


def refuses_factor_without_average(frontend: FrontendContract) -> None:
    frontend.make_model()
    with pytest.raises(ConfigError, match="needs op=Average"):
        frontend.wrap(op=Sum, gradient_predivide_factor=2.0)


#: Another value of what all ranks must have alike.
ALIKE = {
    "backward_passes_per_step": 2,
    "finish": "step",
    "sparse_as_dense": True,
    "gradient_predivide_factor": 2.0,
    "on_skip": "agree",
    "op": Sum,
}


def refuses_what_differs(frontend: FrontendContract, argument: str) -> None:
    """An argument that differs between ranks is an error on all, which names it."""
    frontend.make_model()
    with pytest.raises(PlanMismatchError, match="average" if argument == "op" else argument):
        frontend.wrap(**({argument: ALIKE[argument]} if runtime.rank() else {}))


def refuses_compression_that_differs(frontend: FrontendContract) -> None:
    """The layer is named."""
    frontend.make_model()
    with pytest.raises(PlanMismatchError, match=r"compression of '.*4.*rank 1.*2"):
        frontend.wrap(policy(gradcomp.Quantize(2 if runtime.rank() else 4)))


def policy(compressor: Any) -> gradcomp.Policy:
    return gradcomp.Policy(compressor, filter=gradcomp.Filter(min_elements=1))


def own(step: int, rank: int | None = None) -> Arrays:
    """A rank's gradients in a step, whose sum over two ranks is rounded once and whose half is exact."""
    rank = runtime.rank() if rank is None else rank
    generator = np.random.default_rng([step, rank])
    return [generator.standard_normal(shape, np.float32) for shape in SHAPES]


def over_ranks(step: int, divisor: float) -> Arrays:
    everyone = [own(step, rank) for rank in range(runtime.size())]
    return [np.sum(layers, axis=0) / np.float32(divisor) for layers in zip(*everyone, strict=True)]


def assert_equal(means: Arrays, expected: Arrays) -> None:
    for mean, wanted in zip(means, expected, strict=True):
        np.testing.assert_array_equal(mean, wanted)


def steps(frontend: FrontendContract, divisor: float | None = None, **arguments: Any) -> None:
    """Two steps have the means of the ranks' gradients, or the sums divided by something else."""
    frontend.make_model()
    frontend.wrap(**arguments)
    for step in range(2):
        frontend.step(own(step))
        assert_equal(frontend.means(), over_ranks(step, divisor or runtime.size()))


#: By name: arguments with which two steps are exact, and the divisor of the sum, if not the number of ranks.
GOOD: dict[str, tuple[dict[str, Any], float | None]] = {
    "mean": ({}, None),
    "sum": ({"op": Sum}, 1.0),
    "predivided": ({"op": Average, "gradient_predivide_factor": 4.0}, None),
    "reduction": ({"reduction": "gather"}, None),
    "step": ({"finish": "step"}, None),
    "agreed": ({"on_skip": "agree"}, None),
    "set": ({"process_set": ProcessSet([0, 1])}, None),
}


def steps_with(frontend: FrontendContract, case: str) -> None:
    arguments, divisor = GOOD[case]
    steps(frontend, divisor, **arguments)


def sums_passes(frontend: FrontendContract) -> None:
    """The gradients of two passes are summed and exchanged once."""
    frontend.make_model()
    frontend.wrap(backward_passes_per_step=2)
    frontend.step(own(0), own(1))
    mine, theirs = ([a + b for a, b in zip(own(0, rank), own(1, rank), strict=True)] for rank in range(2))
    assert_equal(frontend.means(), [(a + b) / np.float32(2) for a, b in zip(mine, theirs, strict=True)])
    assert frontend.state.statistics().steps == 1


def resumes(frontend: FrontendContract) -> None:
    """What was saved after some steps gives another wrapper the same next means, bit for bit; a new one has others."""
    other, directory = (
        type(frontend)(),
        frontend.gc.broadcast_object(tempfile.mkdtemp(prefix="gradcomp-test-")),
    )
    feedback = policy(gradcomp.ErrorFeedback(gradcomp.Quantize(bits=2, rounding="nearest")))
    frontend.make_model()
    frontend.wrap(feedback)
    for step in range(3):
        frontend.step(own(step))
    frontend.save(directory)
    frontend.step(own(3))
    other.make_model()
    other.wrap(feedback)
    other.load(directory)
    other.step(own(3))
    assert_equal(other.means(), frontend.means())
    other.make_model()
    other.wrap(feedback)
    other.step(own(3))
    assert any(not np.array_equal(a, b) for a, b in zip(other.means(), frontend.means(), strict=True))


def cases(*frontends: type[FrontendContract]) -> list[tuple[str, str, str]]:
    """For each frontend the checks that concern it, as (frontend, check, case)."""
    found = []
    for one in frontends:
        takes = {"compression", "controller", *one.takes}
        free = takes - set(one.only_default)
        checks = {
            refuses: [case for case, (argument, _, _) in BAD.items() if argument in takes],
            steps_with: [case for case, (arguments, _) in GOOD.items() if free.issuperset(arguments)],
            refuses_what_differs: [argument for argument in ALIKE if argument in free & one.compared],
            refuses_factor_without_average: [""] * ("op" in takes),
            sums_passes: [""] * ("backward_passes_per_step" in takes),
            refuses_without_layers: list(BY_LAYER),
        }
        checks |= {
            each: [""]
            for each in (refuses_on_one_rank, refuses_compression_that_differs, resumes, joins_layers)
        }
        found += [(one.name, c.__name__, case) for c, named in checks.items() for case in named]
    return found


def check(frontend: FrontendContract, name: str, case: str) -> None:
    globals()[name](frontend, *filter(None, [case]))
