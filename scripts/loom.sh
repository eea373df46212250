#!/usr/bin/env bash
# Runs the models of the concurrent core under loom: `src/ring.rs`, `src/budget.rs`, `src/shared/` and `tests/models.rs`.
set -euo pipefail
cd "$(dirname "$0")/.."
export RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-target}/loom"
cargo test --quiet --release -p sao-core --lib -- models "$@"
cargo test --quiet --release -p sao-core --test models "$@"
