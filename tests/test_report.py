"""What a terminal, a pipe and a file see: nothing cut, nothing raw, results and talk apart."""

from __future__ import annotations

import io
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from fuselora import synth
from fuselora.demo import Demo
from fuselora.describe import describe
from fuselora.errors import CheckpointError, Fault, FuseloraError, Notice, Refused
from fuselora.marker import check
from fuselora.pipeline import FuseReport, merge, plan
from fuselora.planning import FusePlan
from fuselora.report import PLAIN_LINE_SECONDS, SHOWN_ROWS, Reporter, amount
from fuselora.summary import where
from fuselora.verify import verify
from fuselora.verify_report import VerifyReport
from tests.inputs import pair, tensor

ESCAPE = "\x1b"
NASTY = "evil\x1b[2J\x07\x00\x9b31m\u202egnp.\n\terror: x"
EVIL = NASTY.replace("\n", "")  # a key of a LoRA is one line
WIDE = 1000


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@dataclass
class Seen:
    """A reporter and what it wrote."""

    out: io.StringIO
    err: io.StringIO
    reporter: Reporter = field(init=False)

    @property
    def both(self) -> str:
        return self.out.getvalue() + self.err.getvalue()

    def document(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.out.getvalue(), parse_constant=pytest.fail)
        return found


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Seen]:
    """Makes a reporter on a terminal of ``columns``, or on pipes; None leaves COLUMNS unset."""

    def make(*, terminal: bool = False, columns: int | None = 80, **options: Any) -> Seen:
        made = Seen(Terminal(), Terminal()) if terminal else Seen(io.StringIO(), io.StringIO())
        if columns is None:
            monkeypatch.delenv("COLUMNS", raising=False)
        else:
            monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setenv("TERM", "xterm-256color")
        for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(sys, "stdout", made.out)
        monkeypatch.setattr(sys, "stderr", made.err)
        made.reporter = Reporter(**options)
        return made

    return make


@dataclass(frozen=True)
class Run:
    """One merge with long names, and all that can be said of it."""

    base: Path
    loras: tuple[Path, Path]
    planned: FusePlan
    merged: FuseReport
    verified: VerifyReport


HIGH = "wan2.2_i2v_A14b_high_noise_lora_rank64_lightx2v_4step_1022.safetensors"
LOW = "wan2.2_i2v_A14b_low_noise_lora_rank64_lightx2v_4step_1022.safetensors"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("run")
    size = synth.tiny("wan2.2-i2v-a14b", blocks=1)
    base = synth.write_pipeline(folder / "Wan2.2-I2V-A14B-Diffusers", size, experts=True, shard_bytes=60_000)
    (base / "transformer" / "left-over-from-another-download.bin").write_bytes(b"x")
    wan21 = synth.tiny("wan2.1-i2v-14b", blocks=1)
    high = synth.write_lora(folder / HIGH, wan21, style="extractor", alpha=2, dtype="F32", seed=1)
    low = synth.write_lora(folder / LOW, size, style="comfy", dtype="F32", seed=2)
    loras = [f"{high}:0.5,{low}"]
    merged = merge(base, loras, folder / "out", dtype="bfloat16")
    verified = verify(merged.out, base=base, loras=[high, low])
    return Run(base, (high, low), plan(base, loras, dtype="bfloat16"), merged, verified)


REPORTS: dict[str, Callable[[Reporter, Run], object]] = {
    "plan": lambda reporter, run: reporter.plan(run.planned),
    "merge": lambda reporter, run: reporter.merged(run.merged),
    "verify": lambda reporter, run: reporter.verified(run.merged.out, run.verified),
    "check": lambda reporter, run: reporter.checked(run.merged.out, check(run.merged.out, loras=run.loras)),
    "check of a base": lambda reporter, run: reporter.checked(run.base, check(run.base)),
    "inspect": lambda reporter, run: reporter.described(
        [describe(path) for path in (run.base, *run.loras, run.merged.out)]
    ),
    "demo": lambda reporter, run: reporter.demo(Demo(run.base.parent, run.merged, run.verified)),
}


def visible(text: str) -> Counter[str]:
    """Every character that is ink, whatever the lines it is on."""
    return Counter(re.sub(r"\s", "", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)))


# Widths


@pytest.mark.parametrize("name", REPORTS)
@pytest.mark.parametrize("verbose", [False, True])
def test_on_80_columns_no_line_is_longer_and_nothing_is_cut(
    seen: Callable[..., Seen], run: Run, name: str, verbose: bool
) -> None:
    narrow, wide = (seen(terminal=True, columns=columns, verbose=verbose) for columns in (80, WIDE))
    for made in (narrow, wide):
        REPORTS[name](made.reporter, run)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", narrow.both).splitlines()
    assert max(map(len, lines)) <= 80
    assert visible(narrow.both) == visible(wide.both)
    assert "…" not in narrow.both


@pytest.mark.parametrize("name", REPORTS)
def test_a_pipe_gets_whole_lines_and_no_escapes(seen: Callable[..., Seen], run: Run, name: str) -> None:
    piped, wide = seen(), seen(columns=WIDE)
    for made in (piped, wide):
        REPORTS[name](made.reporter, run)
    assert ESCAPE not in piped.both
    assert visible(piped.both) == visible(wide.both)
    assert "…" not in piped.both


@pytest.mark.parametrize("terminal", [False, True])
def test_0_columns_are_none_said(seen: Callable[..., Seen], run: Run, terminal: bool) -> None:
    made, other = (seen(terminal=terminal, columns=columns) for columns in (0, 80 if terminal else None))
    for one in (made, other):
        one.reporter.plan(run.planned)
    assert made.both == other.both != ""


@pytest.mark.parametrize("name", REPORTS)
def test_a_log_has_whole_rows_and_no_blanks_at_their_ends(
    seen: Callable[..., Seen], run: Run, name: str
) -> None:
    log, wide = seen(columns=None), seen(columns=WIDE)
    for made in (log, wide):
        REPORTS[name](made.reporter, run)
    lines = log.both.splitlines()
    assert lines == wide.both.splitlines()
    assert lines == [line.rstrip() for line in lines]


def test_a_log_can_be_searched_for_what_a_table_shows(seen: Callable[..., Seen], run: Run) -> None:
    log = seen(columns=None)
    log.reporter.described([describe(run.merged.out)])
    log.reporter.plan(run.planned)
    lines = log.out.getvalue().splitlines()
    assert f"  fingerprint  {run.merged.marker.fingerprint}" in lines
    assert any(line.startswith("transformer_2 (low_noise)  float32 -> bfloat16") for line in lines)


def test_columns_are_those_that_a_log_asks_for(seen: Callable[..., Seen], run: Run) -> None:
    log = seen(columns=60)
    log.reporter.described([describe(run.merged.out)])
    assert run.merged.marker.fingerprint not in log.out.getvalue()


@pytest.mark.parametrize("name", ["plan", "check", "inspect"])
def test_no_color_is_plain_text_on_a_terminal_too(
    seen: Callable[..., Seen], run: Run, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    colored = seen(terminal=True)
    REPORTS[name](colored.reporter, run)
    monkeypatch.setenv("NO_COLOR", "1")
    plain = Seen(Terminal(), Terminal())
    monkeypatch.setattr(sys, "stdout", plain.out)
    monkeypatch.setattr(sys, "stderr", plain.err)
    plain.reporter = Reporter()
    REPORTS[name](plain.reporter, run)
    plain.reporter.error(CheckpointError("x", hint="y"))
    assert ESCAPE not in plain.both
    if name == "plan":
        assert ESCAPE in colored.both


# Names from files


def clean(text: str) -> bool:
    return not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", text)


@pytest.mark.parametrize("json", [False, True])
@pytest.mark.parametrize("terminal", [False, True])
def test_control_characters_in_names_stay_visible(
    seen: Callable[..., Seen], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, json: bool, terminal: bool
) -> None:
    made = seen(terminal=terminal)
    monkeypatch.setenv("NO_COLOR", "1")
    reporter = Reporter(json=json, verbose=True)
    base = tensor(f"{EVIL}.q.weight", 4, 4), tensor(f"{NASTY}.weight", 4, 4)
    files = {
        "base": base,
        "fits": [*pair(f"{EVIL}.q"), tensor(f"{EVIL}.k.alpha")],
        "misses": [*pair(f"{EVIL}.q"), *pair(f"{EVIL}.no"), *pair(f"{EVIL}.neither")],
        "unread": [tensor(f"{NASTY}.hada_w1_a", 2), tensor(f"{NASTY}.??", 2), *pair(NASTY)],
    }
    paths = {name: synth.write_safetensors(tmp_path / name, specs) for name, specs in files.items()}
    reporter.plan(plan(paths["base"], [paths["fits"]]))
    for name in ("misses", "unread"):
        with pytest.raises(Refused) as refused:
            plan(paths["base"], [paths[name]])
        reporter.error(refused.value)
    reporter.described([describe(path) for path in paths.values()])
    assert clean(made.both)
    assert not any(line.strip().startswith("error: x") for line in made.both.splitlines())
    assert made.both.count("[2J") > 4


def test_what_a_stream_cannot_spell_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stderr", stream)
    Reporter().error(CheckpointError("lorä.safetensors: 中"))
    stream.flush()
    assert stream.buffer.getvalue() == b"error: lor\\xe4.safetensors: \\u4e2d\n"


# Which stream


@pytest.mark.parametrize("name", REPORTS)
def test_results_are_on_stdout(seen: Callable[..., Seen], run: Run, name: str) -> None:
    made = seen()
    REPORTS[name](made.reporter, run)
    assert made.out.getvalue()
    talk = made.err.getvalue().splitlines()
    assert all(line.startswith(("warning: ", "hint: ")) for line in talk)
    assert bool(talk) == (name in ("plan", "merge", "demo"))


@pytest.mark.parametrize("name", REPORTS)
def test_quiet_says_only_the_result(seen: Callable[..., Seen], run: Run, name: str) -> None:
    loud, quiet = seen(), seen(quiet=True)
    for made in (loud, quiet):
        REPORTS[name](made.reporter, run)
    assert quiet.err.getvalue() == ""
    said = quiet.out.getvalue()
    assert said and said in loud.out.getvalue()
    assert name == "demo" or said == loud.out.getvalue()


@pytest.mark.parametrize("name", REPORTS)
def test_json_is_one_document_and_nothing_else(seen: Callable[..., Seen], run: Run, name: str) -> None:
    made = seen(terminal=True, json=True)
    with made.reporter.phase("fuse", 100) as advance:
        advance(100)
    REPORTS[name](made.reporter, run)
    assert isinstance(made.document(), dict)
    assert made.err.getvalue() == ""
    assert made.out.getvalue().isascii()


def test_the_documents_have_their_keys(seen: Callable[..., Seen], run: Run) -> None:
    documents = {}
    for name, report in REPORTS.items():
        made = seen(json=True)
        report(made.reporter, run)
        documents[name] = made.document()
    assert {"base", "components", "loras", "fingerprint", "pending", "warnings"} <= set(documents["plan"])
    assert {"out", "artifact", "kept", "seconds", "fingerprint"} <= set(documents["merge"])
    assert documents["demo"] == documents["merge"] | {"verified": True}
    assert documents["verify"]["ok"] is True
    assert (documents["check"]["fused"], documents["check"]["ok"]) == (True, False)
    assert (documents["check of a base"]["fused"], documents["check of a base"]["ok"]) == (False, False)
    assert len(documents["inspect"]["files"]) == 4


# Errors


def test_an_error_and_its_hint(seen: Callable[..., Seen]) -> None:
    made = seen()
    made.reporter.error(CheckpointError("base: is odd", hint="Fix it.", path="base"))
    assert made.err.getvalue() == "error: base: is odd\nhint: Fix it.\n"
    assert made.out.getvalue() == ""


def test_an_error_as_json_is_said_in_words_too(seen: Callable[..., Seen]) -> None:
    made = seen(json=True)
    made.reporter.error(Refused([Fault("shape", "q is odd", path="x", key="q")]))
    assert made.document()["error"]["faults"] == [
        {"kind": "shape", "message": "q is odd", "path": "x", "key": "q"}
    ]
    assert made.err.getvalue() == "error: x: q is odd\n"


@pytest.mark.parametrize("error", [CheckpointError("x"), Refused([Fault("list", "two")])])
def test_an_error_without_a_hint(seen: Callable[..., Seen], error: FuseloraError) -> None:
    made = seen()
    made.reporter.error(error)
    assert made.err.getvalue().count("\n") == 1


def test_a_list_of_faults_keeps_its_lines(seen: Callable[..., Seen]) -> None:
    made = seen(terminal=True)
    made.reporter.error(Refused([Fault("unmatched", f"{'long.' * 30}{n}", path="x") for n in range(3)]))
    lines = made.err.getvalue().splitlines()
    assert sum(line.startswith("  - ") for line in lines) == 3
    assert max(len(re.sub(r"\x1b\[[0-9;]*m", "", line)) for line in lines) <= 80


def test_an_interruption(seen: Callable[..., Seen]) -> None:
    made = seen()
    made.reporter.interrupted()
    assert made.err.getvalue() == "interrupted\n"


# What is said


def test_notices_are_warnings(seen: Callable[..., Seen], run: Run) -> None:
    made = seen()
    made.reporter.plan(run.planned)
    warnings = [line for line in made.err.getvalue().splitlines() if line.startswith("warning: ")]
    assert len(warnings) == len(run.planned.notices) == 2
    assert "left-over-from-another-download.bin" in warnings[0]
    assert "image branch" in warnings[1]


def test_a_plan_from_headers_says_what_it_did_not_look_at(seen: Callable[..., Seen], run: Run) -> None:
    made = seen()
    made.reporter.plan(run.planned)
    text = made.out.getvalue()
    assert "Pending without --content" in text
    assert "sha256:" not in text
    assert "float32 -> bfloat16" in text
    assert "(high_noise)" in text and "(low_noise)" in text
    assert f"{HIGH} on transformer, strength 0.5:" in text
    assert "scale 0.25 = strength * alpha 2 / rank 4 (alpha from the file's tensors)" in text
    assert "(alpha from none stored: rank used)" in text
    assert "not applied, image branch of Wan2.1, which this base does not have: 7 modules" in text


def test_a_merge_says_where_its_output_is(seen: Callable[..., Seen], run: Run) -> None:
    made = seen()
    made.reporter.merged(run.merged)
    text = made.out.getvalue()
    assert f"Wrote {run.merged.out}: " in text
    assert f"Fingerprint {run.merged.marker.fingerprint}" in text
    assert "Kept" not in text


def test_a_float32_base_kept_as_it_is_gets_a_hint(
    seen: Callable[..., Seen], run: Run, tmp_path: Path
) -> None:
    kept = plan(run.base, [f"high={run.loras[0]}"])
    for options, n_hints in (({}, 1), ({"quiet": True}, 0), ({"json": True}, 0)):
        made = seen(**options)
        made.reporter.plan(kept)
        assert made.err.getvalue().count("hint: the base is stored in float32; --dtype bfloat16") == n_hints
    made = seen()
    made.reporter.plan(run.planned)
    assert "hint:" not in made.err.getvalue()


def places(text: str) -> int:
    return len(re.findall(r"^ +\d+ x ", text, re.MULTILINE))


def test_verbose_shows_every_place(seen: Callable[..., Seen], run: Run) -> None:
    n_places = [len({*where(matching.hits)}) for matching in run.planned.matchings]
    assert n_places[0] > SHOWN_ROWS >= n_places[1]
    short, long = seen(), seen(verbose=True)
    for made in (short, long):
        made.reporter.plan(run.planned)
    assert f"... and {n_places[0] - SHOWN_ROWS} more (--verbose shows them)" in short.out.getvalue()
    assert places(short.out.getvalue()) == SHOWN_ROWS + n_places[1]
    assert "--verbose" not in long.out.getvalue()
    assert places(long.out.getvalue()) == sum(n_places)


def test_a_merge_shows_places_only_when_asked(seen: Callable[..., Seen], run: Run) -> None:
    short, long = seen(), seen(verbose=True)
    for made in (short, long):
        made.reporter.merged(run.merged)
    assert places(short.out.getvalue()) == 0
    assert places(long.out.getvalue()) > SHOWN_ROWS


def test_check_says_what_does_not_hold(seen: Callable[..., Seen], run: Run) -> None:
    made = seen()
    made.reporter.checked(run.merged.out, check(run.merged.out, loras=run.loras))
    assert f"{run.merged.out}: fused and whole" in made.out.getvalue()
    assert f"holds {HIGH} on transformer, strength 0.5" in made.out.getvalue()
    assert f"{run.loras[0]}: fused already" in made.out.getvalue()
    made = seen()
    made.reporter.checked(run.base, check(run.base))
    assert f"{run.base}: not fused" in made.out.getvalue()


def test_the_demo_shows_how_it_is_done_by_hand(seen: Callable[..., Seen], run: Run) -> None:
    made = seen()
    made.reporter.demo(Demo(Path("some where"), run.merged, run.verified))
    assert "  fuselora merge --base 'some where/Wan2.2-tiny' --lora " in made.out.getvalue()
    assert " --out 'some where/Wan2.2-tiny-by-hand'\n" in made.out.getvalue()
    assert "  fuselora verify 'some where/Wan2.2-tiny-by-hand' --base " in made.out.getvalue()


# Progress


def test_plain_progress_is_a_line_now_and_then(
    seen: Callable[..., Seen], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, now = seen(), [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with made.reporter.phase("fuse", 4_000_000_000) as advance:
        advance(1_000_000_000)
        assert made.err.getvalue() == "fuse: 4.00 GB\n" or made.err.getvalue() == "fuse: 4 GB\n"
        now[0] += PLAIN_LINE_SECONDS
        advance(1_000_000_000)
        advance(1_000_000_000)
    first, second = made.err.getvalue().splitlines()
    assert (first, second) == ("fuse: 4 GB", "fuse: 2 GB of 4 GB, 200 MB/s, 10 s left")
    assert made.out.getvalue() == ""


@pytest.mark.parametrize("options", [{"quiet": True}, {"json": True}])
def test_no_progress_where_none_is_wanted(seen: Callable[..., Seen], options: dict[str, bool]) -> None:
    for terminal in (False, True):
        made = seen(terminal=terminal, **options)
        with made.reporter.phase("fuse", 100) as advance:
            advance(100)
        assert made.both == ""


def test_bars_on_a_terminal(seen: Callable[..., Seen]) -> None:
    made = seen(terminal=True)
    with made.reporter.phase("fuse", 2_000_000) as advance:
        advance(2_000_000)
    assert "fuse" in made.err.getvalue()
    assert "2.0/2.0 MB" in made.err.getvalue()
    assert made.out.getvalue() == ""


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (1234, "1.23 kB"),
        (999_499, "999 kB"),
        (999_999, "1 MB"),
        (4_210_000_000, "4.21 GB"),
        (114e9, "114 GB"),
        (12.5e12, "12.5 TB"),
        (1e15, "1e+03 TB"),
    ],
)
def test_amounts(n_bytes: float, text: str) -> None:
    assert amount(n_bytes) == text


def test_a_notice_with_a_line_end_is_one_line(seen: Callable[..., Seen], run: Run) -> None:
    made = seen()
    made.reporter._notices([Notice("x", "a\nerror: b")])
    assert made.err.getvalue() == "warning: a\\nerror: b\n"


@pytest.mark.parametrize(
    ("alpha", "config", "equation"),
    [
        (None, {"lora_alpha": 8, "r": 16}, "scale 1 = strength * alpha 8 / rank 16 "),
        (
            None,
            {"lora_alpha": 8, "r": 16, "use_rslora": True},
            "scale 4 = strength * alpha 8 / sqrt(rank 16) ",
        ),
        (4.0, {}, "scale 0.5 = strength * alpha 4 / rank 16 "),
    ],
)
def test_the_scale_is_what_the_equation_gives(
    tmp_path: Path, seen: Callable[..., Seen], alpha: float | None, config: dict[str, object], equation: str
) -> None:
    base = synth.write_safetensors(
        tmp_path / "base.safetensors", [tensor("blocks.0.attn1.to_q.weight", 32, 32)]
    )
    folder = tmp_path / "lora"
    specs = pair("blocks.0.attn1.to_q", 32, 32, rank=16, style=("lora_A", "lora_B"), alpha=alpha)
    lora = synth.write_safetensors(folder / "adapter_model.safetensors", specs)
    if config:
        (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", **config}))
    done = seen()
    done.reporter.plan(plan(base, [f"{folder if config else lora}:2"]))
    assert equation in done.out.getvalue()


def test_a_finished_factor_is_divided_by_nothing(tmp_path: Path, seen: Callable[..., Seen]) -> None:
    q = "blocks.0.attn1.to_q"
    base = synth.write_safetensors(tmp_path / "base.safetensors", [tensor(f"{q}.weight", 32, 32)])
    specs = [*pair(q, 32, 32, rank=16), tensor(f"{q}.alpha_scale", value=0.5)]
    done = seen()
    done.reporter.plan(plan(base, [synth.write_safetensors(tmp_path / "x.safetensors", specs)]))
    assert "scale 0.5 = strength * alpha 0.5 (alpha from the file's finished factors)" in done.out.getvalue()


def test_a_lora_in_the_place_of_the_base(tmp_path: Path) -> None:
    lora = synth.write_safetensors(tmp_path / "x.safetensors", pair("blocks.0.attn1.to_q"))
    with pytest.raises(Refused, match=r"x\.safetensors: is a LoRA, and no checkpoint"):
        plan(lora, [lora])


def test_two_files_of_one_name_are_told_apart(tmp_path: Path, seen: Callable[..., Seen]) -> None:
    """As most adapters are called pytorch_lora_weights.safetensors."""
    q = "blocks.0.attn1.to_q"
    base = synth.write_safetensors(tmp_path / "base.safetensors", [tensor(f"{q}.weight", 4, 4)])
    loras = [
        synth.write_safetensors(tmp_path / folder / "same.safetensors", pair(q, value=value))
        for folder, value in (("a", 1), ("b", 2))
    ]
    done = seen()
    done.reporter.plan(plan(base, loras))
    assert all(f"{lora} on transformer" in done.out.getvalue() for lora in loras)
