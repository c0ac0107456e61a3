#!/usr/bin/env bash
# Configures (once) and builds into build/. Arguments are the targets to build, all by default.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ ! -f build/build.ninja ]]; then
  cmake --preset cpu >build.log 2>&1 || { cat build.log >&2; exit 1; }
  mv build.log build/configure.log
fi
exec ninja -C build "$@"
