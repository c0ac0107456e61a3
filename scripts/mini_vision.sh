#!/usr/bin/env bash
# The mini-vision recipe: data, training on a GPU, answers to held-out questions with blank and exchanged pictures beside; and the same text without pictures.
# Needs Python with pillow, numpy and scikit-learn (PYTHON=...) and some DejaVu fonts (FONTS=pattern). STEPS=... and SEED=... as in docs/vision.md.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
data=runs/mini-vision-data
if [[ ! -d $data/text ]]; then
  "${PYTHON:-python3}" python/make_vision_data.py "$data" --count 30000 --more read=500000 digits=50000 locate=160000 order=20000 --jobs "$(nproc)" \
    --fonts "${FONTS:-/usr/share/fonts/truetype/dejavu/DejaVu*.ttf}"
  build/godwit tokenizer train "$data/text.txt" datasets/kjv.txt.zst --vocab-size 512 --out "$data/tokenizer"
  build/godwit data pack "$data/train.jsonl" --tokenizer "$data/tokenizer" --out "$data/pictures"
  build/godwit data pack datasets/kjv.txt.zst --tokenizer "$data/tokenizer" --holdout 0.1 --out "$data/text"
fi
same=(--device cuda --set "stage.0.steps=${STEPS:-2600}" --set "seed=${SEED:-1}")
build/godwit train configs/recipes/mini-vision.toml "${same[@]}" "$@"
build/godwit train configs/recipes/mini-vision-text.toml "${same[@]}"
build/godwit eval vision --device cuda --model runs/mini-vision/model --data "$data/test.jsonl"
