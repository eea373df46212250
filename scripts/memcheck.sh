#!/usr/bin/env bash
# The extension under valgrind: every entry of the core is used once, with memory that is freed, reused and borrowed.
# Fails when valgrind reports an invalid access or the use of an undefined value with the extension on the stack;
# what it says of the interpreter and of NumPy alone is not counted. Takes a few minutes.
set -euo pipefail
cd "$(dirname "$0")/.."
command -v valgrind >/dev/null || { echo "valgrind is not installed; nothing was checked"; exit 0; }
log="$(mktemp)"
trap 'rm -f "$log"' EXIT
PYTHONMALLOC=malloc valgrind --log-file="$log" --num-callers=30 --undef-value-errors=yes \
	"${PYTHON:-.venv/bin/python}" scripts/memcheck.py
awk -v RS='' '
	/Invalid (read|write|free)|uninitialised|Mismatched|overlap/ && /_core\.abi3\.so|sao_core/ { print; bad++ }
	END { print bad + 0, "reports with the extension on the stack"; exit bad > 0 }' \
	<(sed 's/^==[0-9]*== \?//' "$log")
