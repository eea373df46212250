#!/usr/bin/env bash
# Instructions of the hot paths, counted by valgrind, against scripts/instructions.txt: more than 5 % above fails.
# `scripts/instructions.sh --write` stores what is counted now. Counts repeat on a busy machine, times do not.
set -euo pipefail
cd "$(dirname "$0")/.."
command -v valgrind >/dev/null || { echo "valgrind is not installed; nothing was counted"; exit 0; }
stored=scripts/instructions.txt
cargo build --quiet --release -p sao-core --example hot_paths
program="${CARGO_TARGET_DIR:-target}/release/examples/hot_paths"
counted="$(mktemp)"
trap 'rm -f "$counted"' EXIT
for name in pack plan advantages encode decode buffer; do
	log="$(valgrind --tool=callgrind --callgrind-out-file=/dev/null --toggle-collect='*measured*' "$program" "$name" 2>&1)"
	echo "$name $(sed -n 's/.*Collected : *\([0-9]*\).*/\1/p' <<<"$log")" >>"$counted"
done
if [ "${1:-}" = --write ]; then
	cp "$counted" "$stored"
fi
join "$stored" "$counted" -j 1 --nocheck-order | awk '
	{ worse = $3 > 1.05 * $2; bad += worse; printf "%-12s %12.0f stored %12.0f now %s\n", $1, $2, $3, worse ? "MORE" : "" }
	END { exit bad > 0 }'
