#!/usr/bin/env bash
# Sets up what the build needs: Debian or Ubuntu packages, and LibTorch from the PyTorch wheel (a virtual environment in .venv, unless the
# python3 on the PATH already has a usable torch). Run again, it does nothing; once set up it needs no network.
# pip's own settings are honoured (PIP_INDEX_URL, pip.conf): point it at a CPU-only index to avoid a CUDA build of several GB.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

torch_version=2.13.0
packages=(build-essential cmake ninja-build ccache mold python3-venv python3-dev zstd
  libcli11-dev nlohmann-json3-dev libtomlplusplus-dev libspdlog-dev libfmt-dev libgtest-dev libgmock-dev libzstd-dev libxxhash-dev libgloo-dev
  libjpeg-dev libpng-dev libwebp-dev libsqlite3-dev)
# Boost 1.81 or newer: Debian 12 has it under its number only.
packages+=("$(. /etc/os-release 2>/dev/null; [[ ${ID:-}${VERSION_ID:-} == debian12 ]] && echo libboost1.81-dev || echo libboost-dev)")
if [[ "${1:-}" == --tests ]]; then
  packages+=(clang-format-14 clang-14 libclang-rt-14-dev python3-jsonschema libavformat-dev libavcodec-dev libswscale-dev)
  # The page is tested where there is a Chromium: Ubuntu's package is a snap, which containers cannot install.
  if [[ $(. /etc/os-release 2>/dev/null; echo "${ID:-}") == debian ]]; then packages+=(chromium); fi
fi

say() { printf '\033[1m==>\033[0m %s\n' "$*" >&2; }

missing=()
if command -v dpkg-query >/dev/null; then
  for package in "${packages[@]}"; do
    dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
  done
else
  say "no dpkg here: install the equivalents of ${packages[*]} yourself if the build misses them"
fi
if ((${#missing[@]})); then
  say "installing ${missing[*]}"
  as_root=()
  if [[ $(id -u) != 0 ]]; then
    command -v sudo >/dev/null || { echo "setup: missing packages: ${missing[*]}. Neither root nor sudo here: ask for them to be installed." >&2; exit 1; }
    as_root=(sudo)
  fi
  "${as_root[@]}" apt-get update -qq
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi

# A torch is usable from 2.11 on, with its CMake files.
usable='import sys, os, torch
v = tuple(int(x) for x in torch.__version__.split("+")[0].split(".")[:2])
sys.exit(0 if v >= (2, 11) and os.path.isdir(torch.utils.cmake_prefix_path) else 1)'
if .venv/bin/python3 -c "$usable" 2>/dev/null; then
  :
elif python3 -c "$usable" 2>/dev/null; then
  :
else
  say "installing torch $torch_version into .venv"
  [[ -x .venv/bin/python3 ]] || python3 -m venv .venv
  .venv/bin/python3 -m pip install --quiet "torch==$torch_version" numpy
fi
say "set up"
