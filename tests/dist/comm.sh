#!/bin/sh
# Runs dist_comm on 1, 2, 3 and 4 ranks, each also in tiny pieces, on two pretended hosts, and both.
#   tests/dist/comm.sh [build folder]
# Prints a line for each run and, at the end, the closing line of t.h; a failing run's own output comes first.
build=${1:-build}
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
out=$(mktemp) || exit 1
trap 'rm -f "$out"' EXIT
pass=0 fail=0
for n in 1 2 3 4; do
  for hosts in 1 2; do
    [ "$hosts" -le "$n" ] || continue
    for chunk in "" 256; do
      name="communication: $n ranks, $hosts hosts${chunk:+, pieces of $chunk bytes}"
      if DT_COMM_HOSTS=$hosts DT_COMM_CHUNK=$chunk timeout 120 \
        mpirun --oversubscribe -n $n "$build/tests/dist_comm" > "$out" 2>&1; then
        pass=$((pass + 1))
        echo "ok $name"
      else
        fail=$((fail + 1))
        cat "$out"
        echo "FAIL $name"
      fi
    done
  done
done
echo "$pass passed, $fail failed, 0 skipped"
[ $fail = 0 ]
