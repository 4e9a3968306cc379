"""The installed version of gradcomp."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("gradcomp")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"
