#!/bin/sh
# Runs each fuzzer of a build for some seconds from the corpus in tests/fuzz/NAME/ (when there is one):  fuzz.sh BUILD SECONDS
# What it finds is left in BUILD/fuzz/; the input that broke a reader is the argument that reproduces it.
cd "$(dirname "$0")/../.." || exit 2
b=$1 seconds=$2 p=0 f=0
for src in tests/fuzz/fuzz_*.c; do
  [ -e "$src" ] || continue
  name=$(basename "$src" .c)
  work=$b/fuzz/$name.corpus
  mkdir -p "$work"
  seeds=tests/fuzz/${name#fuzz_}
  [ -d "$seeds" ] || seeds=
  # shellcheck disable=SC2086
  if timeout -k 5 $((seconds + 120)) "$b/fuzz/$name" -max_total_time="$seconds" -rss_limit_mb=4096 -timeout=10 -max_len=4096 \
    -artifact_prefix="$b/fuzz/$name." -print_final_stats=1 "$work" $seeds > "$b/fuzz/$name.log" 2>&1; then
    p=$((p + 1))
    echo "ok $name: $(sed -n 's/stat::number_of_executed_units: *//p' "$b/fuzz/$name.log") inputs"
  else
    f=$((f + 1))
    tail -n 40 "$b/fuzz/$name.log"
    echo "FAIL $name (its input is in $b/fuzz/)"
  fi
done
echo "$p passed, $f failed, 0 skipped"
[ $f = 0 ] && [ $p -gt 0 ]
