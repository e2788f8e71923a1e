"""Every marker that a merge writes in a test run is held against the schema, in each of its processes.

``conftest`` installs this before any test module is imported, so that whoever builds a marker builds it
here. Nothing touches the file system: tests that count its steps count the same.
"""

from __future__ import annotations

import json
from functools import wraps
from typing import TYPE_CHECKING, Any

from fuselora import record
from fuselora.marker import encode
from tests.marked import validator

if TYPE_CHECKING:
    from collections.abc import Callable

SHOWN = 5


def install() -> None:
    """From now on ``record.marker_document`` raises ``AssertionError`` for a document that is not valid."""
    validator()
    record.marker_document = _checked(record.marker_document)


def assert_valid(document: dict[str, Any]) -> None:
    """``document`` is what the schema describes."""
    errors = sorted(validator().iter_errors(document), key=lambda error: error.json_path)
    assert not errors, "\n".join(f"{error.json_path}: {error.message}" for error in errors[:SHOWN])


def _checked(make: Callable[..., dict[str, object]]) -> Callable[..., dict[str, object]]:
    @wraps(make)
    def checked(*arguments: Any, **options: Any) -> dict[str, object]:
        document = make(*arguments, **options)
        assert_valid(json.loads(encode(document)))
        return document

    return checked
