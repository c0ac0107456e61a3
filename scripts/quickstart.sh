#!/usr/bin/env bash
# The main job: set up, build, train `nano` through four context stages on real text, measure, and let it write.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh
scripts/build.sh godwit

run=runs/quickstart
# On Ctrl-C the training saves its state and ends well: without this the script would go on with half a model.
trap 'printf "interrupted: the same command goes on from here\n" >&2; exit 130' INT TERM
if [[ ! -e $run/metrics.jsonl || -n ${FORCE:-} ]]; then
  rm -rf "$run"
  mkdir -p "$run"
  build/godwit tokenizer train datasets/kjv.txt.zst --vocab-size 2048 --out "$run/tokenizer"
  build/godwit data pack datasets/kjv.txt.zst --tokenizer "$run/tokenizer" --holdout 0.03 --out "$run/data"
fi
if [[ -e $run/finished ]]; then
  printf '%s is trained already: FORCE=1 trains it anew. It writes:\n' "$run" >&2
else
  resume=()
  if [[ -e $run/metrics.jsonl ]]; then resume=(--resume); fi
  build/godwit train configs/recipes/quickstart.toml "${resume[@]}"
  touch "$run/finished"
fi

echo
build/godwit generate --model "$run/model" --prompt "And it came to pass" --max-tokens 120 --temperature 0.8 --seed 1
cat <<'E2'


Try next:
  build/godwit generate --model runs/quickstart/model --prompt "Blessed are" --seed 2
  build/godwit eval ppl --model runs/quickstart/model --data runs/quickstart/data
  build/godwit plan kimi-k3
  build/godwit train configs/recipes/quickstart.toml --set out=runs/mine --set 'stage.0.steps=2000'
E2
