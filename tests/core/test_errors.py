"""What ``except`` clauses of scripts catch."""

import pickle

import pytest

from gradcomp.core import errors

KINDS = sorted(
    {
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, errors.GradcompError)
    },
    key=lambda kind: kind.__name__,
)


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_is_a_runtime_error_and_horovods_internal_error(kind: type[Exception]) -> None:
    with pytest.raises(RuntimeError, match=r"^rank 1 did this$"):
        raise kind("rank 1 did this")
    with pytest.raises(errors.HorovodInternalError):
        raise kind("rank 1 did this")


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_keeps_its_class_and_its_text_through_a_pickle(kind: type[Exception]) -> None:
    back = pickle.loads(pickle.dumps(kind("rank 1 did this")))
    assert type(back) is kind
    assert str(back) == "rank 1 did this"


@pytest.mark.parametrize(
    ("kind", "also"),
    [
        (errors.ConfigError, ValueError),
        (errors.WireFormatError, ValueError),
        (errors.TransportError, ConnectionError),
        (errors.MissingNameError, AttributeError),
    ],
)
def test_an_error_is_python_s_own_kind_too(kind: type[Exception], also: type[Exception]) -> None:
    with pytest.raises(also):
        raise kind("rank 1 did this")
