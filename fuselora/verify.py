"""An independent recomputation: is OUT the base plus the LoRAs, as its fused.json says?

Strengths, scales, dtypes and targets come from the marker, only locations from the user. Names and rows
are found as a merge finds them (``match``, the families); what is done with them is not: sums are anew, in
float64 (``exact``), and scales are worked out from the LoRA files (``recorded``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from fuselora.check.folder import check
from fuselora.check.report import CheckReport
from fuselora.checkpoint import Checkpoint, Component, open_checkpoint
from fuselora.compare import ComponentReport, compare_component, same_bytes
from fuselora.digest import content_sha256, read_range
from fuselora.errors import FormatError, FuseloraError, MarkerError, UsageError
from fuselora.families import Layout
from fuselora.folders import entries
from fuselora.jsonfile import read_json
from fuselora.marker import FILE_NAME, ComponentRecord, LoraRecord, Marker, read_marker
from fuselora.progress import Progress, Silent
from fuselora.recorded import Delta, Finding, additions
from fuselora.resolve import LoraLocation, resolve_base, resolve_lora, resolve_skeleton
from fuselora.resources import require_current_folder
from fuselora.selection import variants
from fuselora.specs import LoraSpec, plain_loras
from fuselora.verify_report import VerifyReport

if TYPE_CHECKING:
    from fuselora.loading import Loaded

NO_SKELETON = "side files not compared: no --skeleton"
NO_DIGESTS = "has no digests, so there is nothing to compare: give --base and --lora to recompute the folder"
PLAIN = "verify takes components and strengths from fused.json"


def verify(
    out: Path,
    *,
    base: str | Path | None = None,
    loras: Sequence[str | Path] = (),
    skeleton: str | Path | None = None,
    load: bool = False,
    revision: str | None = None,
    progress: Progress | None = None,
) -> VerifyReport:
    """Compare a fused folder with its own digests, and with ``base`` and ``loras`` recompute it.

    LoRA files are recognised by content, in any order and by any name. A converted folder's side files
    are compared with ``skeleton`` if that is given. What does not hold is a finding; ``InputError`` is
    raised for an input that cannot be read, ``UsageError`` for LoRAs or a skeleton without a base, a
    LoRA with a component or strength, and a skeleton for a folder that was not converted. ``load`` has
    diffusers load every component as well.
    """
    out, progress = Path(out), progress or Silent()
    specs = _specs(out, base, loras, skeleton)
    if base is not None or load:
        require_current_folder()
    checked = _checked(out, progress)
    findings = _said(checked, recomputed=base is not None)
    components: list[ComponentReport] = []
    not_compared: tuple[str, ...] = ()
    loaded: list[Loaded] = []
    if checked.marker is not None and base is not None:
        checkpoint = _base_of(checked.marker, str(base), revision)
        rest = _rest(checked.marker, checkpoint, skeleton)
        components, found = _recomputed(out, checked.marker, checkpoint, specs, rest, progress)
        findings += found
        not_compared = _not_compared(checked.marker, rest)
    if checked.marker is not None and load:
        from fuselora.loading import load_components

        loaded, found = load_components(out, checked.marker)
        findings += found
    n_digests = _n_digests(checked)
    return VerifyReport(tuple(findings), tuple(components), n_digests, not_compared, tuple(loaded))


def _specs(
    out: Path, base: str | Path | None, loras: Sequence[str | Path], skeleton: str | Path | None
) -> list[LoraSpec]:
    """The LoRAs as they were given; what makes no sense together is refused."""
    if base is None and (loras or skeleton is not None):
        what = "LoRA files were" if loras else "a skeleton was"
        raise UsageError(f"{what} given and no base", hint="Give the base too: --base BASE.")
    if skeleton is not None:
        _refuse_needless_skeleton(out)
    return [spec for lora in loras for spec in plain_loras(str(lora), why=PLAIN)]


def _said(checked: CheckReport, *, recomputed: bool) -> list[Finding]:
    """What ``check`` found; digests that are not there are no fault where all is recomputed."""
    return [
        Finding(f.code, f.path, None, NO_DIGESTS if f.code == "no-digests" else f.message)
        for f in checked.findings
        if not (recomputed and f.code == "no-digests")
    ]


def _base_of(marker: Marker, base: str, revision: str | None) -> Checkpoint:
    """The base that the folder says it was made from, opened as it was then."""
    variant = next(iter(variants(file.path for file in marker.weight_files)), None)
    at = resolve_base(base, revision=revision, variant=variant, model_only=marker.layout is not None)
    checkpoint = open_checkpoint(
        at.path,
        source=at.source,
        revision=at.revision,
        variant=variant,
        text_encoders=marker.components.keys(),
    )
    return replace(checkpoint, layout=_layout(marker, checkpoint))


def _layout(marker: Marker, base: Checkpoint) -> Layout | None:
    """The layout that the base was said to be in, where its names alone do not tell."""
    recorded, family = marker.base_layout, base.family
    unsure = family is not None and family.signs and recorded in family.all_layouts
    return recorded if unsure else base.layout


def _refuse_needless_skeleton(out: Path) -> None:
    marker = None
    with suppress(FuseloraError):  # a finding of its own
        marker = read_marker(out)
    if marker is not None and marker.layout is None:
        hint = "Leave --skeleton out."
        raise UsageError(f"a skeleton was given, and {FILE_NAME} speaks of none", hint=hint)


def _checked(out: Path, progress: Progress) -> CheckReport:
    held = entries(out, strict=False)
    n_bytes = sum(entry.stat().st_size for entry in held if entry.is_file())
    with progress.phase("check digests", n_bytes) as advance:
        checked = check(out, digest=True)
        advance(n_bytes)
    return checked


def _n_digests(checked: CheckReport) -> int:
    """Files whose digest was taken: those that no other check has found wrong before."""
    wrong = {finding.path for finding in checked.findings if finding.code != "content"}
    files = checked.marker.files if checked.marker else ()
    return sum(file.sha256 is not None and file.path not in wrong for file in files)


def _recomputed(
    out: Path,
    marker: Marker,
    base: Checkpoint,
    loras: Sequence[LoraSpec],
    rest: Path | None,
    progress: Progress,
) -> tuple[list[ComponentReport], list[Finding]]:
    if other := [*_stack_findings(marker, base), *_layout_findings(marker, base)]:
        return [], other
    entries = marker.loras[len(base.marker.loras) if base.marker else 0 :]
    files = {content_sha256(given.path): given for given in map(resolve_lora, loras)}
    findings = [*_lora_findings(marker, entries, files), *_component_findings(marker, base)]
    findings += _side_file_findings(out, marker, rest) if rest else ()
    reports = []
    for record in marker.components.values():
        component = base.component(record.name)
        mine = [entry for entry in entries if entry.component == record.name]
        if component is None or any(entry.content_sha256 not in files for entry in mine):
            continue
        deltas, found = _deltas(mine, files, component, base)
        findings += found
        if deltas is not None:
            kept, key = partial(_keeps_float32, base), _base_key(marker, base, component)
            report, found = compare_component(out, record, component, kept, deltas, progress, key)
            findings += found
            reports += [report] if report else []
    return reports, findings


def _keeps_float32(base: Checkpoint, name: str) -> bool:
    return base.family is not None and base.family.keeps_float32(name, base.layout)


def _base_key(marker: Marker, base: Checkpoint, component: Component) -> Callable[[str], str]:
    """What the base calls a tensor of OUT: a converted one's name is translated back.

    A name that was left as it is in the base is none of its names.
    """
    family = base.family
    if marker.layout is None or family is None:
        return str
    start = len(component.prefix)
    keys = {family.translate(key[start:], "native", "diffusers"): key for key in component.tensors()}
    return lambda name: keys.get(name, f"not converted: {name}")


def _rest(marker: Marker, base: Checkpoint, skeleton: str | Path | None) -> Path | None:
    """The folder that side files were taken from; None if they were not the base's and it was not given."""
    if skeleton is not None:
        return resolve_skeleton(str(skeleton)).path
    return base.root if marker.layout is None else None


def _stack_findings(marker: Marker, base: Checkpoint) -> Iterator[Finding]:
    """After --stack the base is the fused folder that was added to, and its LoRAs come first."""
    held = base.marker.fingerprint if base.marker else None
    earlier = base.marker.loras if base.marker else ()
    if held != marker.stacked_on:
        wanted = f"the fused folder {marker.stacked_on}" if marker.stacked_on else "a base that is not fused"
        text = f"is not the base that {FILE_NAME} names, which is {wanted}"
        yield Finding("another-base", base.source, None, text)
    elif [entry.raw for entry in earlier] != [entry.raw for entry in marker.loras[: len(earlier)]]:
        yield Finding("loras", FILE_NAME, None, "does not begin with the LoRAs that the base holds")


def _layout_findings(marker: Marker, base: Checkpoint) -> Iterator[Finding]:
    if marker.layout is not None and base.layout != "native":
        text = f"has no native names, and {FILE_NAME} says that such were converted to {marker.layout} ones"
        yield Finding("another-base", base.source, None, text)


def _not_compared(marker: Marker, rest: Path | None) -> tuple[str, ...]:
    indexes = {record.index for record in marker.components.values()}
    others = [record for record in marker.side_files if record.path not in indexes]
    return (NO_SKELETON,) if others and rest is None else ()


def _lora_findings(
    marker: Marker, entries: Sequence[LoraRecord], files: Mapping[str, LoraLocation]
) -> Iterator[Finding]:
    listed = {entry.content_sha256 for entry in marker.loras}
    for content, given in files.items():
        if content not in listed:
            yield Finding(
                "lora-unlisted", str(given.path), None, f"{FILE_NAME} lists no LoRA with this content"
            )
    for entry in entries:
        if entry.content_sha256 not in files:
            text = f"{FILE_NAME} lists it on {entry.component}, and it was not given"
            yield Finding("lora-absent", entry.name, None, text)
        if entry.component not in marker.components:
            text = f"lists {entry.name} on {entry.component}, which is no component"
            yield Finding("loras", FILE_NAME, None, text)


def _component_findings(marker: Marker, base: Checkpoint) -> Iterator[Finding]:
    names = {component.name for component in base.components}
    for name in sorted(names ^ marker.components.keys()):
        lacking = base.source if name not in names else FILE_NAME
        yield Finding("another-base", lacking, None, f"there is no component {name}")


def _deltas(
    entries: Sequence[LoraRecord], files: Mapping[str, LoraLocation], component: Component, base: Checkpoint
) -> tuple[dict[str, list[Delta]] | None, list[Finding]]:
    """A component's deltas by base tensor, in the marker's order; None if a LoRA or entry is unusable."""
    deltas: dict[str, list[Delta]] = {}
    findings: list[Finding] = []
    usable = True
    for entry in entries:
        try:
            added = additions(entry, files[entry.content_sha256], component, base)
        except MarkerError as error:
            findings.append(Finding("marker", FILE_NAME, None, error.message))
            usable = False
            continue
        findings += added.findings
        usable = usable and added.deltas is not None
        for base_key, delta in added.deltas or ():
            deltas.setdefault(base_key, []).append(delta)
    return deltas if usable else None, findings


def _side_file_findings(out: Path, marker: Marker, rest: Path) -> Iterator[Finding]:
    """Side files are the base's or skeleton's, byte for byte, but for indexes and the dtype in a config."""
    whose = "base" if marker.layout is None else "skeleton"
    indexes = {record.index for record in marker.components.values()}
    configs = {str(_folder(part) / "config.json"): part for part in marker.components.values()}
    for record in marker.side_files:
        ours, theirs = out / record.path, rest / record.path
        if record.path in indexes or not ours.is_file():
            continue
        if not theirs.is_file():
            yield Finding("side-file", record.path, None, f"the {whose} has no such file")
        elif not _same_files(ours, theirs) and not _same_config(ours, theirs, configs.get(record.path)):
            yield Finding("side-file", record.path, None, f"is not the {whose}'s file")


def _folder(record: ComponentRecord) -> PurePosixPath:
    return PurePosixPath(record.files[0].path).parent


def _same_files(ours: Path, theirs: Path) -> bool:
    n_bytes = ours.stat().st_size
    with ours.open("rb") as first, theirs.open("rb") as second:
        return theirs.stat().st_size == n_bytes and same_bytes(
            read_range(first, 0, n_bytes), read_range(second, 0, n_bytes)
        )


def _same_config(ours: Path, theirs: Path, component: ComponentRecord | None) -> bool:
    """Alike but for what OUT's component has otherwise: the dtype of its tensors, and how wide one became."""
    if component is None:
        return False
    try:
        found, wanted = read_json(ours), read_json(theirs)
    except FormatError:
        return False
    changes: dict[str, object] = {key: component.dtype for key in ("torch_dtype", "dtype") if key in wanted}
    return found == wanted | changes | dict(component.widths)
