#!/usr/bin/env bash
# Runs the models of the concurrent core under loom: those in `src/` beside what they are of, and `tests/models.rs`.
set -euo pipefail
cd "$(dirname "$0")/.."
export RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-target}/loom"
cargo test --quiet --profile models -p sao-core --lib -- models "$@"
cargo test --quiet --profile models -p sao-core --test models "$@"
