"""What ``describe`` finds, as frozen values: each has a title, rows for a table, and a JSON document."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fuselora.marker import FILE_NAME
from fuselora.plural import many, tally
from fuselora.serving_notes import NOTHING, ServingNotes, sentence

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from fuselora.check.report import CheckReport
    from fuselora.checkpoint import Container
    from fuselora.errors import Fault, FuseloraError
    from fuselora.families import Layout
    from fuselora.lora.sampling import Stated
    from fuselora.lora.scale import AlphaSource
    from fuselora.marker import ComponentRecord, LoraRecord, Marker

Row = tuple[str, str]
# What only reading the LoRA's data could tell.
PENDING = ("finite values", "all-zero modules")
# fields of a marker that its description repeats
REPEATED = ("created", "tool", "base", "layout", "skeleton", "serving", "policy", "warnings")
CUT = 100
SHOWN = 6
SOURCES: Mapping[AlphaSource, str] = {
    "tensor": "the file's tensors",
    "rs_lora": "the file's tensors, to be divided by sqrt(rank)",
    "alpha_scale": "the file's finished factors",
    "option": "--alpha",
    "adapter_config": "adapter_config.json",
    "metadata": "the file's metadata",
    "rank": "none stored: rank used",
}


@dataclass(frozen=True, slots=True)
class Scale:
    """Pairs alike in alpha: ``scale`` is alpha / rank (rsLoRA: its root), to be multiplied by strength."""

    alpha: float
    rank: int
    scale: float
    source: AlphaSource
    modules: int

    def document(self) -> dict[str, object]:
        return {
            "alpha": self.alpha,
            "rank": self.rank,
            "scale": self.scale,
            "source": self.source,
            "modules": self.modules,
        }

    @property
    def text(self) -> str:
        return (
            f"{self.alpha:g} ({SOURCES[self.source]}), rank {self.rank}: "
            f"scale {self.scale:g}, {many(self.modules, 'module')}"
        )


@dataclass(frozen=True, slots=True)
class Target:
    """What a LoRA can be for, told from its module names and delta shapes alone.

    ``models`` have room for all of it; ``also`` maps the reason that lets a group of its modules stay
    out to the models that have room for the rest. ``others``: families with the same names, and their models
    that have room. ``families``: those that it is for with equal right, ``family`` the first of them.
    ``trained_on``: where it says on which model -> what it says. ``sizes``: width, channels, as far as they
    show.
    ``branches``: the family's optional parts, and whether the LoRA has any of each. ``n_blocks``: the
    blocks of the models, None when these differ.
    """

    family: str | None = None
    families: tuple[str, ...] = ()
    layout: Layout | None = None
    models: tuple[str, ...] = ()
    also: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    others: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    sizes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    branches: Mapping[str, bool] = field(default_factory=dict)
    blocks: tuple[int, ...] = ()
    n_blocks: int | None = None
    trained_on: Mapping[str, str] = field(default_factory=dict)

    def document(self) -> dict[str, object]:
        return {
            "family": self.family,
            "families": list(self.families),
            "layout": self.layout,
            "models": list(self.models),
            "also": {reason: list(models) for reason, models in self.also.items()},
            "others": {family: list(models) for family, models in self.others.items()},
            "sizes": {name: list(sizes) for name, sizes in self.sizes.items()},
            "branches": dict(self.branches),
            "blocks": {"covered": list(self.blocks), "of": self.n_blocks},
            "trained_on": dict(self.trained_on),
        }

    def rows(self) -> Iterator[Row]:
        if self.family is None:
            yield "family", "unknown"
            return
        yield "family", f"{' or '.join(self.families)}, {self.layout or 'unknown'} names"
        yield "could be for", " or ".join(self.models) or "no published model of this size"
        for reason, models in self.also.items():
            yield "or, in part, for", f"{' or '.join(models)}; left out: {reason}"
        for family, models in self.others.items():
            yield f"or, of {family}, for", " or ".join(models)
        if self.sizes:
            yield "sizes", ", ".join(f"{name} {_some(sizes)}" for name, sizes in self.sizes.items())
        yield "blocks", self.blocks_text
        for name, present in self.branches.items():
            yield f"{name} branch", "present" if present else "absent"

    @property
    def blocks_text(self) -> str:
        """``1-39 of 40, without 0``."""
        if not self.blocks:
            return "none"
        if self.n_blocks is None:
            return ranges(self.blocks)
        absent = sorted(set(range(self.n_blocks)) - set(self.blocks))
        return f"{ranges(self.blocks)} of {self.n_blocks}" + (f", without {ranges(absent)}" if absent else "")


@dataclass(frozen=True, slots=True)
class LoraDescription:
    """A LoRA file or adapter folder: ``path`` as given, ``file`` the name of its weights.

    Counts are of modules, except ``unfused`` and ``n_tensors``; ``dtypes`` maps to bytes.
    ``named_experts`` (in its name) and ``named_components`` (in its keys) are hints. ``places`` are
    module names without prefix, the first number starred. ``serving`` is what it says by itself.
    """

    path: Path
    file: str
    config: str | None
    target: Target
    dialects: Mapping[str, int]
    adapter_names: tuple[str, ...]
    prefixes: Mapping[str, int]
    flattened: bool
    kinds: Mapping[str, int]
    places: Mapping[str, int]
    ranks: Mapping[int, int]
    scales: tuple[Scale, ...]
    dtypes: Mapping[str, int]
    n_tensors: int
    n_bytes: int
    named_experts: tuple[str, ...]
    named_components: tuple[str, ...]
    metadata: Mapping[str, str]
    unfused: Mapping[str, int]
    faults: tuple[Fault, ...]
    serving: ServingNotes = NOTHING
    published_alpha: Stated | None = None

    @property
    def title(self) -> str:
        what = f"a LoRA for {' or '.join(self.target.families) or 'no known family'}"
        return f"{self.path}: {what}{', as an adapter folder' if self.config else ''}"

    def document(self) -> dict[str, object]:
        return {
            "kind": "lora",
            "path": str(self.path),
            "file": self.file,
            "config": self.config,
            **self.target.document(),
            "dialects": dict(self.dialects),
            "adapter_names": list(self.adapter_names),
            "prefixes": dict(self.prefixes),
            "flattened": self.flattened,
            "modules": dict(self.kinds),
            "where": dict(self.places),
            "ranks": {str(rank): count for rank, count in self.ranks.items()},
            "scales": [scale.document() for scale in self.scales],
            "published_alpha": self.published_alpha.value if self.published_alpha else None,
            "dtypes": dict(self.dtypes),
            "tensors": self.n_tensors,
            "bytes": self.n_bytes,
            "expert": {"name": list(self.named_experts), "keys": list(self.named_components)},
            "metadata": dict(self.metadata),
            "serving": self.serving.document() or None,
            "unfused": dict(self.unfused),
            "faults": [{"kind": f.kind, "message": f.message, "key": f.key} for f in self.faults],
            "pending": list(PENDING),
        }

    def rows(self) -> tuple[Row, ...]:
        return (
            *self.target.rows(),
            *self._key_rows(),
            *self._scale_rows(),
            ("tensors", f"{self.n_tensors}, {_dtypes(self.dtypes)}"),
            ("file", f"{self.file}, {_bytes(self.n_bytes)}"),
            *self._expert_rows(),
            *(("trained on", cut(f"{text} ({where})")) for where, text in self._trained_on()),
            *(("to serve", reason) for reason in self.serving.reasons()),
            *((f"metadata {key}", cut(value)) for key, value in self.metadata.items()),
            *_fault_rows(self.faults, self.unfused),
            ("not read", ", ".join(PENDING)),
        )

    def _trained_on(self) -> Iterator[Row]:
        """What no row of the metadata says."""
        return ((where, text) for where, text in self.target.trained_on.items() if where not in self.metadata)

    def _key_rows(self) -> Iterator[Row]:
        yield "dialect", _counts(self.dialects)
        prefixes = {prefix or "no prefix": count for prefix, count in self.prefixes.items()}
        yield "prefix", _counts(prefixes) + (" (flattened names)" if self.flattened else "")
        if self.adapter_names:
            yield "adapter name", ", ".join(self.adapter_names)
        yield "modules", tally(self.kinds) or "none"
        yield from _place_rows(self.places)

    def _scale_rows(self) -> Iterator[Row]:
        if self.ranks:
            yield "rank", _ranks(self.ranks)
        for scale in self.scales[:SHOWN]:
            yield "alpha", scale.text
        if len(self.scales) > SHOWN:
            yield "alpha", f"... and {len(self.scales) - SHOWN} more"
        if self.published_alpha and any(scale.source == "rank" for scale in self.scales):
            yield "alpha", f"{self.published_alpha.value:g} is {self.published_alpha.origin}"

    def _expert_rows(self) -> Iterator[Row]:
        if self.named_experts:
            yield "expert", f"{' and '.join(self.named_experts)} noise, by its name"
        if self.named_components:
            yield "component", f"{' and '.join(self.named_components)}, by its keys"


@dataclass(frozen=True, slots=True)
class Fused:
    """What fused shards say: their fingerprints and components, and the LoRAs of the marker of these.

    ``marker`` is its path, None where none was found.
    """

    fingerprints: tuple[str, ...]
    marker: Path | None
    loras: tuple[LoraRecord, ...]
    components: tuple[str, ...] = ()

    def document(self) -> dict[str, object]:
        return {
            "fingerprints": list(self.fingerprints),
            "components": list(self.components),
            "marker": str(self.marker) if self.marker else None,
            "loras": [_lora_document(lora) for lora in self.loras],
        }

    def rows(self) -> Iterator[Row]:
        for fingerprint in self.fingerprints:
            yield "already fused", fingerprint
        if self.components:
            yield "a part of", ", ".join(self.components)
        yield from (("fused with", _lora_text(lora)) for lora in self.loras)
        if self.marker is None:
            yield "fused with", f"unknown: there is no {FILE_NAME} beside it"


@dataclass(frozen=True, slots=True)
class ComponentDescription:
    """One model of a checkpoint; ``dtypes`` maps to bytes, ``n_other`` counts tensors without the prefix.

    ``inner``: the text encoders that its file holds as well, and the prefix of each.
    """

    name: str
    role: str
    folder: str
    prefix: str
    n_tensors: int
    n_other: int
    n_bytes: int
    dtypes: Mapping[str, int]
    shards: tuple[str, ...]
    index: str | None
    strays: tuple[str, ...]
    config_class: str | None
    sample: str | None
    inner: Mapping[str, str]

    def document(self) -> dict[str, object]:
        return {
            "name": self.name,
            "role": self.role,
            "folder": self.folder,
            "prefix": self.prefix,
            "tensors": self.n_tensors,
            "other_tensors": self.n_other,
            "bytes": self.n_bytes,
            "dtypes": dict(self.dtypes),
            "shards": list(self.shards),
            "index": self.index,
            "strays": list(self.strays),
            "config_class": self.config_class,
            "sample": self.sample,
            "text_encoders": dict(self.inner),
        }

    def rows(self) -> Iterator[Row]:
        """All but the name, which says something only beside another component."""
        if self.config_class:
            yield "class", self.config_class
        other = f", {self.n_other} of them not under the prefix" if self.n_other else ""
        yield "tensors", f"{self.n_tensors}{other}, {_dtypes(self.dtypes)}"
        yield "files", f"{len(self.shards)}, {_bytes(self.n_bytes)}, {self.index or 'no index'}"
        if self.prefix and self.n_tensors:
            yield "prefix", self.prefix
        for name, prefix in self.inner.items():
            yield name, f"in the same file, under {prefix}"
        if self.strays:
            yield "strays", f"{cut(', '.join(self.strays))} (neither read nor copied)"


@dataclass(frozen=True, slots=True)
class CheckpointDescription:
    """A base, or a part of one. ``shard`` is (number, total) of a single numbered file.

    ``named_expert`` is what the file's or folder's name says, a hint. ``families``: all that it can be of, by
    its names and shapes, ``family`` the one that its layout is told by. ``layout_told_by``: what did,
    where two layouts have its names for other rows. ``text_encoders``: those in folders of their own, by
    name; a LoRA for one is given with that name.
    """

    path: Path
    source: str
    revision: str | None
    container: Container
    family: str | None
    layout: Layout | None
    models: tuple[str, ...]
    pipeline_class: str | None
    variant: str | None
    named_expert: str | None
    components: tuple[ComponentDescription, ...]
    shard: tuple[int, int] | None
    fused: Fused | None
    families: tuple[str, ...] = ()
    layout_told_by: str | None = None
    text_encoders: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        what = f"shard {self.shard[0]} of {self.shard[1]}" if self.shard else _CONTAINERS[self.container]
        return f"{self.path}: {what}{', already fused' if self.fused else ''}"

    def document(self) -> dict[str, object]:
        return {
            "kind": "checkpoint",
            "path": str(self.path),
            "source": self.source,
            "revision": self.revision,
            "container": self.container,
            "family": self.family,
            "families": list(self.families),
            "layout": self.layout,
            "layout_told_by": self.layout_told_by,
            "models": list(self.models),
            "pipeline_class": self.pipeline_class,
            "variant": self.variant,
            "expert": {"name": [self.named_expert] if self.named_expert else []},
            "components": [component.document() for component in self.components],
            "text_encoders": list(self.text_encoders),
            "shard": list(self.shard) if self.shard else None,
            "fused": self.fused.document() if self.fused else None,
        }

    def rows(self) -> tuple[Row, ...]:
        return (
            *self._model_rows(),
            *self._component_rows(),
            *([("text encoders", ", ".join(self.text_encoders))] if self.text_encoders else []),
            *(self.fused.rows() if self.fused else ()),
        )

    def _model_rows(self) -> Iterator[Row]:
        if self.source != self.path.name:
            yield "source", self.source + (f" at {self.revision}" if self.revision else "")
        if self.family:
            yield "family", f"{' or '.join(self.families)}, {self.layout or 'unknown'} names"
            if self.layout_told_by:
                yield "rows", f"in the order of {self.layout} ({self.layout_told_by})"
        else:
            samples = (f"unknown, with names like {c.sample}" for c in self.components if c.sample)
            yield "family", next(samples, "unknown: it holds no tensors")
        if self.models:
            yield "model", " or ".join(self.models)
        if self.pipeline_class:
            yield "pipeline", self.pipeline_class
        if self.variant:
            yield "variant", self.variant
        if self.named_expert:
            yield "expert", f"{self.named_expert} noise, by its name"

    def _component_rows(self) -> Iterator[Row]:
        for component in self.components:
            if self.container in ("file", "component"):
                yield from component.rows()
                continue
            role = "" if component.role == "single" else f" ({component.role})"
            yield "component", component.name + role
            yield from ((f"  {name}", value) for name, value in component.rows())


@dataclass(frozen=True, slots=True)
class FusedDescription:
    """A fused folder: its marker, and whether everything it says holds (digests of large files aside)."""

    path: Path
    marker: Marker
    report: CheckReport

    @property
    def title(self) -> str:
        return f"{self.path}: fused{' and whole' if self.report.whole else ', but not whole'}"

    def document(self) -> dict[str, object]:
        raw = self.marker.raw
        return {
            "kind": "fused",
            "path": str(self.path),
            "whole": self.report.whole,
            "fingerprint": self.marker.fingerprint,
            "artifact": self.marker.artifact,
            "stacked_on": self.marker.stacked_on,
            **{name: raw.get(name) for name in REPEATED},
            "components": [_record_document(part) for part in self.marker.components.values()],
            "loras": [_lora_document(lora) for lora in self.marker.loras],
            "findings": self.report.document()["findings"],
        }

    def rows(self) -> tuple[Row, ...]:
        return (
            ("fingerprint", self.marker.fingerprint),
            *self._base_rows(),
            *self._component_rows(),
            *(("fused with", _lora_text(lora)) for lora in self.marker.loras),
            *self._serving_rows(),
            *((f"not whole: {finding.path}", finding.message) for finding in self.report.findings),
        )

    def _base_rows(self) -> Iterator[Row]:
        base = self.marker.raw.get("base")
        if isinstance(base, dict):
            names = ("source", "revision", "family", "layout", "pipeline_class")
            yield "base", ", ".join(str(base[name]) for name in names if base.get(name))
        skeleton = self.marker.raw.get("skeleton")
        if self.marker.layout:
            rest = f", the rest from {skeleton.get('source')}" if isinstance(skeleton, dict) else ""
            yield "converted", f"to {self.marker.layout} names{rest}"
        if self.marker.stacked_on:
            yield "stacked on", self.marker.stacked_on

    def _component_rows(self) -> Iterator[Row]:
        for part in self.marker.components.values():
            role = f" ({part.role})" if part.role else ""
            size = _bytes(sum(record.n_bytes for record in part.files))
            counts = f"{part.fused} of {part.n_tensors} tensors fused"
            yield (
                "component",
                f"{part.name}{role}: {part.dtype}, {counts}, {many(len(part.files), 'file')}, {size}",
            )

    def _serving_rows(self) -> Iterator[Row]:
        if known := sentence(self.marker.serving):
            yield "to serve", cut(known)


Description = LoraDescription | CheckpointDescription | FusedDescription


@dataclass(frozen=True, slots=True)
class Undescribed:
    """A path that is none of these, or cannot be read, and why."""

    path: Path
    error: FuseloraError

    def document(self) -> dict[str, object]:
        return {"kind": "error", "path": str(self.path), **self.error.document()}


def ranges(numbers: Iterable[int]) -> str:
    """Sorted numbers as ``0-4, 7``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs)


def cut(text: str, length: int = CUT) -> str:
    """``text`` on one line, with its full length said when it is cut."""
    line = " ".join(text.split())
    return line if len(line) <= length else f"{line[:length]}... ({len(text)} characters)"


_CONTAINERS: Mapping[Container, str] = {
    "pipeline": "a diffusers pipeline",
    "experts": "native folders of two experts",
    "component": "a model's folder",
    "file": "a checkpoint in one file",
}


def _fault_rows(faults: Sequence[Fault], unfused: Mapping[str, int]) -> Iterator[Row]:
    """Kinds that cannot be fused by name; of every other sort of fault the first, and how many there are."""
    for kind, count in unfused.items():
        yield "not supported", f"{kind} ({many(count, 'tensor')})"
    groups: dict[str, list[Fault]] = {}
    for fault in faults:
        groups.setdefault(fault.kind, []).append(fault)
    for group in groups.values():
        more = f" ... and {len(group) - 1} more of this kind" if len(group) > 1 else ""
        yield "fault", cut(group[0].message, 4 * CUT) + more


def _place_rows(places: Mapping[str, int]) -> Iterator[Row]:
    """Places of one block and one count together: ``in blocks.*``, ``40 each: self_attn.q, ffn.0``."""
    groups: dict[tuple[str, int], list[str]] = {}
    for place, count in places.items():
        block, star, rest = place.partition("*")
        key, name = ((block + star, count), rest[1:]) if star else (("", count), place)
        groups.setdefault(key, []).append(name)
    for (block, count), names in groups.items():
        yield f"in {block}" if block else "elsewhere", f"{count} each: {cut(', '.join(names), 4 * CUT)}"


def _lora_document(lora: LoraRecord) -> dict[str, object]:
    return {
        "name": lora.name,
        "component": lora.component,
        "strength": lora.strength,
        "alpha": lora.raw.get("alpha"),
        "ranks": lora.raw.get("ranks"),
        "scales": _scales(lora),
        "content_sha256": lora.content_sha256,
    }


def _scales(lora: LoraRecord) -> list[dict[str, object]]:
    """The scales without the long lists of modules that have them."""
    entries = lora.raw.get("scales")
    found = [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    return [{key: value for key, value in entry.items() if key != "modules"} for entry in found]


def _lora_text(lora: LoraRecord) -> str:
    text = lora.text
    alpha, ranks = lora.raw.get("alpha"), lora.raw.get("ranks")
    if isinstance(alpha, dict) and isinstance(alpha.get("values"), list) and alpha["values"]:
        text += f", alpha {_some(alpha['values'])} ({alpha.get('source')})"
    if isinstance(ranks, list) and ranks:
        text += f", rank {_some(ranks)}"
    return text


def _record_document(part: ComponentRecord) -> dict[str, object]:
    return {
        "name": part.name,
        "role": part.role,
        "dtype": part.dtype,
        "index": part.index,
        "tensors": part.n_tensors,
        "fused": part.fused,
        "files": len(part.files),
        "bytes": sum(record.n_bytes for record in part.files),
    }


def _some(values: Sequence[object]) -> str:
    """The first few values."""
    shown = [f"{value:g}" if isinstance(value, float) else str(value) for value in values[:SHOWN]]
    return ", ".join(shown) + (f" and {len(values) - SHOWN} more" if len(values) > SHOWN else "")


def _ranks(ranks: Mapping[int, int]) -> str:
    listed = [f"{rank} ({many(count, 'module')})" for rank, count in sorted(ranks.items())]
    if len(listed) <= SHOWN:
        return ", ".join(listed)
    return f"{min(ranks)} to {max(ranks)}, {len(ranks)} different ones"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items() if count)


def _dtypes(dtypes: Mapping[str, int]) -> str:
    if len(dtypes) == 1:
        return next(iter(dtypes))
    return ", ".join(f"{name} {_bytes(n_bytes)}" for name, n_bytes in dtypes.items()) or "no dtype"


def _bytes(n_bytes: int) -> str:
    return f"{n_bytes:,} bytes"
