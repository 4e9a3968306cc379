"""Typed errors: everything gradcomp raises on purpose derives from :class:`GradcompError`.

The page ``docs/errors.md`` says for each what the caller may still do.
"""

from importlib.util import find_spec


class GradcompError(RuntimeError):
    """Base of every error that gradcomp raises on purpose.

    It is a RuntimeError, which scripts catch around collectives of torch.distributed and Horovod.
    """


class ConfigError(GradcompError, ValueError):
    """An argument, a setting or the launch environment is wrong; nothing was started."""


class PlanMismatchError(GradcompError):
    """The ranks disagree about layers, compression, settings or version."""


class TransportError(GradcompError, ConnectionError):
    """A peer died, stalled past the deadline, or the job was aborted; the exchanger is unusable."""


class WireFormatError(GradcompError, ValueError):
    """Bytes from a peer are not what the protocol allows at this point."""


class DeviceError(GradcompError):
    """A GPU failed, or its memory is full; the exchanger is unusable."""


#: Elastic scripts restart after ``except hvd.HorovodInternalError``, so that name catches every error of gradcomp.
HorovodInternalError = GradcompError


class HostsUpdatedInterrupt(GradcompError):  # noqa: N818 - Horovod's name
    """Processes wait to join an elastic job: :func:`gradcomp.torch.elastic.run` catches it and takes them in."""


class MissingNameError(GradcompError, AttributeError):
    """A name of Horovod's that gradcomp does not have; the message says what to use instead."""


class StateError(GradcompError):
    """The call is not allowed now (step open, not initialised, layer after its step closed, ranks drifted)."""


def need(package: str, extra: str, *modules: str) -> None:
    """Raises ModuleNotFoundError that names the extra to install, if one of the modules is missing."""
    for module in modules:
        if not is_there(module):
            raise ModuleNotFoundError(
                f"{package} needs {module}, which is not installed: pip install 'gradcomp[{extra}]'",
                name=module,
            )


def is_there(module: str) -> bool:
    """Returns True if a module is installed, without importing it."""
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):  # a finder hides it, it is partly imported, or a mock has no spec
        return False
