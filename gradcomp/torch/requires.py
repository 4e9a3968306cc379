"""Raises an error that names the extra to install where PyTorch is missing; imported first."""

from gradcomp.core.requires import need

need("gradcomp.torch", "torch", "torch")
