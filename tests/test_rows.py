"""LoRAs in one layout on bases in another: every row lands where the layouts say, whatever the kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

import fuselora
from fuselora.errors import FuseloraError, Refused
from fuselora.verify import verify
from tests import small
from tests.families.toy import CANONICAL, TOY, canonical, spelled

if TYPE_CHECKING:
    from pathlib import Path

    from fuselora.families import Layout

LAYOUTS = ("diffusers", "native", "raw")
SCALE = 0.5  # alpha / rank
# PEFT's infix is the sign of ``raw``, whose names ``native`` has as well
ENDINGS = {"raw": ("lora_B.default", "lora_A.default")}


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fuselora.families.recognition.FAMILIES", (TOY,))


def rows(layout: Layout) -> dict[tuple[str, int], int]:
    """(tensor, row) of a layout -> the number of the canonical row that it is."""
    at, numbered = 0, {}
    for name, shape in CANONICAL.items():
        numbers = torch.arange(at, at + shape[0]).double()
        numbered[name] = numbers[:, None] if len(shape) == 2 else numbers
        at += shape[0]
    whole = spelled(layout, numbered)
    return {(name, n): int(row) for name, held in whole.items() for n, row in enumerate(held.flatten())}


def moved(deltas: Mapping[str, torch.Tensor], here: Layout, there: Layout) -> dict[str, torch.Tensor]:
    """Differences by tensors of ``here``, as tensors of ``there`` have their rows."""
    row_of = {number: deltas[name][n] for (name, n), number in rows(here).items() if name in deltas}
    found = {
        name: torch.zeros(t.shape, dtype=torch.float64) for name, t in spelled(there, canonical()).items()
    }
    for (name, n), number in rows(there).items():
        if number in row_of:
            found[name][n] = row_of[number]
    return found


def matrices(layout: Layout) -> dict[str, torch.Tensor]:
    return {n.removesuffix(".weight"): t for n, t in spelled(layout, canonical()).items() if t.dim() == 2}


def base_file(path: Path, layout: Layout, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    tensors = {name: t.to(dtype).contiguous() for name, t in spelled(layout, canonical()).items()}
    if layout == "raw":
        tensors["rope.inv_freq"] = torch.ones(3)
    return load_file(small.write(path, tensors))


def lora_of(path: Path, layout: Layout, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """A LoRA of every matrix of a layout; returns the differences that it makes."""
    up_name, down_name = ENDINGS.get(layout, ("lora_up", "lora_down"))
    tensors: dict[str, torch.Tensor] = {}
    deltas = {}
    for seed, (name, weight) in enumerate(matrices(layout).items()):
        up = small.noise(weight.shape[0], 2, seed=seed, dtype=dtype)
        down = small.noise(2, weight.shape[1], seed=99 + seed, dtype=dtype)
        key = f"diffusion_model.{name}"
        tensors |= {f"{key}.{up_name}.weight": up, f"{key}.{down_name}.weight": down}
        tensors[f"{key}.alpha"] = torch.tensor(2 * SCALE)
        deltas[f"{name}.weight"] = SCALE * up.double() @ down.double()
    small.write(path, tensors)
    return deltas


@pytest.mark.parametrize("kernel", ["auto", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("lora_layout", LAYOUTS)
@pytest.mark.parametrize("base_layout", LAYOUTS)
def test_pairs_in_every_layout_on_every_layout(
    tmp_path: Path, base_layout: Layout, lora_layout: Layout, dtype: torch.dtype, kernel: str
) -> None:
    base_path, lora_path, out = tmp_path / "base.safetensors", tmp_path / "lora.safetensors", tmp_path / "out"
    base = base_file(base_path, base_layout, dtype)
    wanted = moved(lora_of(lora_path, lora_layout, dtype), lora_layout, base_layout)
    report = fuselora.merge(base_path, [lora_path], out=out, kernel=kernel)
    assert report.plan.checkpoint.layout == base_layout
    got = load_file(out / "base.safetensors")
    assert all(wanted[f"{name}.weight"].any() for name in matrices(base_layout))
    for name, old in base.items():
        exact = old.double() + wanted.get(name, torch.zeros(()))
        torch.testing.assert_close(got[name].double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-6)
    assert verify(out, base=base_path, loras=[lora_path]).ok


PARTS: Mapping[str, Callable[[int, int], Mapping[str, torch.Tensor]]] = {
    "diff": lambda n, m: {"diff": small.noise(n, m)},
    "set_weight": lambda n, m: {"set_weight": small.noise(n, m)},
    "dora": lambda n, m: {
        "lora_up.weight": small.noise(n, 2),
        "lora_down.weight": small.noise(2, m, seed=1),
        "dora_scale": small.noise(n, 1, seed=2).abs() + 1,
    },
    "lokr": lambda n, m: {"lokr_w1": small.noise(2, 2), "lokr_w2": small.noise(n // 2, m // 2, seed=1)},
    "loha": lambda n, m: {
        **{f"hada_w{k}_a": small.noise(n, 2, seed=k) for k in (1, 2)},
        **{f"hada_w{k}_b": small.noise(2, m, seed=9 + k) for k in (1, 2)},
    },
    "ia3": lambda n, m: {"weight": small.noise(n, seed=3), "on_input": torch.tensor(0.0)},
}


@pytest.mark.parametrize("kind", sorted(PARTS))
@pytest.mark.parametrize(("lora_layout", "base_layout"), [("native", "diffusers"), ("raw", "native")])
def test_every_kind_that_keeps_rows_apart(
    tmp_path: Path, kind: str, lora_layout: Layout, base_layout: Layout
) -> None:
    """Fused into its own layout it is what it is; its rows are then those in the other one."""
    lora_path = tmp_path / "lora.safetensors"
    parts = {
        f"{name}.{part}": tensor
        for name, weight in matrices(lora_layout).items()
        if name != "x_in"
        for part, tensor in PARTS[kind](*weight.shape).items()
    }
    small.write(lora_path, parts)
    found = {}
    for layout in (lora_layout, base_layout):
        base_path, out = tmp_path / f"{layout}.safetensors", tmp_path / layout
        base_file(base_path, layout, torch.float32)
        fuselora.merge(base_path, [lora_path], out=out, lora_layouts=[lora_layout])
        found[layout] = load_file(out / base_path.name)
        assert verify(out, base=base_path, loras=[lora_path]).ok
    there = moved({n: t.double() for n, t in found[lora_layout].items()}, lora_layout, base_layout)
    for name, tensor in there.items():
        torch.testing.assert_close(found[base_layout][name].double(), tensor, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(("lora_layout", "base_layout"), [("native", "diffusers"), ("diffusers", "raw")])
def test_biases_and_norms(tmp_path: Path, lora_layout: Layout, base_layout: Layout) -> None:
    base_path, lora_path = tmp_path / "base.safetensors", tmp_path / "lora.safetensors"
    base = base_file(base_path, base_layout, torch.float32)
    vectors = {n: t for n, t in spelled(lora_layout, canonical()).items() if n.endswith(".bias")}
    deltas = {name: small.noise(*t.shape, seed=n) for n, (name, t) in enumerate(vectors.items())}
    small.write(lora_path, {name.removesuffix(".bias") + ".diff_b": delta for name, delta in deltas.items()})
    fuselora.merge(base_path, [lora_path], out=tmp_path / "out")
    got = load_file(tmp_path / "out" / base_path.name)
    for name, delta in moved({n: d.double() for n, d in deltas.items()}, lora_layout, base_layout).items():
        torch.testing.assert_close(got[name].double(), base[name].double() + delta, rtol=1e-6, atol=1e-6)
    assert verify(tmp_path / "out", base=base_path, loras=[lora_path]).ok


def test_a_kind_that_mixes_rows_is_refused(tmp_path: Path) -> None:
    base_path, lora_path = tmp_path / "base.safetensors", tmp_path / "lora.safetensors"
    base_file(base_path, "diffusers", torch.float32)
    oft = {"oft_blocks": small.noise(2, 6, 6), "alpha": torch.tensor(0.0)}
    small.write(lora_path, {f"blocks.0.qkv.{part}": tensor for part, tensor in oft.items()})
    with pytest.raises(Refused, match=r"blocks\.0\.qkv: oft needs its whole layer"):
        fuselora.merge(base_path, [lora_path], out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_names_of_two_layouts_with_nothing_to_tell_are_those_of_the_first(tmp_path: Path) -> None:
    base_path, lora_path = tmp_path / "base.safetensors", tmp_path / "lora.safetensors"
    base_file(base_path, "diffusers", torch.float32)
    up, down = small.noise(12, 2), small.noise(2, 4, seed=1)
    small.write(lora_path, small.pair("blocks.0.qkv", up, down))
    fuselora.merge(base_path, [lora_path], out=tmp_path / "stacked")
    fuselora.merge(base_path, [lora_path], out=tmp_path / "by_heads", lora_layouts=[f"{lora_path.name}=raw"])
    assert verify(tmp_path / "by_heads", base=base_path, loras=[lora_path]).ok
    old = load_file(base_path)["blocks.0.to_k.weight"]
    delta = up @ down
    stacked = load_file(tmp_path / "stacked" / base_path.name)["blocks.0.to_k.weight"]
    by_heads = load_file(tmp_path / "by_heads" / base_path.name)["blocks.0.to_k.weight"]
    torch.testing.assert_close(stacked, old + delta[4:8])
    torch.testing.assert_close(by_heads, old + delta[[2, 3, 8, 9]])


def test_rows_meant_twice_are_refused_and_other_rows_are_not(tmp_path: Path) -> None:
    base_path, lora_path = tmp_path / "base.safetensors", tmp_path / "lora.safetensors"
    base_file(base_path, "native", torch.float32)
    q = small.pair("blocks.0.to_q", small.noise(4, 2), small.noise(2, 4))
    k = small.pair("blocks.0.to_k", small.noise(4, 3), small.noise(3, 4))
    small.write(lora_path, {**q, **k})
    report = fuselora.merge(base_path, [lora_path], out=tmp_path / "out")
    assert report.marker.loras[0].raw["ranks"] == [2, 3]
    assert report.marker.components["transformer"].fused == 1
    small.write(lora_path, {**q, **small.pair("blocks.0.qkv", small.noise(12, 2), small.noise(2, 4))})
    with pytest.raises(Refused, match=r"blocks\.0\.qkv\.weight is meant twice"):
        fuselora.merge(base_path, [lora_path], out=tmp_path / "twice")


def test_the_base_s_layout_as_the_user_says(tmp_path: Path) -> None:
    """Without its sign a base in raw order looks native; verify takes the layout from the marker."""
    base_path, lora_path, out = tmp_path / "base.safetensors", tmp_path / "lora.safetensors", tmp_path / "out"
    base = spelled("raw", canonical())
    small.write(base_path, base)
    wanted = moved(lora_of(lora_path, "diffusers", torch.float32), "diffusers", "raw")
    fuselora.merge(base_path, [lora_path], out=out, base_layout="raw")
    got = load_file(out / base_path.name)
    for name, old in base.items():
        torch.testing.assert_close(got[name].double(), old.double() + wanted[name], rtol=1e-6, atol=1e-6)
    assert verify(out, base=base_path, loras=[lora_path]).ok


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"base_layout": "sideways"}, "the layouts of toy are diffusers, native, raw"),
        ({"lora_layouts": ["other.safetensors=raw"]}, "no such LoRA was given"),
        ({"lora_layouts": ["=raw"]}, "is no .FILE=.LAYOUT"),
        ({"lora_layouts": ["sideways"]}, "sideways is no layout of toy: diffusers, native, raw"),
    ],
)
def test_layouts_that_there_are_not(tmp_path: Path, options: dict[str, Any], says: str) -> None:
    base_path, lora_path = tmp_path / "base.safetensors", tmp_path / "lora.safetensors"
    base_file(base_path, "native", torch.float32)
    lora_of(lora_path, "native", torch.float32)
    with pytest.raises(FuseloraError, match=says):
        fuselora.merge(base_path, [lora_path], out=tmp_path / "out", **options)
