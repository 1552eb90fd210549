#!/usr/bin/env bash
# cut_off_test.sh ROOT DIR: run-gpu-checks, killed at random moments, has written the results of all parts that were done.
# SEED repeats a run; ROUNDS is the number of kills.
set -uo pipefail
root=$1 directory=$2
seed=${SEED:-$((RANDOM * 32768 + RANDOM))}
rounds=${ROUNDS:-5}
printf 'SEED=%s\n' "$seed"
RANDOM=$seed
failures=0
complain() { printf 'round %d: %s\n' "$round" "$*" && failures=$((failures + 1)); }
mkdir -p "$directory"
for ((round = 1; round <= rounds; ++round)); do
  out=$directory/cut-off-$round
  rm -rf "$out"
  delay_ms=$((1000 + (RANDOM * 32768 + RANDOM) % 30000))
  # A session of its own: the kill takes the running part too, as the end of a machine does.
  setsid "$(dirname "$0")/run-gpu-checks" --fake --root "$root" --out "$out" >"$directory/cut-off-$round.txt" 2>&1 &
  pid=$!
  sleep "$((delay_ms / 1000)).$(printf '%03d' $((delay_ms % 1000)))"
  kill -KILL -- "-$pid"
  wait "$pid" 2>/dev/null
  [ -s "$out/summary.txt" ] || { complain "no summary after $delay_ms ms" && continue; }
  # Each part that said that it was done has its result, and the summary has a verdict or "not run" for every part.
  printed=$(grep -cE '^[^ ]+ +(passed|failed|skipped) +[0-9]+\.[0-9] s' "$directory/cut-off-$round.txt")
  written=$(find "$out/parts" -name '*.json' | wc -l)
  [ "$written" -ge "$printed" ] || complain "$printed parts were done, $written results are there"
  left=$(grep -cE '^[^ ]+ +not run$' "$out/summary.txt")
  verdicts=$(grep -cE '^[^ ]+ +(passed|failed|skipped) +[0-9]+\.[0-9] s' "$out/summary.txt")
  planned=$("$(dirname "$0")/run-gpu-checks" --fake --root "$root" --list | wc -l)
  [ $((left + verdicts)) -eq "$planned" ] || complain "$verdicts verdicts and $left not run are not the $planned parts"
  [ "$verdicts" -ge "$printed" ] || complain "the summary has $verdicts of $printed verdicts"
  if command -v python3 >/dev/null; then
    for file in "$out/gpu-checks.json" "$out"/parts/*.json; do
      [ ! -e "$file" ] || python3 -m json.tool "$file" >/dev/null || complain "$file cannot be read"
    done
  fi
  printf 'killed after %5d ms: %d parts done, %d results written, %d not run\n' $delay_ms "$printed" "$written" "$left"
done
[ $failures = 0 ]
