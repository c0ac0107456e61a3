#!/usr/bin/env bash
# Formatting, and the rule that includes point down only (a folder sees itself and the folders listed for it).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
mapfile -t sources < <(find godwit tests bench -name '*.cpp' -o -name '*.h' | sort)
clang-format-14 --dry-run -Werror "${sources[@]}"

declare -A sees=(
  [base]="base" [io]="base io" [text]="base text" [kernels]="base kernels" [ops]="base kernels ops" [dist]="base ops dist"
  [model]="base io ops dist model" [data]="base io text data" [train]="base io ops dist model data train"
  [infer]="base text ops dist model infer" [plan]="base model plan" [report]="base report" [rl]="base io text data ops dist model train infer rl"
  [serve]="base io text infer serve")
bad=0
for folder in "${!sees[@]}"; do
  [[ -d godwit/$folder ]] || continue
  while IFS=: read -r file line text; do
    target=$(sed -E 's/.*"godwit\/([a-z]+)\/.*/\1/' <<<"$text")
    [[ " ${sees[$folder]} " == *" $target "* ]] || { echo "$file:$line: $folder must not include $target" >&2; bad=1; }
  done < <(grep -rnE '#include "godwit/[a-z]+/' "godwit/$folder" --include='*.h' --include='*.cpp' --include='*.cu' --include='*.cuh' || true)
done
if grep -rnE '#include <torch/torch.h>' godwit --include='*.h'; then echo "torch/torch.h in a header" >&2; bad=1; fi
if grep -rnE '^#if.*CUDA' godwit/{model,train,infer,data,plan,cli} 2>/dev/null; then echo "CUDA conditionals above ops/" >&2; bad=1; fi
exit $bad
