#!/bin/sh
# Installs the system's programs that only some tests need, where root may (Debian, Ubuntu); says otherwise what is
# missing. Never fails: tests that lack a program are named at the end of the test run.
missing=
for pair in bwrap:bubblewrap unshare:util-linux ip:iproute2 git:git chromium:chromium; do
    command -v "${pair%%:*}" >/dev/null || missing="$missing ${pair#*:}"
done
[ -n "$missing" ] || exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "installing$missing"
    export DEBIAN_FRONTEND=noninteractive
    # The lists of packages may be too old, or absent as in a container's image.
    # shellcheck disable=SC2086
    { apt-get install -y --no-install-recommends $missing || { apt-get update && apt-get install -y --no-install-recommends $missing; }; } \
        >/dev/null 2>&1 && exit 0
fi
echo "not installed, so that some tests will not run:$missing" >&2
exit 0
