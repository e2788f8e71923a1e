#!/usr/bin/env bash
# A base and its LoRAs -> a fused folder in STORE, recomputed and checked. Ends at the first thing that does not hold.
# BASE, HIGH and LOW are what `fuselora merge` takes; what comes from the Hub is fetched once, into HF_HOME.
set -euo pipefail
: "${BASE:?}" "${HIGH:?}" "${LOW:?}" "${OUT:?}" "${STORE:?}"
export SOURCE_DATE_EPOCH="${SOURCE_DATE_EPOCH:-0}" # the same inputs give the same bytes, fused.json too

fuselora merge --base "$BASE" --high "$HIGH" --low "$LOW" --dtype bfloat16 --out "$OUT"
fuselora verify "$OUT" --base "$BASE" --lora "$HIGH" --lora "$LOW"
fuselora check "$OUT"

mkdir -p "$STORE"
cp -R "$OUT" "$STORE/" # or: hf upload my-org/wan-fused "$OUT"
fuselora check "$STORE/$(basename "$OUT")" --digest
