#!/bin/sh
# Locks the dependencies in pyproject.toml with hashes, without index addresses.
set -eu
uv=${1:-uv}
lock() { # lock OUT GROUP...
    out=$1; shift
    groups=""; for group in "$@"; do groups="$groups --group $group"; done
    # shellcheck disable=SC2086
    "$uv" pip compile pyproject.toml $groups --universal --python-version 3.11 --generate-hashes \
        --no-emit-index-url --no-emit-find-links --no-strip-extras --no-annotate --quiet \
        --custom-compile-command "make lock" --output-file "$out"
}
lock requirements/run.lock build
lock requirements/dev.lock build dev
