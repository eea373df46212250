#!/usr/bin/env bash
# The tests of the core as on a CPU without AVX-512, and as on one without AVX2 too: those loops are compiled more than once.
set -euo pipefail
cd "$(dirname "$0")/.."
target="${CARGO_TARGET_DIR:-target}"
for cpu in avx2 base; do
	RUSTFLAGS="--cfg sao_cpu=\"$cpu\"" CARGO_TARGET_DIR="$target/cpu-$cpu" cargo test --quiet --release -p sao-core "$@"
done
