"""The bench's document as tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

OUTSIDE = "start and end of Python"


def text(document: dict[str, Any]) -> str:
    """The whole document as tables."""
    parts = [_machine(document), *map(_case, document["cases"])]
    if document["startup"]:
        parts.append(_table("Start-up, files in the page cache", document["startup"], ratios=False))
    if document["memory"]:
        parts.append(_memory(document["memory"]))
    return "\n\n".join(parts)


def _machine(document: dict[str, Any]) -> str:
    facts = document["machine"]
    versions = ", ".join(f"{name} {number or 'absent'}" for name, number in facts["versions"].items())
    touched = "touched" if document["memory_touched"] else "as it comes"
    return (
        f"{facts['cores']} cores of {facts['cpu']}, {facts['memory_bytes'] / 1e9:.0f} GB, {facts['system']}, "
        f"load {facts['load']:.1f}\n"
        f"{facts['file_system']}, inputs {document['cache']}, free memory {touched}\n"
        f"fuselora {facts['fuselora']}, Python {facts['python']}, {versions}"
    )


def _case(case: dict[str, Any]) -> str:
    if case["left_out"]:
        return f"{case['case']}: left out: {case['left_out']}"
    table = _table(_title(case), case["rows"], ratios=True)
    return f"{table}\n{_profile(case['profile'])}" if case["profile"] else table


def _title(case: dict[str, Any]) -> str:
    n_loras = len(case["strengths"])
    base = f"{case['base_bytes'] / 1e9:.2f} GB in {case['base_dtype']}"
    loras = (
        f"{n_loras} LoRA{'s' * (n_loras > 1)} of {case['lora_bytes'] / 1e6:.0f} MB in {case['lora_dtype']}"
    )
    kernel = case["math"].get("kernel", "none")
    io = f"{case['io']['read']} reads, {case['io']['write']} writes"
    return f"{case['case']}: {base}, {loras}, rank {case['rank']}; kernel {kernel}; {io}"


def _table(title: str, rows: Sequence[dict[str, Any]], *, ratios: bool) -> str:
    width = max(len(row["command"]) for row in rows)
    head = f"{'seconds':{width}} {'median':>7} {'min':>7} {'max':>7} {'CPU':>7} {'peak MiB':>8} {'runs':>4}"
    lines = [title, head + f" {'x cp':>6} {'x cp+sha':>8} {'equal':>7}" * ratios]
    for row in rows:
        if row["samples"]:
            lines.append(f"{row['command']:{width}}" + _figures(row, ratios))
        if row["left_out"]:
            lines.append(f"{row['command']:{width}} left out: {row['left_out']}")
    return "\n".join(lines)


def _figures(row: dict[str, Any], ratios: bool) -> str:
    times = "".join(f" {row[key]:7.2f}" for key in ("median", "min", "max", "cpu_seconds"))
    found = f"{times} {row['peak_bytes'] / 2**20:8.0f} {len(row['samples']):4}"
    if not ratios:
        return found
    equal = "" if row["equal"] is None else f"{row['equal']:7.2%}"
    return (
        f"{found} {_ratio(row['ratio_to_copy'])} {_ratio(row['ratio_to_digested_copy']):>8} {equal}".rstrip()
    )


def _ratio(value: float | None) -> str:
    return f"{value:6.2f}" if value is not None else " " * 6


def _memory(rows: Sequence[dict[str, Any]]) -> str:
    title = "peak memory of a merge"
    width = max(len(title), *(len(row["case"]) for row in rows))
    lines = [f"{title:{width}} {'MiB':>6} {'of first':>8} {'seconds':>8}"]
    for row in rows:
        if row["left_out"]:
            lines.append(f"{row['case']:{width}} left out: {row['left_out']}")
        else:
            of_first = row["peak_bytes"] / rows[0]["peak_bytes"] if rows[0]["peak_bytes"] else 1.0
            peak = f"{row['peak_bytes'] / 2**20:6.0f}"
            lines.append(f"{row['case']:{width}} {peak} {of_first:8.3f} {row['seconds']:8.2f}")
    return "\n".join(lines)


def _profile(profile: dict[str, Any]) -> str:
    head = f"where {profile['seconds']:.2f} s of a merge go"
    width = max(len(head), len(OUTSIDE))
    lines = [f"{head:{width}} {'calls':>6} {'wall':>7} {'waiting':>8} {'CPU':>7}"]
    lines.append(f"{OUTSIDE:{width}} {'':6} {profile['seconds'] - profile['inside']:7.2f}")
    lines += [_spent(phase, width) for phase in profile["phases"]]
    rest = profile["inside"] - sum(phase["wall"] for phase in profile["phases"])
    lines.append(f"{'match, plan':{width}} {'':6} {rest:7.2f}")
    lines += [_spent({**lane, "name": f"  lane {lane['name']}"}, width) for lane in profile["lanes"]]
    return "\n".join(lines)


def _spent(row: dict[str, Any], width: int) -> str:
    times = f"{row['wall']:7.2f} {row['waiting']:8.2f} {row['cpu']:7.2f}"
    return f"{row['name']:{width}} {row['calls']:6} {times}"
