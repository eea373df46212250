#!/usr/bin/env bash
# ThreadSanitizer over the ring. std is not instrumented here, so what happens inside its mutexes and
# condition variables is unknown to it; scripts/tsan.supp names those. A data race in this code is reported and fails.
set -euo pipefail
cd "$(dirname "$0")/.."
export RUSTC_BOOTSTRAP=1 CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-$PWD/target}/tsan"
export RUSTFLAGS="-Zsanitizer=thread -Cunsafe-allow-abi-mismatch=sanitizer"
export TSAN_OPTIONS="suppressions=$PWD/scripts/tsan.supp halt_on_error=1"
setarch -R cargo test --quiet -p sao-core --target x86_64-unknown-linux-gnu --lib -- ring "$@"
