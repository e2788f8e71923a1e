"""Every tensor of any LoRA file ends as applied, skipped, unmatched, said or refused: as one of these."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuselora.errors import Fault, Notice
from fuselora.faults import check
from fuselora.lora.adapter import Adapter, open_adapter
from fuselora.match import Matching, match
from fuselora.resolve import LoraLocation
from fuselora.specs import LoraSpec, Request
from fuselora.synth import Spec, write_safetensors
from fuselora.targets import assign
from tests.adapters import MODULE, SAMPLES
from tests.inputs import one_component
from tests.properties.bounds import examples

PLAIN = [sample for sample in SAMPLES if sample.config is None]
PREFIXES = ("", "diffusion_model.", "base_model.model.", "lora_unet_")
# what a file may hold beside whole modules
JUNK = (
    "", ".weight", ".alpha", ".lora_C.weight", ".lora_down.weight", ".lora_B.default.weight",
    ".lora_A.other.weight", ".hada_w1_a", ".hada_t1", ".lokr_t2", ".dora_scale", ".lora_magnitude_vector",
    ".diff", ".diff_b", ".diff_m", ".scalar", ".bias", ".a1.weight", ".norm.scale", ".w_norm", ".set_weight",
    ".reshape_weight", ".on_input", ".oft_blocks", ".rescale", ".ia3_l", ".lora_mid.weight", ".boft_s",
    ".lora_up.blocks.0.weight", ".lora_B.bias", ".lora_embedding_A", ".alpha_scale",
)  # fmt: skip
Shape = tuple[int, ...]


@st.composite
def files(draw: st.DrawFn) -> tuple[dict[str, Shape], dict[str, Shape]]:
    """A LoRA's tensors and a base's: modules with homes and without, lost parts, keys that mean nothing."""
    lora: dict[str, Shape] = {}
    base: dict[str, Shape] = {"other.weight": (4, 4), "other.bias": (4,)}
    for n in range(draw(st.integers(1, 5))):
        sample, module = draw(st.sampled_from(PLAIN)), MODULE.replace("0", str(n))
        prefix = draw(st.sampled_from(PREFIXES))
        name = prefix + (module.replace(".", "_") if prefix.endswith("_") else module)
        shapes = {**sample.parts, **dict.fromkeys(sample.numbers, ())}
        kept = draw(st.sets(st.sampled_from([*shapes]), min_size=1)) if draw(st.booleans()) else shapes.keys()
        lora |= {f"{name}.{part}": shapes[part] for part in kept}
        if draw(st.integers(0, 3)):
            base |= {module + leaf: shape for leaf, shape in sample.homes.items()}
    homes = [key.rpartition(".")[0] for key in base]
    stems = st.sampled_from([*homes, "nowhere.0.to_k", "lora_unet_nowhere", "x"])
    for stem, ending in draw(st.lists(st.tuples(stems, st.sampled_from(JUNK)), max_size=6)):
        lora.setdefault(stem + ending, draw(st.sampled_from([(), (1,), (4, 4), (3, 10)])))
    return lora, base


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("accounts")


@examples(200)
@given(tensors=files(), allowed=st.sampled_from([(), ("*nowhere*", "*.1.*")]))
def test_every_tensor_is_accounted_for_once(
    tensors: tuple[dict[str, Shape], dict[str, Shape]], allowed: tuple[str, ...], folder: Path
) -> None:
    lora, base = tensors
    checkpoint, _ = one_component(
        folder / "base.safetensors", [Spec(key, "F32", shape) for key, shape in base.items()]
    )
    path = write_safetensors(
        folder / "lora.safetensors", [Spec(key, "F32", s, mean=1.0) for key, s in lora.items()]
    )
    adapter = open_adapter(LoraLocation(LoraSpec(str(path)), path, path.name, None))
    assigned = assign([adapter], checkpoint)
    matchings = [match(one, checkpoint.family, checkpoint.layout) for one in assigned.assignments]
    checked = check(
        checkpoint,
        matchings,
        Request(str(checkpoint.root), (adapter.location.spec,), allow_unmatched=allowed),
    )
    (settled,) = checked.matchings
    faults = (*adapter.faults, *assigned.faults, *checked.faults)
    refused = {fault.key for fault in faults}

    places = Counter(t.name for module in adapter.modules for t in module.parts.values())
    assert all(places[key] == 1 or _is_refused(key, lora, adapter, refused) for key in lora)
    for module in adapter.modules:
        fates = _fates(module.name, settled, checked.notices)
        parts = {tensor.name for tensor in module.parts.values()}
        if not refused & {module.name, *parts}:
            assert len(fates) == 1, (module.name, fates)
            if fates == ["applied"]:
                taken = {t.name for hit in settled.hits if hit.module == module for t in hit.tensors}
                scales = parts - taken  # one number beside what is added, and no more
                assert scales <= {f"{module.name}.alpha", f"{module.name}.alpha_scale"} and len(scales) < 2
                used = any(hit.kind.uses_alpha for hit in settled.hits if hit.module == module)
                assert used or not scales or module.name in _orphans(checked.notices)
    for fault in faults:
        assert _names_what_is_there(fault, lora, adapter), fault


def _fates(name: str, matching: Matching, notices: tuple[Notice, ...]) -> list[str]:
    groups = {
        "applied": [hit.module.name for hit in matching.hits],
        "skipped": [skip.module.name for skip in matching.skipped],
        "unmatched": [miss.module.name for miss in matching.unmatched],
    }
    fates = [fate for fate, names in groups.items() if name in names]
    return fates or ["said"] * (name in _orphans(notices))


def _orphans(notices: tuple[Notice, ...]) -> list[str]:
    """Modules whose alpha means nothing, as the user was told."""
    listed = (notice.facts["modules"] for notice in notices if notice.code == "orphan_alpha")
    return [name for names in listed if isinstance(names, list) for name in names]


def _is_refused(key: str, lora: dict[str, Shape], adapter: Adapter, refused: set[str | None]) -> bool:
    """Named itself, or with its module, whose part it gives a second time."""
    return key in refused or any(key.startswith(f"{m.name}.") and m.name in refused for m in adapter.modules)


def _names_what_is_there(fault: Fault, lora: dict[str, Shape], adapter: Adapter) -> bool:
    known = {None, *lora, *(module.name for module in adapter.modules)}
    return fault.key in known and bool(fault.message)
