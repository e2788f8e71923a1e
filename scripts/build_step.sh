#!/usr/bin/env bash
# A base and its LoRAs -> a fused folder in STORE, recomputed and checked. Ends at the first thing that does not hold.
# HIGH and LOW are plain files, here or on the Hub, without :STRENGTH; what comes from the Hub is fetched once, into HF_HOME.
set -euo pipefail
for name in BASE HIGH LOW OUT STORE; do
  if [ -z "${!name:-}" ]; then
    echo "$name is not set. Usage: BASE=... HIGH=FILE LOW=FILE OUT=FOLDER STORE=FOLDER $0" >&2
    exit 2
  fi
done
stored="$STORE/$(basename "$OUT")" copy="$STORE/.$(basename "$OUT").new"
if [ -e "$stored" ] && [ ! -e "$stored/fused.json" ]; then
  echo "$stored is there and not of an earlier build: it stays" >&2
  exit 1
fi
export SOURCE_DATE_EPOCH="${SOURCE_DATE_EPOCH:-0}" # the same inputs give the same bytes, fused.json too

fuselora merge --base "$BASE" --high "$HIGH" --low "$LOW" --dtype bfloat16 --out "$OUT" --overwrite
fuselora verify "$OUT" --base "$BASE" --lora "$HIGH" --lora "$LOW"
fuselora check "$OUT"

# The copy gets its name when it is whole. Or: hf upload my-org/wan-fused "$OUT"
mkdir -p "$STORE"
rm -rf "$copy"
cp -R "$OUT" "$copy"
fuselora check "$copy" --digest
rm -rf "$stored"
mv "$copy" "$stored"
