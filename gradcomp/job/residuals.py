"""Refuses residuals in bfloat16 where they cannot be kept."""

from __future__ import annotations

from gradcomp.compress import Policy
from gradcomp.compress.wrappers.base import Wrapper
from gradcomp.compress.wrappers.ef21 import EF21
from gradcomp.core.config import Config
from gradcomp.core.errors import ConfigError
from gradcomp.kernels.devices import HOST, Device


def refusal(config: Config, policy: Policy, device: Device = HOST) -> ConfigError | None:
    """Return why residuals cannot be kept as the settings say, or None if they can. ``device`` holds the gradients."""
    why = ""
    if config.residuals == "float32":
        return None
    if device.driver is not None:
        why = "gradients on a GPU have their residuals there, in float32"
    elif _estimates(policy):
        why = f"{policy.title} keeps estimates of gradients, no residuals, and those are float32"
    return ConfigError(f"residuals={config.residuals!r}: {why}; leave residuals at float32") if why else None


def _estimates(policy: Policy) -> bool:
    """Return whether EF21 compresses a layer in any step."""
    for compressor in policy.compressors:
        for step in (0, *compressor.changes):
            inner = compressor.at_step(step)
            while isinstance(inner, Wrapper):
                if isinstance(inner, EF21):
                    return True
                inner = inner.inner
    return False
