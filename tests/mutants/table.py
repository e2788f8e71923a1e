"""What is broken, and which tests are to notice."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutant:
    """In ``file`` of the package ``old``, which stands there once, becomes ``new``; ``tests`` then fail."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


ARITHMETIC = ("tests/test_arithmetic.py", "tests/test_pipeline.py")
STAGING = ("tests/output/test_staging.py",)
FILES = ("tests/engine/test_sink.py", "tests/output/test_disk.py")
VERIFY = ("tests/test_verify.py",)
CHECK = ("tests/check/test_folder.py",)
GUARD = ("tests/serving/test_guard.py",)
CASES = "tests/cases"

MUTANTS = (
    # the arithmetic
    Mutant(
        "a pair is added twice",
        "delta/low_rank.py",
        "sums.add_product(total, up[first:last], down, scale)",
        "sums.add_product(total, up[first:last], down, 2 * scale)",
        ARITHMETIC,
    ),
    Mutant(
        "a bfloat16 pair is added twice",
        "engine/kernel.py",
        "out[there].addmm_(up, self.down, alpha=self.scale)",
        "out[there].addmm_(up, self.down, alpha=2 * self.scale)",
        ("tests/engine/test_kernel.py",),
    ),
    Mutant(
        "sums are kept in bfloat16",
        "engine/kernel.py",
        "            add(total, base, first, last)\n",
        "            add(total, base, first, last)\n            total.copy_(total.bfloat16())\n",
        ("tests/engine/test_kernel.py", *ARITHMETIC),
    ),
    Mutant(
        "the reference rounds by way of float32",
        "delta/rounding.py",
        "return _to_odd_float32(exact).to(dtype)",
        "return exact.to(torch.float32).to(dtype)",
        ("tests/delta/test_rounding.py",),
    ),
    Mutant(
        "the reference sums with a matrix product",
        "delta/sums.py",
        "    product = up.new_zeros((*down.shape[:-2], up.shape[-2], down.shape[-1]))\n",
        "    return torch.matmul(up, down)\n"
        "    product = up.new_zeros((*down.shape[:-2], up.shape[-2], down.shape[-1]))\n",
        ("tests/delta/test_sums.py",),
    ),
    Mutant(
        "the last LoRA is forgotten",
        "engine/kernel.py",
        "for delta in step.deltas)\n\n\n@dataclass(frozen=True, slots=True)\nclass _WideSum",
        "for delta in step.deltas[:1])\n\n\n@dataclass(frozen=True, slots=True)\nclass _WideSum",
        ARITHMETIC,
    ),
    Mutant(
        "a strength counts twice",
        "steps.py",
        "return self.strength * self.ratio",
        "return self.strength * self.strength * self.ratio",
        ARITHMETIC,
    ),
    Mutant(
        "a strength is left out",
        "steps.py",
        "return self.strength * self.ratio",
        "return self.ratio",
        ARITHMETIC,
    ),
    Mutant(
        "a replacement ignores its strength",
        "delta/adders.py",
        "if strength == 1:",
        "if strength:",
        (f"{CASES}/test_moving.py",),
    ),
    Mutant(
        "an overflow is written",
        "engine/kernel.py",
        "if not all_finite(out[rows]):",
        "if not all_finite(base[rows]):",
        ("tests/engine/test_kernel.py",),
    ),
    Mutant(
        "chunks are cut with a short tail",
        "steps.py",
        "n_chunks = max(1, rows // per_chunk)",
        "n_chunks = max(1, -(-rows // per_chunk))",
        ("tests/test_planning.py",),
    ),
    # scales
    Mutant(
        "the stored alpha is dropped",
        "lora/scale.py",
        'return Alpha(self.value, "tensor", rank, rank)',
        'return Alpha(rank, "tensor", rank, rank)',
        ("tests/lora/test_scale.py",),
    ),
    Mutant(
        "rank-stabilised alphas are divided by the rank",
        "lora/scale.py",
        'return Alpha(self.value, "rs_lora", math.sqrt(rank), rank)',
        'return Alpha(self.value, "rs_lora", rank, rank)',
        ("tests/lora",),
    ),
    Mutant(
        "--alpha is beaten by adapter_config.json",
        "lora/scale.py",
        "if option is not None:",
        "if option is not None and config is None:",
        ("tests/lora/test_scale.py",),
    ),
    # rows
    Mutant(
        "halves are not swapped",
        "families/runs.py",
        "found.append((Run(whole.first, half, half), Run(whole.first + half, 0, half)))",
        "found.append((Run(whole.first, 0, half), Run(whole.first + half, half, half)))",
        ("tests/test_rows.py", "tests/families"),
    ),
    Mutant(
        "q, k and v of a fused layer are stacked from the end",
        "families/runs.py",
        "starts = [sum(sizes[:n]) for n in range(len(sizes))]",
        "starts = [sum(sizes[n + 1 :]) for n in range(len(sizes))]",
        ("tests/test_rows.py", "tests/families"),
    ),
    Mutant(
        "heads are not interleaved",
        "families/runs.py",
        "Run((h * n_parts + part) * head, h * head, head)",
        "Run((part * n_heads + h) * head, h * head, head)",
        ("tests/test_rows.py", "tests/families"),
    ),
    # what is refused
    Mutant(
        "the files of a list go to the experts in reverse",
        "targets.py",
        "return (models[spec.position],)",
        "return (models[-1 - spec.position],)",
        ("tests/test_targets.py",),
    ),
    Mutant(
        "a file named for the other expert passes",
        "targets.py",
        "if expected is None or said == expected:",
        "if expected is None or said:",
        ("tests/test_targets.py",),
    ),
    Mutant(
        "modules without a home are skipped in silence",
        "misses.py",
        "        else:\n            unmatched.append(miss)\n",
        "        else:\n            skipped.append(Skip(miss.module, ZERO_VALUED))\n",
        ("tests/test_faults.py", "tests/test_pipeline.py"),
    ),
    Mutant(
        "--strict allows skips",
        "misses.py",
        "if request.strict:",
        "if not request:",
        ("tests/test_faults.py",),
    ),
    Mutant(
        "a LoRA may be given twice",
        "content.py",
        "if firsts[0] is not matching:",
        "if not firsts:",
        ("tests/test_content.py",),
    ),
    Mutant(
        "a LoRA with NaN passes",
        "content.py",
        "nonfinite=tuple(t.name for t in tensors if not t.finite)",
        "nonfinite=()",
        ("tests/test_content.py",),
    ),
    Mutant(
        "Ctrl-C is raised inside the locks of threads",
        "interrupts.py",
        "signal.signal(signal.SIGINT, held.note)",
        "held.deliver()",
        ("tests/test_interrupts.py",),
    ),
    Mutant(
        "linear layers are transposed as foreign configurations say",
        "match.py",
        "modules = tuple(map(_of_linear, assignment.modules)) if is_linear else assignment.modules",
        "modules = assignment.modules",
        ("tests/oracle/test_peft_config.py",),
    ),
    Mutant(
        "a fused base is fused again",
        "faults.py",
        "if not checkpoint.is_fused or (request.stack and",
        "if not checkpoint.is_fused or (not request.stack and",
        ("tests/test_faults.py", "tests/test_pipeline.py"),
    ),
    Mutant(
        "--stack adds what the base holds",
        "content.py",
        "if lora is not None:\n            held_as",
        "if lora is matching:\n            held_as",
        ("tests/test_content.py",),
    ),
    # what is on disk
    Mutant(
        "a shard is not on disk when it is recorded",
        "engine/sink.py",
        "        self.write_rest()\n        os.fsync(self.descriptor)\n",
        "        self.write_rest()\n",
        FILES,
    ),
    Mutant(
        "small files are not on disk when OUT is published",
        "output/staging.py",
        "        sync_tree(stage.folder)\n",
        "",
        STAGING,
    ),
    Mutant(
        "the name of OUT is not on disk when the run ends",
        "output/staging.py",
        "sync_folder(stage.out if stage.mounted else stage.out.parent)",
        "stage.out.parent.stat()",
        STAGING,
    ),
    Mutant(
        "a folder without a marker is published",
        "output/staging.py",
        "        occupancy.refuse_incomplete(stage.place())\n",
        "",
        STAGING,
    ),
    Mutant(
        "a shard in the journal is trusted unread",
        "output/journal.py",
        "and sha256_file(file) == entry.sha256",
        "and bool(entry.sha256)",
        ("tests/output/test_journal.py",),
    ),
    Mutant(
        "a shard of another base is kept",
        "output/journal.py",
        "return entry.base.matches(base_file.stat()) and",
        "return base_file.exists() and",
        ("tests/output/test_journal.py",),
    ),
    Mutant(
        "a journal of another plan is taken over",
        "output/journal.py",
        "!= [SCHEMA, __version__, fingerprint]:",
        "!= [SCHEMA, __version__, header.get('fingerprint')]:",
        ("tests/output/test_journal.py",),
    ),
    Mutant(
        "--overwrite removes files that are not ours",
        "output/occupancy.py",
        "    _refuse_strangers(out, _strangers(stage))\n",
        "",
        STAGING,
    ),
    Mutant(
        "a user's folder is taken for a partial run",
        "output/occupancy.py",
        "    if not is_ours(folder):\n",
        "    if not folder:\n",
        STAGING,
    ),
    Mutant(
        "two runs write at once",
        "output/lock.py",
        "if not _locked(descriptor, fcntl.LOCK_EX):",
        "if not descriptor:",
        ("tests/output/test_lock.py",),
    ),
    Mutant(
        "space is not checked",
        "output/space.py",
        "if free is None or n_bytes <= free:",
        "if free is None or n_bytes:",
        ("tests/output/test_space.py",),
    ),
    Mutant(
        "a file that changed since its header was read passes",
        "header.py",
        "    if not header.state.is_same(state(found)):\n        raise changed(header.path)\n",
        "",
        ("tests/test_content.py", "tests/test_build.py", "tests/engine/test_stream.py"),
    ),
    Mutant(
        "a base that was replaced before its turn came passes",
        "engine/stream.py",
        "base.sha256 or not same:",
        "base.sha256:",
        ("tests/test_build.py", "tests/engine/test_stream.py"),
    ),
    Mutant(
        "a file that only keeps its date passes",
        "reading.py",
        "        return self.ctime_ns == now.ctime_ns or ",
        "        return True or ",
        ("tests/test_build.py",),
    ),
    Mutant(
        "files go into whatever stands in the stage's place",
        "output/staging.py",
        "        if (what := self._lost()) is not None:\n",
        "        if (what := None) is not None:\n",
        STAGING,
    ),
    Mutant(
        "two runs go on once a lock is removed",
        "output/staging.py",
        "        if not lock.is_at(self.lock, self.opened.lock):\n",
        "        if not self.opened:\n",
        STAGING,
    ),
    Mutant(
        "a cut shard is published",
        "output/occupancy.py",
        "if (folder / path).stat().st_size != n_bytes]",
        "if not (folder / path).exists()]",
        STAGING,
    ),
    Mutant(
        "OpenCLIP's q and k are mixed up",
        "inner_encoders.py",
        'PROJECTIONS = ("q_proj", "k_proj", "v_proj")',
        'PROJECTIONS = ("k_proj", "q_proj", "v_proj")',
        ("tests/test_inner_encoders.py",),
    ),
    Mutant(
        "an index knows a wrong size",
        "output/index.py",
        '"total_size": total_size}',
        '"total_size": total_size + 8}',
        ("tests/output/test_index.py",),
    ),
    # what is said of it
    Mutant(
        "the fingerprint does not know scales",
        "fingerprint.py",
        "assignment.strength * hit.block, hit.ratio,",
        "1,",
        ("tests/test_planning.py", "tests/test_pipeline.py"),
    ),
    Mutant(
        "a digest is not compared",
        "check/folder.py",
        "if sha256 == record.sha256:",
        "if sha256:",
        CHECK,
    ),
    Mutant(
        "a link may leave a fused folder",
        "check/folder.py",
        "if not any(real.is_relative_to(root) for root in _roots(folder)):",
        "if not real:",
        CHECK,
    ),
    Mutant(
        "another shard's fingerprint passes",
        "check/folder.py",
        "if carried != marker.fingerprint and not kept:",
        "if carried is None and not kept:",
        CHECK,
    ),
    Mutant(
        "the guard lets a fused LoRA pass",
        "serving/guard.py",
        "if any(one.records for one in compared):",
        "if all(one.unknown for one in compared):",
        GUARD,
    ),
    Mutant(
        "the guard takes every policy for allow",
        "serving/guard.py",
        'if value not in ("allow", "warn"):',
        "if value is None:",
        GUARD,
    ),
    Mutant(
        "verify compares copied tensors with nothing",
        "compare.py",
        'return _Verdict("copied", None if same else wrong)',
        'return _Verdict("copied", None if wrong else wrong)',
        VERIFY,
    ),
    Mutant(
        "verify has no bound",
        "compare.py",
        "if distance.beyond:",
        "if not distance:",
        VERIFY,
    ),
    Mutant(
        "verify lets a second rounding pass",
        "compare.py",
        "if distance.unexplained > UNEXPLAINED_SHARE * distance.elements:",
        "if distance.unexplained > distance.elements:",
        (*VERIFY, "tests/test_compare.py"),
    ),
    Mutant(
        "terminal escapes are printed",
        "escape.py",
        "plain = _CONTROL.sub(lambda found: ascii(found[0])[1:-1], str(text))",
        "plain = str(text)",
        ("tests/test_escape.py", "tests/test_report.py"),
    ),
)
