"""The fields that the README lists for --json are those that are printed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fuselora import synth
from fuselora.cli import app
from tests.fused_pair import SIZE, Pair, edit_json, shard_of, write_pair

README = (Path(__file__).resolve().parent.parent / "README.md").read_text(encoding="utf-8")
FUSED = "blocks.0.attn1.to_q.weight"
Fields = dict[str, set[str]]
Document = dict[str, Any]


def described() -> dict[str, Fields]:
    """By what begins each item: its fields, and theirs where the README lists them in parentheses."""
    section = README.partition("\n## JSON\n")[2].partition("\n## ")[0]
    items = re.findall(r"^ *- (.+?): (.+?)(?=\n *- |\n\n|\Z)", section, re.MULTILINE | re.DOTALL)
    return {label.replace("`", ""): fields(text) for label, text in items}


def fields(text: str) -> Fields:
    found: Fields = {}
    depth, last = 0, ""
    for mark in re.findall(r"[()]|`[a-z0-9_]+`", text):
        if mark in "()":
            depth += 1 if mark == "(" else -1
        elif depth:
            found[last].add(mark.strip("`"))
        else:
            last = mark.strip("`")
            found.setdefault(last, set())
    return found


def printed(*arguments: object) -> Document:
    done = CliRunner().invoke(app, [*map(str, arguments), "--json"], catch_exceptions=False)
    document: Document = json.loads(done.stdout)
    return document


def assert_described(label: str, *documents: Document, without: frozenset[str] = frozenset()) -> None:
    """Every field, and of those in parentheses what the documents have together."""
    said = described()[label]
    for document in documents:
        assert document.keys() - without == said.keys()
    for name, listed in said.items():
        values = [document[name] for document in documents]
        rows = [row for value in values for row in (value if isinstance(value, list) else [value])]
        seen = {key for row in rows if isinstance(row, dict) for key in row}
        assert not listed or seen == listed, name


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def plan(pair: Pair) -> Document:
    return printed("plan", "--base", pair.base, "--high", pair.high, "--low", pair.low, "--estimate")


def test_plan(pair: Pair, plan: Document, tmp_path: Path) -> None:
    native = synth.write_native(tmp_path / "native", SIZE, experts=True)
    converted = printed(
        "plan", "--base", native, "--high", pair.high, "--layout", "diffusers", "--skeleton", pair.base
    )
    assert_described("plan", plan, converted)


def test_merge_and_demo(plan: Document, pair: Pair, tmp_path: Path) -> None:
    as_plan = frozenset(plan.keys() - {"estimate"})
    merged = printed("merge", "--base", pair.base, "--high", pair.high, "--out", tmp_path / "out")
    assert_described("merge", merged, without=as_plan)
    assert as_plan <= merged.keys()
    demo = printed("demo", tmp_path / "demo")
    assert_described("demo", demo, without=frozenset(merged))
    assert merged.keys() <= demo.keys()


def test_check(pair: Pair, tmp_path: Path) -> None:
    out = pair.copy(tmp_path / "out")
    (out / "stray.safetensors").touch()
    assert_described("check", printed("check", out, "--lora", pair.low), printed("check", pair.base))


def test_verify(pair: Pair, tmp_path: Path) -> None:
    out = pair.copy(tmp_path / "out")
    edit_json(out / "transformer" / "config.json", lambda config: config.update(num_layers=1))
    inputs = ("--base", pair.base, "--lora", pair.high, "--lora", pair.low)
    assert_described("verify", printed("verify", out, *inputs, "--load"), printed("verify", pair.out))


def test_inspect(pair: Pair, tmp_path: Path) -> None:
    out = pair.copy(tmp_path / "out")
    (out / "stray.safetensors").touch()
    half = synth.write_safetensors(
        tmp_path / "half", [synth.Spec("blocks.0.ffn.0.lora_up.weight", "F32", (4, 2))]
    )
    shard = shard_of(pair.out, "transformer", FUSED)
    found = printed("inspect", pair.high, half, pair.base, shard, out, tmp_path / "missing")
    assert_described("inspect", found)
    assert described()["inspect"].keys() == found.keys()
    kinds: dict[str, list[Document]] = {}
    for file in found["files"]:
        kinds.setdefault(file.pop("kind"), []).append(file)
    assert {kind: len(files) for kind, files in kinds.items()} == {
        "lora": 2, "checkpoint": 2, "fused": 1, "error": 1,
    }  # fmt: skip
    for kind, files in kinds.items():
        assert_described(f"of kind {kind}", *files)


def test_families_and_refusals(pair: Pair) -> None:
    assert_described("families", printed("families"))
    refused = printed("plan", "--base", pair.base, "--lora", pair.high)
    assert_described("a refusal of any command", refused)


def test_every_item_is_held_against_something() -> None:
    assert set(described()) == {
        "plan", "merge", "demo", "check", "verify", "inspect", "of kind lora", "of kind checkpoint",
        "of kind fused", "of kind error", "families", "a refusal of any command",
    }  # fmt: skip
