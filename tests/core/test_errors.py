"""What ``except`` clauses of scripts catch."""

import pickle

import pytest

from gradcomp.core import errors

KINDS = [
    kind for kind in vars(errors).values() if isinstance(kind, type) and kind.__module__ == errors.__name__
]
PYTHONS = {
    errors.ConfigError: ValueError,
    errors.WireFormatError: ValueError,
    errors.TransportError: ConnectionError,
    errors.MissingNameError: AttributeError,
}


@pytest.mark.parametrize("kind", sorted(set(KINDS), key=lambda kind: kind.__name__))
def test_every_error_is_caught_as_horovods_and_keeps_class_and_text_through_a_pickle(
    kind: type[Exception],
) -> None:
    assert issubclass(kind, errors.HorovodInternalError)
    assert issubclass(kind, RuntimeError)
    assert issubclass(kind, PYTHONS.get(kind, RuntimeError))
    back = pickle.loads(pickle.dumps(kind("rank 1 did this")))
    assert type(back) is kind
    assert str(back) == "rank 1 did this"
