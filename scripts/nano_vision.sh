#!/usr/bin/env bash
# The digits recipe: data, training, accuracy on sheets of other writers with blank and exchanged pictures beside.
# Needs Python with pillow, numpy and scikit-learn (PYTHON=...).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
data=runs/nano-vision-data
if [[ ! -d $data/text ]]; then
  "${PYTHON:-python3}" python/make_vision_data.py "$data" --tasks digits --count 12000
  build/godwit tokenizer train "$data/text.txt" datasets/kjv.txt.zst --vocab-size 512 --out "$data/tokenizer"
  build/godwit data pack "$data/train.jsonl" --tokenizer "$data/tokenizer" --out "$data/pictures"
  zstd -dcq datasets/kjv.txt.zst | head -c 400000 >"$data/words.txt" || true  # head ends first
  build/godwit data pack "$data/words.txt" --tokenizer "$data/tokenizer" --holdout 0.03 --out "$data/text"
fi
build/godwit train configs/recipes/nano-vision.toml "$@"
build/godwit eval vision --model runs/nano-vision/model --data "$data/test.jsonl"
