#!/usr/bin/env bash
# One trajectory with a whole log as its observation, by length: rollout and training step, seconds and peak memory. The model is fine-tuned on
# logs of 16 to 40 lines first.
#   scripts/rl_long.sh [--device cuda] [LINES...]        2900 lines are about 32K tokens, 78000 a million
set -euo pipefail
godwit=${GODWIT:-build/godwit} out=${OUT_DIR:-runs/rl-long} device=(--device cpu)
if [[ ${1:-} == --device ]]; then device=(--device "$2"); shift 2; fi
lengths=("${@:-2900}")
exact=true
[[ ${device[1]} == cpu ]] || exact=${EXACT:-false}
mkdir -p "$out"
if [[ ! -d $out/sft/model ]]; then
  for lines in 16 24 40; do
    "$godwit" data demos log_search --count 1200 --options "{\"lines\": $lines, \"search\": false, \"failures\": 3}" --seed "$lines" --out "$out/demos-$lines.jsonl"
  done
  "$godwit" tokenizer train "$out"/demos-*.jsonl --vocab-size 448 --out "$out/tokenizer"
  "$godwit" data pack "$out"/demos-*.jsonl --tokenizer "$out/tokenizer" --holdout 0.03 --out "$out/data"
  "$godwit" train configs/recipes/sft-calculator.toml "${device[@]}" --set out="$out/sft" --set tokenizer="$out/tokenizer" \
    --set data.0.path="$out/data" --set stage.0.steps="${SFT_STEPS:-240}"
fi
for lines in "${lengths[@]}"; do
  rm -rf "$out/run-$lines"
  "$godwit" rl configs/recipes/rl-log-search.toml "${device[@]}" --set init="$out/sft/model" --set out="$out/run-$lines" \
    --set "environment.0.options={lines = $lines, search = false, failures = 3}" --set rollout.context=$((13 * lines + 2048)) \
    --set train.deterministic="$exact" ${RL_MORE:-} | grep steps
  python3 - "$out/run-$lines/metrics.jsonl" "$lines" <<'PY'
import json, sys
r = [json.loads(line) for line in open(sys.argv[1])][-1]
print(f"lines {sys.argv[2]}: {r['total_tokens'] // r['episodes']} tokens a trajectory, rollout {r['rollout_s']:.1f} s, training step {r['train_s']:.1f} s for "
      f"{r['episodes']} trajectories, success {r['success']:.2f}, max |dlogp| {r['max_dlogp']:.3g}, mean {r['mean_dlogp']:.3g}, grad norm {r['grad_norm']:.3g}")
PY
done
