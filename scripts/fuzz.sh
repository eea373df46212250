#!/usr/bin/env bash
# Fuzzes a target for a while: `scripts/fuzz.sh wire|ledger [SECONDS]` (default 60). libFuzzer with the coverage of stable
# rustc; needs a C++ compiler. New inputs go to target/fuzz/corpus; a crash is written there too, and fails the script.
set -euo pipefail
cd "$(dirname "$0")/.."
target="$1" seconds="${2:-60}"
build="${CARGO_TARGET_DIR:-$PWD/target}/fuzz"
export CARGO_TARGET_DIR="$build/build"
export RUSTFLAGS="--cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
-Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
-Cllvm-args=-sanitizer-coverage-trace-compares -Ccodegen-units=1"
cargo build --quiet --release --manifest-path rust/fuzz/Cargo.toml --target x86_64-unknown-linux-gnu --bin "$target"
mkdir -p "$build/corpus/$target"
"$build/build/x86_64-unknown-linux-gnu/release/$target" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 \
	-max_len=65536 -print_final_stats=1 -artifact_prefix="$build/corpus/crash-$target-" \
	"$build/corpus/$target" "rust/fuzz/corpus/$target"
