#!/bin/sh
# floors.sh sees a violation of each kind: each is planted into a copy of the tree, alone, and must be named.
cd "$(dirname "$0")/../.." || exit 2
tree=$(mktemp -d) || exit 2
trap 'rm -rf "$tree"' EXIT
passed=0 failed=0
# plant RULE FILE LINE: FILE gets the line at its end; floors.sh must fail and name the rule and the place
plant() {
  rm -rf "$tree"/* && cp -r runtime kernels lua "$tree" || exit 2
  mkdir -p "$tree/$(dirname "$2")" && printf '%s\n' "$3" >> "$tree/$2"
  out=$(sh tests/tools/floors.sh "$tree")
  if [ $? -ne 0 ] && echo "$out" | grep -q "^FAIL floors: $1\$" && echo "$out" | grep -q "^  $2:"; then
    passed=$((passed + 1)); echo "ok $2 with $3"
  else
    failed=$((failed + 1)); echo "FAIL $2 with $3: $out"
  fi
}
rm -rf "$tree"/* && cp -r runtime kernels lua "$tree"
if sh tests/tools/floors.sh "$tree" > /dev/null; then passed=$((passed + 1)); echo "ok the tree as it is"
else failed=$((failed + 1)); echo "FAIL the tree as it is"; fi
plant floors runtime/base/base.c '#include "../tensor/tensor.h"'
plant floors runtime/dev/cpu.c '#include "../ir/ir.h"'
plant floors runtime/dev/dev.h '#include "../comm/comm.h"'
plant floors runtime/comm/comm.h '#include "mpi/mpi_comm.h"'
plant floors runtime/ir/ir.h '#include "comm/comm.h"'
plant floors runtime/ir/ir.h '#include "../dev/dev.h"'
plant floors runtime/pass/pass.h '#include "../plan/plan.h"'
plant floors runtime/plan/plan.c '#include "../exec/exec.h"'
plant floors runtime/exec/exec.h '#include "../dt.h"'
plant floors runtime/exec/step.c '#include "dt.h"'
plant floors runtime/data/data.h '#include "../exec/executor.h"'
plant floors kernels/cpu/k.h '#include "dev/dev.h"'
plant floors runtime/exec/step.c '#include "nowhere.h"'
plant floors runtime/attic/attic.c '#include <stdio.h>'
plant facade lua/l_sys.c '#include "exec/ctx.h"'
plant facade lua/dtl.h '#include "ir/ir.h"'
plant facade lua/l_exec.c '#include "plan/plan.h"'
plant lua.h runtime/exec/step.c '#include <lua.h>'
plant mpi.h runtime/comm/world.c '#include <mpi.h>'
plant mpi.h runtime/exec/step.c '#include <nccl.h>'
plant cursor runtime/pass/reduce.c 'void f(dt_graph *g) { g->phase = DT_UPD; }'
plant cursor lua/l_graph.c 'void f(dtl_graph *b) { b->g->line = 3; }'
plant attributes runtime/pass/fuse.c 'int f(const dt_node *n) { return (int)n->attr[3].i; }'
plant attributes kernels/cpu/norm.c 'int f(const dt_call *c) { return (int)c->a.slot[0].i; }'
plant cuda runtime/exec/step.c '#include <cuda_runtime.h>'
printf '%d passed, %d failed, 0 skipped\n' "$passed" "$failed"
[ "$failed" -eq 0 ]
