#!/bin/sh
# Style: luacheck over all Lua, clang-format over all C where it is installed (version 14 or later; .clang-format says how).
cd "$(dirname "$0")/../.." || exit 2
p=0 f=0 s=0
if command -v luacheck > /dev/null 2>&1; then
  if out=$(luacheck --no-color -q stdlib examples tests 2>&1); then p=$((p + 1)); echo "ok luacheck"
  else f=$((f + 1)); echo "$out" | grep -E ':[0-9]+:' | head -n 40; echo "FAIL luacheck"; fi
else s=$((s + 1)); echo "skip luacheck: not installed (Debian: lua-check)"; fi
if command -v clang-format > /dev/null 2>&1; then
  out=$(find runtime kernels lua tests -name '*.[ch]' | LC_ALL=C sort | xargs clang-format --dry-run 2>&1 | grep -E 'warning:' | cut -d: -f1 | uniq -c)
  if [ -z "$out" ]; then p=$((p + 1)); echo "ok clang-format"
  else f=$((f + 1)); echo "$out" | head -n 40; echo "FAIL clang-format: 'clang-format -i FILE' formats a file"; fi
else s=$((s + 1)); echo "skip clang-format: not installed"; fi
for sh in $(git ls-files '*.sh' .ci/run tests/tools/ranks); do
  sh -n "$sh" || { f=$((f + 1)); echo "FAIL $sh: does not parse"; }
done
echo "$p passed, $f failed, $s skipped"
[ $f = 0 ]
