"""How the result is meant to be sampled: weights alone do not make a few-step server.

What the fused LoRAs say (``lora.sampling``), where they agree, completed by what the base's own files
and its family say. Nothing is guessed: what is not stated is left out. A base's own flow shift is that
of many steps and no advice for a few. Standard library only.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeGuard

from fuselora.errors import FormatError, Notice
from fuselora.jsonfile import read_json
from fuselora.lora.sampling import (
    Sampling,
    Setting,
    Stated,
    Value,
    by_name,
    read_setting,
    sampling_of,
    steps_in,
)
from fuselora.text_encoders import TEXT_ENCODERS

if TYPE_CHECKING:
    from pathlib import Path

    from fuselora.checkpoint import Checkpoint
    from fuselora.match import Matching

# How each setting reads, in the order in which they are said.
WORDS: Mapping[Setting, str] = {
    "num_inference_steps": "{} steps",
    "guidance_scale": "guidance {}",
    "guidance_scale_2": "guidance {} on transformer_2",
    "flow_shift": "flow shift {}",
    "boundary_ratio": "boundary ratio {}",
    "solver": "{} solver",
}
# What a few-step LoRA changes, and what it is called where nobody says it.
WANTED: Mapping[Setting, str] = {
    "num_inference_steps": "steps",
    "guidance_scale": "guidance",
    "guidance_scale_2": "guidance on transformer_2",
    "flow_shift": "flow shift",
    "solver": "solver",
}
# vLLM-Omni 0.30: options of ``vllm serve`` (entrypoints/cli/serve.py), fields of a request
# (entrypoints/openai/protocol/videos.py), and WAN_SAMPLE_SOLVER_CHOICES of its Wan pipelines.
SERVER_OPTIONS: Mapping[Setting, str] = {"boundary_ratio": "--boundary-ratio", "flow_shift": "--flow-shift"}
REQUEST_FIELDS: tuple[Setting, ...] = ("num_inference_steps", "guidance_scale", "guidance_scale_2")
SOLVERS = frozenset(("euler", "unipc"))
TWO_EXPERTS: frozenset[Setting] = frozenset(("guidance_scale_2", "boundary_ratio"))
# Two experts share one schedule: these hold if they are stated for both, by LoRAs or by the base.
SHARED: frozenset[Setting] = frozenset(("num_inference_steps", "flow_shift", "solver"))


@dataclass(frozen=True, slots=True)
class ServingNotes:
    """What is known of how to sample.

    ``guidance_scale_2`` is the second expert's. ``remarks`` say what no setting can; ``notices`` say
    what was stated and is left out; ``unknown`` names what to ask for elsewhere.
    """

    settings: Mapping[Setting, Stated] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    notices: tuple[Notice, ...] = ()
    unknown: tuple[str, ...] = ()

    def document(self) -> dict[str, object]:
        """``serving`` of the marker and of ``--json``; empty if nothing is known."""
        document: dict[str, object] = {name: stated.value for name, stated in self.settings.items()}
        if self.settings:
            document["sources"] = {name: stated.source for name, stated in self.settings.items()}
            document["note"] = "; ".join(self.reasons())
        return document

    def reasons(self) -> tuple[str, ...]:
        """Which settings are from where, one text for each origin, the remarks, and what is not known."""
        origins: dict[str, dict[Setting, Value]] = {}
        for name, stated in self.settings.items():
            origins.setdefault(stated.origin, {})[name] = stated.value
        said = (f"{sentence(values)}: {origin}" for origin, values in origins.items())
        return (*said, *self.remarks, *_not_known(self.unknown))


NOTHING = ServingNotes()


def serving_notes(
    checkpoint: Checkpoint, matchings: Sequence[Matching], *, pipeline: Path | None = None
) -> ServingNotes:
    """What is known of serving ``checkpoint`` once these LoRAs are fused into it.

    A LoRA that says nothing does not matter, nor one that adds nothing. If none says anything, there is
    nothing to note: the base is sampled as before. What LoRAs contradict, each other or for one expert
    alone the base, is noted neither way. ``pipeline`` is the diffusers pipeline whose other files go
    with the result, by default the base if it is one.
    """
    said = [*_of_earlier(checkpoint), *_of_loras(checkpoint, matchings)]
    spoken = {name for one in said for name in one.settings}
    phases = tuple(_phase_notices(checkpoint, matchings))
    if not spoken:
        return ServingNotes(notices=phases)
    base = _of_base(checkpoint, pipeline)
    agreed, notices = _agreed(said, [component.name for component in checkpoint.transformers], base)
    unspoken = {name: stated for name, stated in base.items() if name not in {*spoken, "flow_shift"}}
    remarks = dict.fromkeys(one.remark for one in said if one.remark)
    unknown = _unknown(agreed, n_experts=len(checkpoint.transformers))
    return ServingNotes(_in_order({**unspoken, **agreed}), tuple(remarks), (*notices, *phases), unknown)


def notes_of(sampling: Sampling) -> ServingNotes:
    """The notes of one LoRA by itself, whatever the base."""
    return ServingNotes(_in_order(sampling.settings), (sampling.remark,) if sampling.remark else ())


def sentence(values: Mapping[Setting, object] | Mapping[str, object]) -> str:
    """A ``serving`` document in words: ``4 steps, guidance 1.0, flow shift 5.0``.

    What is neither a number nor a text, as in an edited marker, is left out.
    """
    known: dict[str, Value] = {name: value for name, value in values.items() if _is_value(value)}
    first, second = known.get("guidance_scale"), known.get("guidance_scale_2")
    if first == second:
        known.pop("guidance_scale_2", None)
    said = {name: words.format(known[name]) for name, words in WORDS.items() if name in known}
    if first is not None and first != second and TWO_EXPERTS & known.keys():
        said["guidance_scale"] += " on transformer"
    return ", ".join(said.values())


def vllm_omni(values: Mapping[Setting, object] | Mapping[str, object], out: str) -> tuple[str, ...]:
    """The command and the body of a request that give a ``serving`` document to vLLM-Omni.

    It reads neither ``boundary_ratio`` nor ``flow_shift`` of a folder; what is absent here is its default.
    Empty if the document says nothing.
    """
    known = {name: value for name, value in values.items() if name in WORDS and _is_value(value)}
    if not known:
        return ()
    options = [f"{option} {known[name]}" for name, option in SERVER_OPTIONS.items() if name in known]
    body: dict[str, object] = {name: known[name] for name in REQUEST_FIELDS if name in known}
    if known.get("solver") in SOLVERS:
        body["extra_params"] = {"sample_solver": known["solver"]}
    command = " ".join(("vllm serve", shlex.quote(out), "--omni", *options))
    return (command, f"each request: {json.dumps(body)}") if body else (command,)


def _is_value(value: object) -> TypeGuard[Value]:
    return isinstance(value, (int, float, str)) and not isinstance(value, bool)


def _in_order(settings: Mapping[Setting, Stated]) -> dict[Setting, Stated]:
    return {name: settings[name] for name in WORDS if name in settings}


def _unknown(known: Mapping[Setting, Stated], *, n_experts: int) -> tuple[str, ...]:
    """What a few-step LoRA changes and nobody says, in words."""
    missing: dict[Setting, str] = {name: words for name, words in WANTED.items() if name not in known}
    if n_experts == 1 or {"guidance_scale", "guidance_scale_2"} <= missing.keys():
        missing.pop("guidance_scale_2", None)
    elif "guidance_scale" in missing:
        missing["guidance_scale"] += " on transformer"
    return tuple(missing.values())


def _not_known(unknown: Sequence[str]) -> Iterator[str]:
    if unknown:
        yield f"not known, see where the LoRA is from: {', '.join(unknown)}"


# Who says what ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Said:
    """What is said for one component; None for all of them."""

    component: str | None
    settings: Mapping[Setting, Stated]
    remark: str | None = None


def _of_loras(checkpoint: Checkpoint, matchings: Sequence[Matching]) -> Iterator[_Said]:
    for matching in matchings:
        assignment = matching.assignment
        if assignment.strength > 0 and matching.adds and not assignment.component.is_text_encoder:
            sampling = sampling_of(assignment.adapter, checkpoint.family)
            is_first = assignment.component.name == checkpoint.transformers[0].name
            settings = sampling.settings if is_first else _of_second(sampling.settings)
            yield _Said(assignment.component.name, settings, sampling.remark)


def _phase_notices(checkpoint: Checkpoint, matchings: Sequence[Matching]) -> Iterator[Notice]:
    """A LoRA that a pipeline has in one of its phases only is in all of them once it is fused."""
    for matching in matchings:
        adapter, component = matching.assignment.adapter, matching.assignment.component
        phase = sampling_of(adapter, checkpoint.family).phase
        if phase and matching.adds and not component.is_text_encoder:
            changes = "fused, it acts in every phase: keep the base for the others"
            text = f"{adapter.name}: is published for one phase of the pipeline alone, {phase}; {changes}"
            yield Notice("phase", text, {"lora": adapter.name, "phase": phase})


def _of_second(settings: Mapping[Setting, Stated]) -> dict[Setting, Stated]:
    """The same for the second expert, whose guidance is a setting of its own."""
    return {"guidance_scale_2" if n == "guidance_scale" else n: stated for n, stated in settings.items()}


def _of_earlier(checkpoint: Checkpoint) -> Iterator[_Said]:
    """What the marker of a base that is fused already says: its notes, and the names of its LoRAs."""
    if checkpoint.marker is None:
        return
    noted = checkpoint.marker.serving
    values = {name: read_setting(name, noted.get(name)) for name in WORDS}
    origin = "in fused.json of the base"
    yield _Said(None, {n: Stated(v, "base", origin) for n, v in values.items() if v is not None})
    for lora in checkpoint.marker.loras:
        steps = steps_in(lora.name)
        if steps is not None and lora.strength > 0 and lora.adds and lora.component not in TEXT_ENCODERS:
            yield _Said(lora.component, {"num_inference_steps": by_name(steps, lora.name)})


def _of_base(checkpoint: Checkpoint, pipeline: Path | None) -> dict[Setting, Stated]:
    """What the files beside the weights say, and else what is published for the model."""
    found = dict(_of_model(checkpoint))
    if pipeline is None and checkpoint.container == "pipeline":
        pipeline = checkpoint.root
    if pipeline is not None:
        found.update(_of_file(pipeline, "scheduler/scheduler_config.json", "flow_shift"))
        if len(checkpoint.transformers) > 1:
            found.update(_of_file(pipeline, "model_index.json", "boundary_ratio"))
    return found


def _of_model(checkpoint: Checkpoint) -> Iterator[tuple[Setting, Stated]]:
    family, n_experts = checkpoint.family, len(checkpoint.transformers)
    if family is not None and n_experts > 1:
        for model in checkpoint.models:
            if model in family.boundary_ratios:
                ratio = family.boundary_ratios[model]
                yield "boundary_ratio", Stated(ratio, "family", f"published for {model}")


def _of_file(pipeline: Path, file: str, name: Setting) -> Iterator[tuple[Setting, Stated]]:
    try:
        document = read_json(pipeline / file)
    except FormatError:  # absent, or broken, which is no matter: it is only copied
        return
    value = read_setting(name, document.get(name))
    if value is not None:
        yield name, Stated(value, "base", f"in {file}")


# Together --------------------------------------------------------------------------------------------


def _agreed(
    said: Sequence[_Said], components: Sequence[str], base: Mapping[Setting, Stated]
) -> tuple[dict[Setting, Stated], tuple[Notice, ...]]:
    """What nobody contradicts and, if the experts share it, is said for both; notices about the rest."""
    agreed: dict[Setting, Stated] = {}
    notices: list[Notice] = []
    one_sided: dict[tuple[str, ...], dict[Setting, Stated]] = {}
    for name in WORDS:
        speakers = [one for one in said if name in one.settings]
        values = {one.settings[name].value: one.settings[name] for one in reversed(speakers)}
        if len(values) > 1:
            notices.append(_disagreement(name, list(values.values())[::-1]))
        elif speakers:
            stated = speakers[0].settings[name]
            lacking = _lacking(speakers, components) if name in SHARED else ()
            as_base = name in base and base[name].value == stated.value
            group = one_sided.setdefault(lacking, {}) if lacking and not as_base else agreed
            group[name] = stated
    return agreed, (*notices, *(_one_sided(group, lacking) for lacking, group in one_sided.items()))


def _lacking(speakers: Sequence[_Said], components: Sequence[str]) -> tuple[str, ...]:
    """The components for which none of them speaks."""
    spoken = {one.component for one in speakers}
    return () if None in spoken else tuple(name for name in components if name not in spoken)


def _disagreement(name: Setting, values: Sequence[Stated]) -> Notice:
    said = " and ".join(f"{sentence({name: stated.value})} ({stated.origin})" for stated in values)
    facts = {"setting": name, "values": [stated.value for stated in values]}
    return Notice("serving_disagrees", f"how to sample is stated as {said}; none is noted for serving", facts)


def _one_sided(settings: Mapping[Setting, Stated], lacking: Sequence[str]) -> Notice:
    values = {name: stated.value for name, stated in settings.items()}
    origins = " and ".join(dict.fromkeys(stated.origin for stated in settings.values()))
    text = (
        f"only one expert gets a LoRA that is sampled with {sentence(values)} ({origins}); "
        f"nothing says so of {' and '.join(lacking)}, so it is not noted for serving"
    )
    return Notice("serving_one_sided", text, {"settings": values, "components": list(lacking)})
