"""A diffusers model class as data: the tensors that it makes of a config.json, and where a base differs.

A dimension is a product such as ``6*heads*head_dim``; its factors are numbers, fields of the config, or
one entry of a list in it: ``patch_size.0``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from fuselora.families.pattern import Shapes, compiled

MAX_BLOCKS = 10_000  # every one is a dozen tensors to lay out; published models have less than a hundred


@dataclass(frozen=True, slots=True)
class Row:
    """Tensors by native name. ``{n}`` in it counts up to the field ``count``, a number or a list's length.

    With ``when`` the class has them only if that field of the config is set.
    """

    name: str
    shape: tuple[str, ...]
    when: str | None = None
    count: str | None = None


class Difference(NamedTuple):
    """One way in which a base is not what a config says; ``field`` is None where no field explains it."""

    field: str | None
    text: str


class BadFieldError(ValueError):
    """A field of a config that its class cannot use; the text says which."""


@dataclass(frozen=True, slots=True)
class ModelClass:
    """One class. ``defaults`` are its own; ``instead`` names the field that stands in for one that is null.

    ``alike`` are fields of a native config.json and those that mean the same here: what no shape shows.
    ``numbers`` are lists of block numbers, from 0 upwards, and the field that says how many blocks there are.
    """

    name: str
    rows: tuple[Row, ...]
    defaults: Mapping[str, object]
    instead: Mapping[str, str]
    alike: Mapping[str, str]
    numbers: Mapping[str, str]

    def shapes(self, config: Mapping[str, object]) -> dict[str, tuple[int, ...]]:
        """Every tensor of a model with this config, by native name. Raises ``BadFieldError``."""
        return {name: expected.shape for name, expected in _Model(self, config).tensors().items()}

    def differences(
        self, config: Mapping[str, object], base: Shapes, base_config: Mapping[str, object]
    ) -> Iterator[Difference]:
        """What a base of these native names and shapes has otherwise than ``config`` says.

        One field is said to differ once, however many tensors show it. Raises ``BadFieldError``.
        """
        model = _Model(self, config)
        comparison = _comparison(model, base)
        first: dict[str | None, Difference] = {}
        for found in chain(
            comparison.counts(), comparison.switches(), comparison.sizes(), model.unlike(base_config)
        ):
            first.setdefault(found.field, found)
        yield from first.values()
        yield from (*comparison.ranks(), *comparison.missing(), *comparison.unexpected())


class _Expected(NamedTuple):
    row: Row
    number: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Model:
    """A class with one config."""

    kind: ModelClass
    config: Mapping[str, object]

    def value(self, field: str) -> object:
        found = self.config.get(field, self.kind.defaults.get(field))
        stand_in = self.kind.instead.get(field)
        return self.value(stand_in) if found is None and stand_in else found

    def is_on(self, row: Row) -> bool:
        return row.when is None or self.value(row.when) not in (None, False)

    def tensors(self) -> dict[str, _Expected]:
        return {
            row.name.replace("{n}", str(number)): _Expected(row, number, tuple(map(self.size, row.shape)))
            for row in self.kind.rows
            if self.is_on(row)
            for number in range(self.n(row.count) if row.count else 1)
        }

    def size(self, product: str) -> int:
        return math.prod(map(self._factor, product.split("*")))

    def n(self, field: str) -> int:
        """A number of blocks, or how many of them a list names. Raises ``BadFieldError`` for too many."""
        found = self.value(field)
        number = len(found) if isinstance(found, list) else self._factor(field)
        if number > MAX_BLOCKS:
            many = f"a list of {number}" if isinstance(found, list) else str(number)
            raise BadFieldError(f"{field} is {many}, which {self.kind.name} cannot use")
        if field in self.kind.numbers:
            self._check_numbers(field, found)
        return number

    def _check_numbers(self, field: str, found: object) -> None:
        n_blocks = self.n(self.kind.numbers[field])
        whole = [n for n in found if type(n) is int] if isinstance(found, list) else []
        if (
            not whole
            or whole != found
            or whole != sorted(set(whole))
            or whole[0] != 0
            or whole[-1] >= n_blocks
        ):
            must = f"it must name blocks in order, from 0 and below {n_blocks}"
            raise BadFieldError(f"{field} is {_json(found)}: {must}")

    def unlike(self, native: Mapping[str, object]) -> Iterator[Difference]:
        """What a native config.json says otherwise."""
        for theirs, ours in self.kind.alike.items():
            wanted, held = self.value(ours), native.get(theirs)
            if isinstance(held, (int, float, list)) and held != wanted:
                text = f"{ours} is {_json(wanted)}, but the base's own config.json has {theirs} {_json(held)}"
                yield Difference(ours, text)

    def _factor(self, factor: str) -> int:
        if factor.isdecimal():
            return int(factor)
        field, _, place = factor.partition(".")
        found = self.value(field)
        if place and isinstance(found, (list, tuple)) and len(found) > int(place):
            found = found[int(place)]
        if type(found) is not int or not 0 <= found < 1 << 31:
            raise BadFieldError(f"{field} is {_json(self.value(field))}, which {self.kind.name} cannot use")
        return found


@dataclass(frozen=True, slots=True)
class _Comparison:
    """Tensors that a config asks for beside those of a base.

    ``held`` is by ``count`` field one more than the highest number of its blocks in the base, and
    ``present`` by ``when`` field the first tensor of the base that is there only if it is set.
    """

    model: _Model
    expected: Mapping[str, _Expected]
    base: Shapes
    held: Mapping[str, int]
    present: Mapping[str, str]

    def counts(self) -> Iterator[Difference]:
        for field, held in self.held.items():
            wanted = self.model.n(field)
            if wanted != held:
                row = next(row for row in self.model.kind.rows if row.count == field)
                blocks = row.name.partition("{n}")[0] + "*"
                yield Difference(field, f"{field} makes {wanted} blocks, but the base has {held} ({blocks})")

    def switches(self) -> Iterator[Difference]:
        """Branches that only one side has."""
        for row in self.model.kind.rows:
            if row.when is None:
                continue
            value, found = _json(self.model.value(row.when)), self.present.get(row.when)
            if found and not self.model.is_on(row):
                yield Difference(row.when, f"{row.when} is {value}, but the base has {found}")
            elif not found and self.model.is_on(row):
                name = row.name.replace("{n}", "0")
                yield Difference(row.when, f"{row.when} is {value}, but the base has no {name}")

    def sizes(self) -> Iterator[Difference]:
        for name, (row, _, shape) in self.expected.items():
            held = self.base.get(name, shape)
            for product, wanted, size in zip(row.shape, shape, held, strict=False):
                if wanted != size and len(held) == len(shape):
                    text = f"{product.replace('*', ' * ')} is {wanted}, but the base's {name} has {size}"
                    yield Difference(_fields(product), text)

    def ranks(self) -> Iterator[Difference]:
        for name, (_, _, shape) in self.expected.items():
            held = self.base.get(name, shape)
            if len(held) != len(shape):
                yield Difference(None, f"{name} is {list(held)}, and should be {list(shape)}")

    def missing(self) -> Iterator[Difference]:
        for name, (row, number, _) in self.expected.items():
            beyond = row.count is not None and number >= self.held[row.count]
            absent = row.when is not None and row.when not in self.present
            if name not in self.base and not beyond and not absent:
                yield Difference(None, f"the base has no {name}")

    def unexpected(self) -> Iterator[Difference]:
        for name in self.base:
            if name not in self.expected and not self._explained(name):
                yield Difference(None, f"{self.model.kind.name} has no place for {name}")

    def _explained(self, name: str) -> bool:
        """A tensor that the class has, but that this config switches off or whose block it does not reach."""
        for row, number in _matches(self.model.kind.rows, name):
            beyond = row.count is not None and number >= self.model.n(row.count)
            return beyond or not self.model.is_on(row)
        return False


def _comparison(model: _Model, base: Shapes) -> _Comparison:
    rows = model.kind.rows
    held = dict.fromkeys((row.count for row in rows if row.count), 0)
    present: dict[str, str] = {}
    for name in base:
        for row, number in _matches(rows, name):
            if row.count:
                held[row.count] = max(held[row.count], number + 1)
            if row.when:
                present.setdefault(row.when, name)
    return _Comparison(model, model.tensors(), base, held, present)


def _matches(rows: Sequence[Row], name: str) -> Iterator[tuple[Row, int]]:
    """The rows that speak of a tensor, each with the number that stands for ``{n}``."""
    for row in rows:
        if found := compiled(row.name).fullmatch(name):
            yield row, int(found[1]) if found.groups() else 0


def _fields(product: str) -> str:
    """What stands for a product's fields where differences are counted."""
    return " ".join(sorted({f.partition(".")[0] for f in product.split("*") if not f.isdecimal()}))


def _json(value: object) -> str:
    return json.dumps(value, default=str)


def in_blocks(rows: Iterable[Row], blocks: str, count: str) -> tuple[Row, ...]:
    """The rows of one block as those of ``count`` blocks, whose names begin with ``blocks``."""
    return tuple(Row(f"{blocks}.{{n}}.{row.name}", row.shape, row.when, count) for row in rows)


def linear(module: str, out: str, into: str, *, when: str | None = None) -> tuple[Row, Row]:
    """Weight (out, in) and bias (out) of a linear layer."""
    return Row(f"{module}.weight", (out, into), when), Row(f"{module}.bias", (out,), when)


def norm(module: str, size: str, *, when: str | None = None) -> tuple[Row, Row]:
    """Weight and bias of a layer norm."""
    return Row(f"{module}.weight", (size,), when), Row(f"{module}.bias", (size,), when)
