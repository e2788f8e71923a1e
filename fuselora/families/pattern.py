"""Names with a number in them: ``{n}`` in a pattern stands for one, as in ``blocks.{n}.attn1.to_q``.

``{rest}`` stands for anything, and is for the end of a pattern.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache

Shapes = Mapping[str, tuple[int, ...]]
LEAVES = ("weight", "bias")
NUMBER = re.compile(r"(?<![^.])[0-9]{1,9}(?![^.])")
FLAT_NUMBER = re.compile(r"(?<![^_])[0-9]{1,9}(?![^_])")


@cache
def compiled(pattern: str) -> re.Pattern[str]:
    """The pattern as an expression whose groups are its numbers, of nine digits at most."""
    escaped = re.escape(pattern).replace(r"\{n\}", r"([0-9]{1,9})")
    return re.compile(escaped.replace(r"\{rest\}", r"(.+)"))


@cache
def any_of(patterns: tuple[str, ...]) -> re.Pattern[str]:
    """One expression that fits what any of the patterns fits."""
    return re.compile("|".join(compiled(pattern).pattern for pattern in patterns))


def filled(pattern: str, values: tuple[str, ...]) -> str:
    """The name that a pattern makes of the values of another's groups."""
    return pattern.replace("{n}", "{}").replace("{rest}", "{}").format(*values)


def unnumbered(pattern: str) -> str:
    """A pattern with ``{n}`` for its literal numbers too."""
    return NUMBER.sub("{n}", pattern)


def unnumbered_flat(pattern: str) -> str:
    """The same of a pattern in which every dot became an underscore."""
    return FLAT_NUMBER.sub("{n}", pattern)


def form_of(name: str) -> str:
    """A name with ``{n}`` for every number between dots, as a pattern for it has; its own braces are none."""
    return NUMBER.sub("{n}", name.replace("{", "{{"))


def flat_form_of(name: str) -> str:
    """The same of a name in which every dot became an underscore."""
    return FLAT_NUMBER.sub("{n}", name.replace("{", "{{"))


def split_leaf(name: str) -> tuple[str, str]:
    """A tensor's module, and its ``.weight`` or ``.bias``; another name is a parameter's own."""
    stem, dot, leaf = name.rpartition(".")
    return (stem, dot + leaf) if leaf in LEAVES else (name, "")


class Patterns:
    """Patterns that a name is looked up among, in a time that does not grow with their number.

    ``{n}`` and ``{rest}`` in them stand for whole parts between dots, or between underscores where
    ``unnumber`` is ``unnumbered_flat``.
    """

    def __init__(self, patterns: Sequence[str], unnumber: Callable[[str], str] = unnumbered) -> None:
        self._expressions = tuple(map(compiled, patterns))
        self._whole: dict[str, list[int]] = {}
        self._begun: list[tuple[str, int]] = []
        for n, pattern in enumerate(patterns):
            start, rest, _ = pattern.partition("{rest}")
            if rest:
                self._begun.append((unnumber(start), n))
            else:
                self._whole.setdefault(unnumber(pattern), []).append(n)

    def find(self, name: str, form: str) -> tuple[int, tuple[str, ...]] | None:
        """The number of the first pattern that fits the whole name, and what its placeholders stand for.

        ``form`` is the name's ``form_of`` or ``flat_form_of``.
        """
        for n in self._like(form):
            if found := self._expressions[n].fullmatch(name):
                return n, found.groups()
        return None

    def _like(self, form: str) -> Iterable[int]:
        """The patterns that a name of this form can fit, in their order."""
        whole = self._whole.get(form, ())
        begun = [n for start, n in self._begun if form.startswith(start)] if self._begun else ()
        return sorted((*whole, *begun)) if begun else whole
