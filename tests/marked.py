"""A fused folder of three tensors, its marker written by hand, and ways to change that."""

from __future__ import annotations

import copy
import json
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

from fuselora.check.report import CheckReport
from fuselora.digest import artifact_digest, content_sha256, sha256_file, tagged
from fuselora.header import TensorInfo, encode_header, read_header
from fuselora.marker import COMPONENT_KEY, FILE_NAME, FINGERPRINT_KEY, SCHEMA, encode, seal_of

FINGERPRINT = tagged("f" * 64)
EARLIER = tagged("e" * 64)
FUSED_SHARD = "transformer/diffusion_pytorch_model-00001-of-00002.safetensors"
COPIED_SHARD = "transformer/diffusion_pytorch_model-00002-of-00002.safetensors"
INDEX = "transformer/diffusion_pytorch_model.safetensors.index.json"
CONFIG = "transformer/config.json"
METADATA = {FINGERPRINT_KEY: FINGERPRINT, COMPONENT_KEY: "transformer"}
Document = dict[str, Any]


def write_safetensors(path: Path, tensors: dict[str, bytes], metadata: dict[str, str]) -> None:
    """One-row F32 tensors, in the order given."""
    infos, at = [], 0
    for name, data in tensors.items():
        infos.append(TensorInfo(name, "F32", (1, len(data) // 4), at, at + len(data)))
        at += len(data)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode_header(infos, metadata) + b"".join(tensors.values()))


def write_lora(path: Path, *, reverse: bool = False, first: bytes = b"abcd") -> Path:
    tensors = {"to_q.lora_A.weight": first, "to_q.lora_B.weight": b"efgh"}
    order = dict(reversed(tensors.items())) if reverse else tensors
    write_safetensors(path, order, {"note": "re-saved"} if reverse else {})
    return path


def write_fused(folder: Path) -> Path:
    """A fused folder: one component of two shards, the second one copied, and two side files."""
    write_safetensors(folder / FUSED_SHARD, {"to_q.weight": b"aaaabbbb"}, METADATA)
    write_safetensors(folder / COPIED_SHARD, {"to_k.weight": b"ccccdddd"}, {})
    names = {"to_q.weight": Path(FUSED_SHARD).name, "to_k.weight": Path(COPIED_SHARD).name}
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 16}, "weight_map": names}))
    (folder / CONFIG).write_text('{"dim": 4}')
    (folder / FILE_NAME).write_bytes(encode(describe(folder)))
    return folder


def describe(folder: Path) -> Document:
    """The marker of what ``write_fused`` wrote."""
    document: Document = {
        "schema": SCHEMA,
        "tool": {"name": "fuselora", "version": "0.1.0", "torch": "2.13.0"},
        "created": "2026-12-01T12:00:00Z",
        "lora_is_fused": True,
        "fingerprint": FINGERPRINT,
        "base": {"source": "tiny", "revision": None, "family": "wan", "layout": "diffusers"},
        "components": {
            "transformer": {
                "role": None,
                "dtype": "float32",
                "index": INDEX,
                "tensors": 2,
                "fused": 1,
                "copied": 1,
                "files": [weight_entry(folder, FUSED_SHARD, 1), weight_entry(folder, COPIED_SHARD, 0)],
            }
        },
        "side_files": [entry(folder, CONFIG), entry(folder, INDEX)],
        "loras": [lora_entry(write_lora(folder.parent / "lora.safetensors"))],
        "warnings": [],
        "math": {"accumulate": "float32", "rounding": "once, nearest even", "device": "cpu", "kernel": "x"},
        "serving": {"num_inference_steps": 4, "guidance_scale": 1.0, "note": "from the LoRA's name"},
        "policy": {"distill_lora": "refuse", "dynamic_lora": "allow"},
    }
    document["artifact"] = artifact_of(document)
    return document


def entry(folder: Path, path: str) -> Document:
    return {"path": path, "bytes": (folder / path).stat().st_size, "sha256": sha256_file(folder / path)}


def weight_entry(folder: Path, path: str, fused: int) -> Document:
    header = read_header(folder / path).sha256
    return entry(folder, path) | {"base_sha256": "b" * 64, "header_sha256": header, "fused": fused}


def lora_entry(path: Path) -> Document:
    scales = {"scale": 0.125, "alpha": 8.0, "rank": 64, "source": "tensor", "modules": ["to_q"]}
    return {
        "name": path.name,
        "sha256": sha256_file(path),
        "content_sha256": content_sha256(path),
        "component": "transformer",
        "strength": 1.0,
        "dialect": "lora_A/B",
        "ranks": [64],
        "alpha": {"source": "tensor", "values": [8.0]},
        "scales": [scales],
        "applied": {"pairs": 1, "diff": 0, "diff_b": 0, "replace": 0},
        "skipped": [],
    }


def listed(document: Document) -> list[Document]:
    weights = [record for part in document["components"].values() for record in part["files"]]
    return [*weights, *document["side_files"]]


def artifact_of(document: Document) -> str:
    return tagged(artifact_digest((record["path"], record["sha256"]) for record in listed(document)))


def load(folder: Path) -> Document:
    document: Document = json.loads((folder / FILE_NAME).read_bytes())
    return document


def sealed(document: Document) -> bytes:
    """The document as it stands, in whatever state, under a seal that fits."""
    return json.dumps({**document, "seal": seal_of(document)}).encode()


def store(folder: Path, document: Document) -> None:
    """What a marker would look like that was written so: a broken one does not go through ``encode``."""
    (folder / FILE_NAME).write_bytes(sealed(document))


def codes(report: CheckReport) -> set[tuple[str, str]]:
    return {(finding.code, finding.path) for finding in report.findings}


def changed(document: Document, place: str, value: object) -> Document:
    """A copy with the field at ``a.0.b`` replaced, or dropped where ``value`` is ``...``."""
    copied = copy.deepcopy(document)
    at: Any = copied
    *parents, last = [int(name) if name.isdigit() else name for name in place.split(".")]
    for name in parents:
        at = at[name]
    if value is ...:
        del at[last]
    else:
        at[last] = value
    return copied


def without_digests(document: Document) -> Document:
    document.pop("artifact")
    for record in listed(document):
        for name in ("sha256", "base_sha256"):
            record.pop(name, None)
    return document


@cache
def validator() -> Draft202012Validator:
    text = files("fuselora").joinpath("schema", "fused-1.0.schema.json").read_text("utf-8")
    return Draft202012Validator(json.loads(text))
