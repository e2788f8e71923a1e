"""The factors in memory: each tensor's are read once, and only as many tensors' as there is room for."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from fuselora.engine.lanes import POLL_SECONDS
from fuselora.engine.threads import FACTOR_ELEMENTS

if TYPE_CHECKING:
    from fuselora.engine.kernel import Loaded
    from fuselora.engine.lanes import Flow
    from fuselora.steps import Fuse


class Held:
    """Gives the blocks their factors, in order; they are held until the last block that has them lets go.

    A block waits while earlier ones hold so much that there would be more than ``FACTOR_ELEMENTS``.
    One that needs more by itself gets it when no other is left.
    """

    def __init__(self, load: Callable[[Fuse], Loaded], flow: Flow) -> None:
        self._load, self._flow = load, flow
        self._latest: dict[str, Loaded] = {}  # of the last block: a tensor may go on in the next
        self._count = _Count()

    def take(self, steps: Iterable[Fuse]) -> Mapping[str, Loaded]:
        """base_key -> what a block needs, for the next one. Raises ``Stopped``, and what loading raises."""
        wanted = {step.base_key: step for step in steps}
        self._latest = {key: loaded for key, loaded in self._latest.items() if key in wanted}
        kept = sum(loaded.step.factor_elements for loaded in self._latest.values())
        new = [step for key, step in wanted.items() if key not in self._latest]
        most = FACTOR_ELEMENTS - sum(step.factor_elements for step in new)
        self._count.await_at_most(max(kept, most), self._flow)
        self._latest |= {step.base_key: self._counted(step) for step in new}
        return self._latest

    def _counted(self, step: Fuse) -> Loaded:
        loaded, elements = self._load(step), step.factor_elements
        self._count.change(elements)
        weakref.finalize(loaded, self._count.change, -elements)
        return loaded


class _Count:
    """Elements in memory."""

    def __init__(self) -> None:
        self._elements = 0
        self._changed = threading.Condition()  # its lock can be taken again: an end may come at any place

    def change(self, elements: int) -> None:
        with self._changed:
            self._elements += elements
            self._changed.notify_all()

    def await_at_most(self, elements: int, flow: Flow) -> None:
        with self._changed:
            while self._elements > elements:
                self._changed.wait(POLL_SECONDS)
                flow.check()
