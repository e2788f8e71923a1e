"""The shape of a family's data, and the questions it answers: whose name, which layout, what kin.

A pattern is a dotted name as in ``families.pattern``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from fuselora.families.model_class import ModelClass
from fuselora.families.pattern import Shapes, any_of, compiled

Layout = Literal["native", "diffusers"]
LEAVES = ("weight", "bias")


@dataclass(frozen=True, slots=True)
class SkipRule:
    """LoRA modules (native patterns) that a base may lack without harm.

    They are an explained skip only when the base's tensor ``witness`` (a native name) has one of
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

    def harmless(self, native_shapes: Shapes) -> bool:
        shape = native_shapes.get(self.witness, ())
        return len(shape) > self.axis and shape[self.axis] in self.sizes


@dataclass(frozen=True, slots=True)
class Kin:
    """Published models that share one set of names and shapes.

    ``models`` are whole models; of each of ``expert_of`` this is one of two experts. ``witnesses``
    maps a native tensor name to its shape: -1 for any size, () for "is absent".
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
    """A size that a LoRA's deltas show: ``shown_by`` maps an axis to native tensor patterns.

    ``witness`` is the tensor and axis by which a ``Kin`` states the same size.
    """

    name: str
    witness: tuple[str, int]
    shown_by: Mapping[int, tuple[str, ...]]

    def of(self, native: Shapes) -> frozenset[int]:
        """Every size that tensors of these shapes show; more than one when they disagree."""
        found = ((axis, any_of(patterns)) for axis, patterns in self.shown_by.items())
        return frozenset(
            shape[axis]
            for axis, pattern in found
            for name, shape in native.items()
            if len(shape) > axis and pattern.fullmatch(name)
        )

    def allows(self, sizes: frozenset[int], kin: Kin) -> bool:
        tensor, axis = self.witness
        stated = kin.witnesses.get(tensor, ())[axis : axis + 1]
        return stated in ((), (-1,)) or sizes <= frozenset(stated)


@dataclass(frozen=True, slots=True)
class Branch:
    """Modules (native patterns) that some models of a family have; those have the tensor ``witness``."""

    name: str
    modules: tuple[str, ...]
    witness: str

    def is_in(self, native: Iterable[str]) -> bool:
        """Whether tensors of these names have any of it."""
        pattern = any_of(self.modules)
        return any(pattern.fullmatch(_split_leaf(name)[0]) for name in native)

    def allows(self, present: bool, kin: Kin) -> bool:
        return not present or kin.witnesses.get(self.witness) != ()


@dataclass(frozen=True, slots=True)
class FewStep:
    """Published few-step LoRAs, known by their name, and how those who made them sample.

    ``pattern`` is searched for in a file's, folder's or repository's name, case aside. ``source`` says
    where the values are published; one that is not, or not as one number, is None. ``remark`` is what
    none of the fields can say.
    """

    name: str
    pattern: str
    source: str
    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    flow_shift: float | None = None
    solver: str | None = None
    remark: str | None = None


class Renames:
    """(native, diffusers) patterns of modules and bare parameters, compiled for both directions."""

    def __init__(self, rows: tuple[tuple[str, str], ...]) -> None:
        self.rows = rows
        native, diffusers = [row[0] for row in rows], [row[1] for row in rows]
        self._patterns: dict[Layout, re.Pattern[str]] = {
            "native": _numbered(native),
            "diffusers": _numbered(diffusers),
        }
        self._flat: dict[Layout, re.Pattern[str]] = {
            "native": _numbered([name.replace(".", "_") for name in native]),
            "diffusers": _numbered([name.replace(".", "_") for name in diffusers]),
        }
        self._spellings: dict[Layout, list[str]] = {"native": native, "diffusers": diffusers}

    def translate(self, stem: str, to: Layout) -> str:
        """A name of the other layout as ``to`` spells it; unchanged if no row speaks of it."""
        found = self._patterns[_OTHER[to]].fullmatch(stem)
        return self._spelled(found, to) if found else stem

    def dotted(self, flat: str) -> str | None:
        """A name in which every dot became an underscore, as the row that fits it spells it."""
        for layout, pattern in self._flat.items():
            if found := pattern.fullmatch(flat):
                return self._spelled(found, layout)
        return None

    def only_in(self, stem: str) -> Layout | None:
        """The one layout that uses this name; None when both do, or neither."""
        native = self._patterns["native"].fullmatch(stem) is not None
        diffusers = self._patterns["diffusers"].fullmatch(stem) is not None
        if native == diffusers:
            return None
        return "native" if native else "diffusers"

    def _spelled(self, found: re.Match[str], to: Layout) -> str:
        """The row that ``found`` fits, with its numbers, as ``to`` spells it."""
        assert found.lastgroup is not None and found.lastindex is not None
        spelling = self._spellings[to][int(found.lastgroup[1:])]
        numbers = [number for number in found.groups()[found.lastindex :] if number is not None]
        return spelling.replace("{n}", "{}").format(*numbers)


@dataclass(frozen=True, slots=True)
class Family:
    """One model family.

    ``signature``: patterns of tensors, in any layout, of which one is enough to recognise it.
    ``renames``: names that the layouts spell differently. ``block``: the native pattern whose count
    is the number of blocks. ``keep_float32``: name segments (diffusers spelling) that the model class
    keeps in float32. ``experts``: component -> role, for families that come as two experts.
    ``measures`` and ``branches``: what tells the models apart by a LoRA alone. ``few_step``: of the rows
    that fit a name the first counts. ``boundary_ratios``: model -> the part of the noise schedule, from
    the end, that is the second expert's. ``classes``: diffusers' classes of these models.
    """

    name: str
    signature: tuple[str, ...]
    renames: Renames
    block: str
    keep_float32: frozenset[str]
    experts: Mapping[str, str]
    skips: tuple[SkipRule, ...]
    kin: tuple[Kin, ...]
    measures: tuple[Measure, ...] = ()
    branches: tuple[Branch, ...] = ()
    few_step: tuple[FewStep, ...] = ()
    boundary_ratios: Mapping[str, float] = field(default_factory=dict)
    classes: tuple[ModelClass, ...] = ()

    def recognises(self, names: Iterable[str]) -> bool:
        signature = any_of(self.signature)
        return any(signature.fullmatch(name) for name in names)

    def translate(self, name: str, to: Layout) -> str:
        """A tensor or module name of the other layout as ``to`` spells it.

        Not for names that are spelled so already: Wan's ``norm2`` and ``norm3`` mean the opposite in
        each layout.
        """
        stem, leaf = _split_leaf(name)
        return self.renames.translate(stem, to) + leaf

    def layout_of(self, names: Iterable[str]) -> Layout | None:
        """The layout in which more of ``names`` are spelled; None when neither says anything."""
        votes = Counter(self.renames.only_in(_split_leaf(name)[0]) for name in names)
        if votes["native"] == votes["diffusers"]:
            return None
        return "native" if votes["native"] > votes["diffusers"] else "diffusers"

    def keeps_float32(self, name: str, layout: Layout | None) -> bool:
        """Whether the model class keeps this tensor of a checkpoint in ``layout`` in float32."""
        spelled = self.translate(name, "diffusers") if layout == "native" else name
        return not self.keep_float32.isdisjoint(spelled.split("."))

    def models_of(self, shapes: Shapes, n_experts: int = 1) -> tuple[str, ...]:
        """The published models that tensors of these names (any layout) and shapes belong to."""
        native = self.native_shapes(shapes)
        return tuple(model for kin in self.kin if self._is_kin(kin, native) for model in kin.named(n_experts))

    def native_shapes(self, shapes: Shapes) -> Shapes:
        """The same shapes by native names, whichever layout the names are in."""
        if self.layout_of(shapes) != "diffusers":
            return shapes
        return {self.translate(name, "native"): shape for name, shape in shapes.items()}

    def n_blocks(self, native_names: Iterable[str]) -> int:
        """How many blocks have a tensor among ``native_names``."""
        return len(self.block_numbers(native_names))

    def block_numbers(self, native_names: Iterable[str]) -> frozenset[int]:
        """The blocks that have a tensor among ``native_names``."""
        pattern = compiled(self.block)
        return frozenset(int(found.group(1)) for name in native_names if (found := pattern.match(name)))

    def kin_of_deltas(self, native: Shapes) -> tuple[Kin, ...]:
        """The models that have room for all deltas of a LoRA, given by native tensor names."""
        n_blocks = max(self.block_numbers(native), default=-1) + 1
        sizes = [(measure, measure.of(native)) for measure in self.measures]
        branches = [(branch, branch.is_in(native)) for branch in self.branches]
        return tuple(
            kin
            for kin in self.kin
            if n_blocks <= kin.blocks
            and all(measure.allows(shown, kin) for measure, shown in sizes)
            and all(branch.allows(present, kin) for branch, present in branches)
        )

    def kin_but_for(self, rule: SkipRule, native: Shapes) -> tuple[Kin, ...]:
        """The models that have room for all deltas but those that ``rule`` lets them lack."""
        rest = {name: shape for name, shape in native.items() if not rule.covers(_split_leaf(name)[0])}
        if len(rest) == len(native):
            return ()
        whole = self.kin_of_deltas(native)
        return tuple(k for k in self.kin_of_deltas(rest) if k not in whole and rule.harmless(k.witnesses))

    def few_step_named(self, name: str) -> FewStep | None:
        """The published few-step LoRA that a file, folder or repository of this name is.

        None if the name has words of its own beside: such a LoRA was made for a published one, or with it.
        """
        for row in self.few_step:
            found = re.search(row.pattern, name, re.IGNORECASE)
            if found:
                beside = re.findall("[a-z]+", f"{name[: found.start()]} {name[found.end() :]}".lower())
                return row if RELEASE_WORDS.issuperset(beside) else None
        return None

    def _is_kin(self, kin: Kin, native: Shapes) -> bool:
        if self.n_blocks(native) != kin.blocks:
            return False
        return all(_fits(native.get(name, ()), shape) for name, shape in kin.witnesses.items())


# Words that releases and their repacks put around a name; single letters are those of t2v, i2v, 14b, v1.1.
RELEASE_WORDS = frozenset((
    *"abeimnprtv", "wan", "ti", "high", "low", "noise", "lora", "loras", "rank", "bf", "fp", "fn", "scaled",
    "model", "models", "step", "steps", "cfg", "distill", "distilled", "adaptive", "resized", "dyno",
    "diffusers", "safetensors", "comfy", "comfyui", "lightx", "lightning", "kijai", "hf", "extracted",
    "quantile", "avg", "fro", "new", "moe", "seko", "fastvideo", "fastwan", "fullattn", "turbo", "quanhaol",
))  # fmt: skip
_OTHER: Mapping[Layout, Layout] = {"native": "diffusers", "diffusers": "native"}


def _fits(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    return len(shape) == len(wanted) and all(w in (-1, s) for s, w in zip(shape, wanted, strict=True))


def _split_leaf(name: str) -> tuple[str, str]:
    stem, dot, leaf = name.rpartition(".")
    return (stem, dot + leaf) if leaf in LEAVES else (name, "")


def _numbered(patterns: Sequence[str]) -> re.Pattern[str]:
    """One pattern that tells by its outermost group, ``r<row>``, which of ``patterns`` fits."""
    return re.compile("|".join(f"(?P<r{n}>{compiled(p).pattern})" for n, p in enumerate(patterns)))
