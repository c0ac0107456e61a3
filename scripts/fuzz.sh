#!/usr/bin/env bash
# Builds the fuzz targets of tests/fuzz with clang and runs each on its corpus for SECONDS (default 10; 0: the corpus alone).
#   scripts/fuzz.sh [SECONDS] [TARGET...]        targets: safetensors config recipe tokenizer shards jsonl image media request xtml schema, video where ffmpeg's libraries are
# A finding ends the script; its input lies in build/fuzz/findings. Fix the cause, then keep the input in tests/fuzz/corpus.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
seconds=${1:-10}
shift || true
targets=("$@")
[[ -f build/fuzz/build.ninja ]] || cmake -S tests/fuzz -B build/fuzz -G Ninja -DCMAKE_CXX_COMPILER=clang++-14 >/dev/null
if ((${#targets[@]} == 0)); then
  targets=(safetensors config recipe tokenizer shards jsonl image media request xtml schema)
  ! grep -q '^FFMPEG_INCLUDE_DIR:.*NOTFOUND' build/fuzz/CMakeCache.txt && targets+=(video)
fi
ninja -C build/fuzz --quiet "${targets[@]/%/_fuzz}"
mkdir -p build/fuzz/findings
for target in "${targets[@]}"; do
  corpus=tests/fuzz/corpus/$target
  found=build/fuzz/new/$target
  mkdir -p "$found"
  limit=(-max_total_time="$seconds")
  [[ $seconds != 0 ]] || limit=(-runs=0)
  printf '%s: ' "$target"
  log=build/fuzz/$target.log
  "build/fuzz/${target}_fuzz" "${limit[@]}" -timeout=10 -rss_limit_mb=2048 -malloc_limit_mb=1024 -max_len=65536 \
    -artifact_prefix=build/fuzz/findings/"$target"- -print_final_stats=1 "$found" "$corpus" >"$log" 2>&1 ||
    { tail -60 "$log"; exit 1; }
  sed -n 's/^stat::number_of_executed_units: *//p' "$log" | tr '\n' ' '
  echo "inputs, nothing found"
done
