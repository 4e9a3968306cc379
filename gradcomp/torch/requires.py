"""Imported first: says which extra to install where PyTorch is missing."""

from gradcomp.core.requires import need

need("gradcomp.torch", "torch", "torch")
