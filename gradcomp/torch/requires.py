"""Raises an error that names the extra to install where PyTorch is missing; imported first."""

from gradcomp.core.errors import need

need("gradcomp.torch", "torch", "torch")
