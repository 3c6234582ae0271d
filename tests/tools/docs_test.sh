#!/bin/sh
# docs/ops.md is what the op table says, and every file that the guides name exists:  docs_test.sh BUILD
cd "$(dirname "$0")/../.." || exit 2
p=0 f=0
verdict() {
  if [ "$1" = 0 ]; then p=$((p + 1)); echo "ok $2"; else f=$((f + 1)); echo "FAIL $2"; fi
}
"$1/opsdoc" | cmp - docs/ops.md
verdict $? "docs/ops.md is current (else: make docs)"
missing=0
for doc in README.md CONTRIBUTING.md docs/*.md; do
  for path in $(grep -oE '`(runtime|kernels|lua|stdlib|examples|tests|docs)/[A-Za-z0-9_./-]+`|\]\([A-Za-z0-9_./-]+\)' "$doc" |
    sed 's/^`//; s/`$//; s/^\](//; s/)$//'); do
    [ -e "$path" ] || [ -e "$(dirname "$doc")/$path" ] || { echo "  $doc names $path, which is not there"; missing=1; }
  done
done
verdict $missing "files that the guides name are there"
stale=0
for target in $(grep -ohE '`make [a-z-]+' README.md CONTRIBUTING.md docs/*.md | sed 's/`make //' | sort -u); do
  grep -qE "^$target:.*## " Makefile || { echo "  a guide says 'make $target', the Makefile has no such target"; stale=1; }
done
verdict $stale "targets that the guides name are there"
echo "$p passed, $f failed, 0 skipped"
[ $f = 0 ]
