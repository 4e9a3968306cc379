"""The arguments that all wrappers of optimizers, hooks and tapes have in common, and their check."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from gradcomp.compress import Compression, Compressor, Flat, Policy, as_policy
from gradcomp.compress.policy import resolve
from gradcomp.control import Controller
from gradcomp.core.errors import ConfigError
from gradcomp.core.layers import Filter
from gradcomp.core.scheme import parse
from gradcomp.job.process_sets import Members
from gradcomp.job.reduce_op import Average, ReduceOp, Sum

OnSkip = Literal["raise", "agree"]

#: Excludes no layer from compression.
_EVERY_LAYER = Filter(exclude_kinds=(), min_elements=0, min_dimensions=0)


@dataclass(frozen=True)
class Arguments:
    """The arguments of a wrapper; a frontend adds its own in a subclass.

    ``on_skip`` selects what happens when a rank skips a step that others take. ``"raise"``: all ranks raise an error.
    ``"agree"``: the ranks vote before each step. With ``layers=False`` an exchange bucket is compressed as one vector,
    see :class:`gradcomp.Flat`. ``sensitivity`` measures the training loss, with a class of the frontend. ``compared``
    names the fields that must be equal on all ranks.
    """

    compared: ClassVar[tuple[str, ...]] = ("sparse_as_dense", "gradient_predivide_factor")

    compression: Policy | Compressor | str = Compression.none
    backward_passes_per_step: int = 1
    op: ReduceOp = Average
    gradient_predivide_factor: float = 1.0
    sparse_as_dense: bool = False
    process_set: Members = field(default=None, compare=False)
    reduction: str | None = None
    controller: Controller | str | None = None
    on_skip: OnSkip = "raise"
    layers: bool = True
    sensitivity: Any = None

    def check(self) -> Policy:
        """Return the policy; raise ConfigError for arguments that cannot work with any layers."""
        if self.op not in (Average, Sum):
            raise ConfigError(f"op must be Average or Sum, got {self.op!r}")
        predivide = self.gradient_predivide_factor
        if not predivide > 0 or (predivide != 1.0 and self.op is not Average):
            raise ConfigError(
                "gradient_predivide_factor must be positive, and needs op=Average if it is not 1"
            )
        if self.reduction is not None:
            parse(self.reduction)
        self.check_passes()
        if self.on_skip not in ("raise", "agree"):
            raise ConfigError(f'on_skip must be "raise" or "agree", got {self.on_skip!r}')
        if type(self.layers) is not bool:
            raise ConfigError(f"layers must be True or False, got {self.layers!r}")
        if not self.layers and self.controller is not None:
            raise ConfigError("layers=False leaves nothing to a controller, which chooses levels by layer")
        return self.policy_of(self.compression)

    def policy_of(self, compression: Policy | Compressor | str) -> Policy:
        """Return the policy of a ``compression`` argument; with ``layers=False`` it makes no difference by layer."""
        if self.layers:
            return as_policy(compression)
        if isinstance(compression, Policy) or compression == "auto":
            raise ConfigError(
                "layers=False compresses all layers alike, so it takes one compressor, such as quantize:bits=4, and "
                f"no policy or controller, got {compression!r:.80}"
            )
        chosen = resolve(compression)
        return Policy(chosen if isinstance(chosen, Flat) else Flat(chosen), filter=_EVERY_LAYER)

    def check_passes(self) -> None:
        passes = self.backward_passes_per_step
        if type(passes) is not int or passes < 1:
            raise ConfigError(
                f"backward_passes_per_step must be a whole number of at least 1, got {passes!r}"
            )
