"""Measures how much information the gradients of different ranks share: ``docs/information.md``."""

from gradcomp.contrib.information import (
    Information,
    entropy,
    gaussian_information,
    gaussian_pair,
    mutual_information,
    total_information,
)
from gradcomp.contrib.information_plane import Plane, information_plane
from gradcomp.contrib.recording import Recording, read

__all__ = [
    "Information",
    "Plane",
    "Recording",
    "entropy",
    "gaussian_information",
    "gaussian_pair",
    "information_plane",
    "mutual_information",
    "read",
    "total_information",
]
