#!/usr/bin/env bash
# Sets up, builds everything, runs all tests, and the fuzz targets for ten seconds each.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh --tests
scripts/check_style.sh
scripts/build.sh
ctest --test-dir build --output-on-failure
scripts/fuzz.sh 10
