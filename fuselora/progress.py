"""How a long run tells what it is doing. The terminal draws it; a library call hears nothing by default."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager


class Progress(Protocol):
    """``phase`` announces a piece of work of ``n_bytes`` and yields what to call with the bytes done."""

    def phase(self, name: str, n_bytes: int) -> AbstractContextManager[Callable[[int], None]]: ...


class Silent:
    """Progress that nobody watches."""

    @contextmanager
    def phase(self, name: str, n_bytes: int) -> Iterator[Callable[[int], None]]:
        del name, n_bytes
        yield lambda done: None
