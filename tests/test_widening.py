"""A LoRA that gives a weight of the base more columns: zeros, then the delta; the config says so."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file

import fuselora
from fuselora.errors import Refused
from fuselora.families import Widening
from fuselora.verify import verify
from tests import small
from tests.families.toy import TOY, canonical, spelled

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

WIDENING = replace(TOY, widens={"x_embed.weight": Widening("in_channels", follower="out_channels")})
CONFIG = '{\n  "in_channels": 3,\n  "out_channels": null,\n  "nested": {"in_channels": 3}\n}\n'
X = "x_embed.weight"


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fuselora.families.recognition.FAMILIES", (WIDENING,))


def base_of(
    folder: Path, dtype: torch.dtype = torch.float32, config: str = CONFIG
) -> dict[str, torch.Tensor]:
    tensors = {name: t.to(dtype) for name, t in spelled("diffusers", canonical()).items()}
    small.write(folder / "transformer" / "diffusion_pytorch_model.safetensors", tensors)
    (folder / "transformer" / "config.json").write_text(CONFIG)
    return tensors


def widening(path: Path, columns: int = 6, *, key: str = "x_embed", seed: int = 0) -> torch.Tensor:
    up, down = small.noise(4, 2, seed=seed), small.noise(2, columns, seed=seed + 1)
    small.write(path, small.pair(key, up, down))
    return up.double() @ down.double()


def weights(out: Path) -> Mapping[str, torch.Tensor]:
    return load_file(out / "transformer" / "diffusion_pytorch_model.safetensors")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kernel", ["auto", "reference"])
@pytest.mark.parametrize("key", ["x_embed", "x_in"])
def test_zeros_are_put_behind_the_base_and_the_config_follows(
    tmp_path: Path, dtype: torch.dtype, kernel: str, key: str
) -> None:
    base, lora, out = tmp_path / "base", tmp_path / "lora.safetensors", tmp_path / "out"
    old = base_of(base, dtype)
    delta = widening(lora, key=key)
    report = fuselora.merge(base, [lora], out=out, kernel=kernel)
    got = weights(out)
    exact = torch.nn.functional.pad(old[X].double(), (0, 3)) + delta
    torch.testing.assert_close(got[X].double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-6)
    assert all(torch.equal(got[name], tensor) for name, tensor in old.items() if name != X)
    config = json.loads((out / "transformer" / "config.json").read_text())
    assert config == {**json.loads(CONFIG), "in_channels": 6, "out_channels": 3}
    entry = report.marker.raw["components"]["transformer"]  # type: ignore[index]
    assert entry["widened"] == [
        {"tensor": X, "from": [4, 3], "to": [4, 6], "config": {"in_channels": 6, "out_channels": 3}}
    ]
    assert [notice.code for notice in report.notices] == ["widened"]
    assert verify(out, base=base, loras=[lora]).ok
    assert fuselora.read_marker(out) is not None


def test_another_lora_on_the_narrow_weight(tmp_path: Path) -> None:
    base, out = tmp_path / "base", tmp_path / "out"
    old = base_of(base)
    wide, narrow = tmp_path / "wide.safetensors", tmp_path / "narrow.safetensors"
    deltas = widening(wide), widening(narrow, 3, seed=9)
    for order in ((wide, narrow), (narrow, wide)):
        fuselora.merge(base, list(order), out=out, overwrite=True)
        exact = torch.nn.functional.pad(old[X].double() + deltas[1], (0, 3)) + deltas[0]
        torch.testing.assert_close(weights(out)[X].double(), exact, rtol=1e-6, atol=1e-6)
        assert verify(out, base=base, loras=[wide, narrow]).ok


def test_strength_0_widens_with_zeros(tmp_path: Path) -> None:
    base, lora, out = tmp_path / "base", tmp_path / "lora.safetensors", tmp_path / "out"
    old = base_of(base)
    widening(lora)
    fuselora.merge(base, [f"{lora}:0"], out=out)
    assert torch.equal(weights(out)[X], torch.nn.functional.pad(old[X], (0, 3)))
    assert verify(out, base=base, loras=[lora]).ok


def test_a_changed_column_is_found(tmp_path: Path) -> None:
    base, lora, out = tmp_path / "base", tmp_path / "lora.safetensors", tmp_path / "out"
    base_of(base)
    widening(lora)
    fuselora.merge(base, [lora], out=out, digest=False)
    path = out / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    tensors[X][1, 4] += 0.01
    small.write(path, tensors)
    found = verify(out, base=base, loras=[lora])
    assert ("bound", X) in {(finding.code, finding.tensor) for finding in found.findings}


@pytest.mark.parametrize(
    ("key", "columns", "says"),
    [
        ("x_embed", 2, r"x_embed: the delta is \[4, 2\], but x_embed.weight is \[4, 3\]"),
        ("blocks.0.to_q", 8, r"blocks.0.to_q: the delta is \[4, 8\]"),
        ("blocks.0.single.q", 5, r"the delta is \[4, 5\]"),
    ],
)
def test_nothing_else_grows(tmp_path: Path, key: str, columns: int, says: str) -> None:
    base, lora = tmp_path / "base", tmp_path / "lora.safetensors"
    base_of(base)
    widening(lora, columns, key=key)
    with pytest.raises(Refused, match=says):
        fuselora.merge(base, [lora], out=tmp_path / "out")


def others(columns: int) -> Mapping[str, dict[str, torch.Tensor]]:
    """Deltas of other kinds that are wider than the weight."""
    up, down, whole = small.noise(4, 2), small.noise(2, columns), small.noise(4, columns)
    pair = {"lora_up.weight": up, "lora_down.weight": down}
    return {
        "diff": {"diff": whole},
        "set_weight": {"set_weight": whole},
        "replacement": {"weight": whole},
        "loha": {"hada_w1_a": up, "hada_w1_b": down, "hada_w2_a": up, "hada_w2_b": down},
        "lokr": {"lokr_w1": small.noise(2, 2), "lokr_w2": small.noise(2, columns // 2)},
        "dora of rows": {**pair, "dora_scale": small.noise(4, 1)},
        "dora of columns": {**pair, "dora_scale": small.noise(1, columns)},
        "lora_mid": {**pair, "lora_mid.weight": small.noise(2, 2)},
    }


@pytest.mark.parametrize("kind", others(6))
@pytest.mark.parametrize("beside_a_pair", [False, True])
def test_only_plain_pairs_widen(tmp_path: Path, kind: str, beside_a_pair: bool) -> None:
    base, lora, wide = tmp_path / "base", tmp_path / "lora.safetensors", tmp_path / "wide.safetensors"
    base_of(base)
    beside = small.pair("blocks.0.to_q", small.noise(4, 2), small.noise(2, 4))
    small.write(lora, {f"x_embed.{part}": t for part, t in others(6)[kind].items()} | beside)
    widening(wide)
    with pytest.raises(Refused, match=r"x_embed") as caught:
        fuselora.merge(base, [lora, wide] if beside_a_pair else [lora], out=tmp_path / "out")
    assert {fault.path for fault in caught.value.faults} == {"lora.safetensors"}
    assert {fault.kind for fault in caught.value.faults} == {"shape"}
    assert not (tmp_path / "out").exists()


def test_two_widths_are_refused(tmp_path: Path) -> None:
    base, six, nine = tmp_path / "base", tmp_path / "six.safetensors", tmp_path / "nine.safetensors"
    base_of(base)
    widening(six)
    widening(nine, 9)
    with pytest.raises(Refused, match=r"x_embed.weight is widened to several shapes"):
        fuselora.merge(base, [six, nine], out=tmp_path / "out")


@pytest.mark.parametrize(
    ("config", "changed"),
    [
        ({"in_channels": 3}, {"in_channels": 6, "out_channels": 3}),
        ({"in_channels": 3, "out_channels": 5}, {"in_channels": 6}),
        ({"out_channels": 5}, {}),
        ({}, {}),
    ],
)
def test_what_a_config_says_otherwise(config: dict[str, object], changed: dict[str, int]) -> None:
    """out_channels stands for in_channels where it is null or absent, and must not grow with it."""
    assert WIDENING.widens[X].changes(config, 3, 6) == changed
