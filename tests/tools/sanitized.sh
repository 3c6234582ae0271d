#!/bin/sh
# Runs what a sanitized build can tell most about:  sanitized.sh BUILD   (after `make asan` or `make ubsan` has built it)
# The C tests, collectives on 3 ranks, and short training scripts alone and on 2 ranks. A report of a sanitizer ends a program
# with a code other than 0. Leaks are looked for in what runs alone: Open MPI leaks by itself, from modules that it has unloaded by
# then, so that its leaks cannot be told by name.
cd "$(dirname "$0")/../.." || exit 2
b=$1
export ASAN_OPTIONS=detect_stack_use_after_return=1:strict_string_checks=1:exitcode=99
export UBSAN_OPTIONS=print_stacktrace=1
out=$(mktemp)
p=0 f=0
try() { # name, seconds, command...
  name=$1 seconds=$2
  shift 2
  if timeout -k 5 "$seconds" "$@" > "$out" 2>&1; then
    p=$((p + 1))
    echo "ok $name"
  else
    code=$?
    f=$((f + 1))
    grep -v '^ok ' "$out" | tail -n 40
    echo "FAIL $name (exit code $code)"
  fi
}
for t in "$b"/tests/test_*; do
  case $t in *.d) continue ;; esac
  try "${t##*/}" 600 "$t"
done
alone=$ASAN_OPTIONS ranked=$ASAN_OPTIONS:detect_leaks=0
ASAN_OPTIONS=$ranked
try "collectives on 3 ranks" 300 tests/tools/ranks 3 "$b/tests/dist_comm"
work=$(mktemp -d)
trap 'rm -rf "$out" "$work"' EXIT
printf 'In the beginning was the word, and the word was with us.\n%.0s' $(seq 100) > "$work/text.txt"
for s in tests/dist/dropout.lua "tests/dist/resume.lua --dir $work/r --every 1 --overwrite" "tests/dist/resume.lua --dir $work/r --resume auto" \
  "examples/own_model.lua" "examples/own_optimizer.lua" "tests/dist/recompute.lua --digest --how full --micro 3" \
  "tests/dist/recompute.lua --digest --kind cnn --how every=2" "tests/dist/recompute.lua --digest --how budget=200kB" \
  "examples/ported/deepspeed.lua" "examples/ported/horovod.lua" \
  "tests/dist/steps.lua --script examples/gpt_text.lua --data $work/text.txt --global 3 --micro 1 --samples 7"; do
  ASAN_OPTIONS=$alone
  # shellcheck disable=SC2086
  try "${s%% --d*} alone" 300 "$b/dtrain" $s --steps 3 --quiet
  ASAN_OPTIONS=$ranked
  # shellcheck disable=SC2086
  try "${s%% --d*} on 2 ranks" 300 tests/tools/ranks 2 "$b/dtrain" $s --steps 3 --quiet
done
printf 'return require("dtrain").job { modle = 1 }\n' > "$work/bad.lua"
ASAN_OPTIONS=$alone
try "a mistake in a script" 60 sh -c "! '$b/dtrain' '$work/bad.lua' 2> '$work/said' && grep -q \"no option 'modle'\" '$work/said'"
echo "$p passed, $f failed, 0 skipped"
[ $f = 0 ]
