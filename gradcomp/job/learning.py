"""Compressors that learn: where they are refused."""

from __future__ import annotations

from gradcomp.compress import Policy
from gradcomp.core.config import Config
from gradcomp.core.errors import ConfigError
from gradcomp.kernels.devices import HOST, Device


def refusal(config: Config, policy: Policy, device: Device = HOST, step: int = 0) -> ConfigError | None:
    """Why a compressor cannot learn what it has to; None if it can, or none does.

    ``device``: of the gradients. ``step``: the one in which it would begin.
    """
    learning = [c for c in policy.compressors if c.traits.learns]
    why = ""
    if not learning:
        return None
    if device.driver is not None:
        why = "it works on gradients in the host's memory, not on a GPU"
    elif step and any(c.at_step(step).traits.learns for c in learning):
        why = f"its steps are counted from step 0, and this is step {step}: wrap it in gc.Warmup(..., steps={step})"
    elif config.deterministic and any(c.traits.by_times for c in learning):
        why = (
            "deterministic=True: the share of its training is found by measured times: set train_share to 1/m"
        )
    return ConfigError(f"{learning[0].to_string()}: {why}") if why else None
