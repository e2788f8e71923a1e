"""What tells the published models of a family apart, by canonical names and shapes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fuselora.families.pattern import Shapes, any_of, compiled, split_leaf


@dataclass(frozen=True, slots=True)
class Kin:
    """Published models that share one set of names and shapes.

    ``models`` are whole models; of each of ``expert_of`` this is one of two experts. ``witnesses``
    maps a canonical tensor name to its shape: -1 for any size, () for "is absent".
    """

    models: tuple[str, ...]
    expert_of: tuple[str, ...]
    blocks: int
    witnesses: Mapping[str, tuple[int, ...]]

    def named(self, n_experts: int) -> tuple[str, ...]:
        if n_experts > 1:
            return self.expert_of
        return (*self.models, *(f"{model} (one expert)" for model in self.expert_of))


@dataclass(frozen=True, slots=True)
class Measure:
    """A size that a LoRA's deltas show: ``shown_by`` maps an axis to canonical tensor patterns.

    ``witness`` is the tensor and axis by which a ``Kin`` states the same size.
    """

    name: str
    witness: tuple[str, int]
    shown_by: Mapping[int, tuple[str, ...]]

    def of(self, shapes: Shapes) -> frozenset[int]:
        """Every size that tensors of these shapes show; more than one when they disagree."""
        found = ((axis, any_of(patterns)) for axis, patterns in self.shown_by.items())
        return frozenset(
            shape[axis]
            for axis, pattern in found
            for name, shape in shapes.items()
            if len(shape) > axis and pattern.fullmatch(name)
        )

    def allows(self, sizes: frozenset[int], kin: Kin) -> bool:
        tensor, axis = self.witness
        stated = kin.witnesses.get(tensor, ())[axis : axis + 1]
        return stated in ((), (-1,)) or sizes <= frozenset(stated)


@dataclass(frozen=True, slots=True)
class Branch:
    """Modules (canonical patterns) that some models of a family have; those have the tensor ``witness``."""

    name: str
    modules: tuple[str, ...]
    witness: str

    def is_in(self, names: Iterable[str]) -> bool:
        """Whether tensors of these names have any of it."""
        pattern = any_of(self.modules)
        return any(pattern.fullmatch(split_leaf(name)[0]) for name in names)

    def allows(self, present: bool, kin: Kin) -> bool:
        return not present or kin.witnesses.get(self.witness) != ()


@dataclass(frozen=True, slots=True)
class SkipRule:
    """LoRA modules (canonical patterns) that a base may lack without harm.

    They are an explained skip only when the base's tensor ``witness`` (a canonical name) has one of
    ``sizes`` along ``axis``; on any other base they stay unmatched, grouped under ``reason``.
    """

    reason: str
    modules: tuple[str, ...]
    witness: str
    axis: int
    sizes: tuple[int, ...]

    def covers(self, module: str) -> bool:
        return any(compiled(pattern).fullmatch(module) for pattern in self.modules)

    def covers_flat(self, module: str) -> bool:
        """The same for a kohya name, in which every dot is an underscore."""
        return any(compiled(pattern.replace(".", "_")).fullmatch(module) for pattern in self.modules)

    def harmless(self, shapes: Shapes) -> bool:
        shape = shapes.get(self.witness, ())
        return len(shape) > self.axis and shape[self.axis] in self.sizes
