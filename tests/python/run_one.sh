#!/usr/bin/env bash
# Runs one test of this folder by the given Python: run_one.sh PYTHON NAME. It prints one line, and all output of a failure.
set -uo pipefail
log=$(mktemp)
trap 'rm -f "$log"' EXIT
began=$SECONDS
timeout 3600 "$1" -W ignore "$(dirname "$0")/$2_test.py" </dev/null >"$log" 2>&1
status=$?
skips=$(grep -E '^skipped: |^OK \(skipped=' "$log")
case $status in
  0) echo "passed: $2, $((SECONDS - began)) s${skips:+ ($skips)}" ;;
  77) echo "SKIPPED: $2: ${skips#skipped: }" ;;
  124) sed "s/^/$2: /" "$log" && echo "FAILED: $2, it did not end in an hour" && exit 1 ;;
  *) sed "s/^/$2: /" "$log" && echo "FAILED: $2, exit code $status" && exit 1 ;;
esac
