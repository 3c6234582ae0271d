#!/bin/sh
# What each GPU kernel takes, from what nvcc said when it was compiled:  cuda_report.sh BUILD [ARCH]   (ARCH: sm_90)
# A kernel outside of the bounds is a failure: 48 KiB of shared memory, no more registers than a block of 256 threads can have, and no spilled
# registers but in attention, where a thread keeps a whole head until it is written for the tensor cores.
build=$1 arch=${2:-sm_90}
cat "$build"/o/kernels/cuda/*.usage | c++filt | awk -v arch="$arch" '
/Compiling entry function/ { on = index($0, "\x27" arch "\x27") > 0; name = $0; sub(/.*function \x27/, "", name); sub(/\x27 for .*/, "", name); sub(/\(.*/, "", name); sub(/^void /, "", name) }
on && /bytes stack frame/ { for (i = 2; i <= NF; i++) { if ($(i) == "bytes" && $(i + 1) == "stack") stack = $(i - 1); if ($(i) == "bytes" && $(i + 2) == "stores,") spill = $(i - 1) } }
on && /Used [0-9]+ registers/ {
  smem = 0
  for (i = 1; i <= NF; i++) { if ($(i) == "Used") regs = $(i + 1); if ($(i + 1) == "bytes" && $(i + 2) ~ /^smem/) smem = $(i) }
  if (!n++) printf "%-44s %9s %7s %7s %7s\n", "kernel (" arch ")", "registers", "spilled", "stack", "shared"
  bad = smem > 49152 || regs > 255 || (spill > 0 && name !~ /^(forward|query_gradient|key_gradients)<.*, (64|128|256)>/)
  printf "%-44s %9d %7d %7d %7d%s\n", substr(name, 1, 44), regs, spill, stack, smem, bad ? "  out of bounds" : ""
  failed += bad
}
END {
  if (!n) { print "FAIL cuda-report: nvcc said nothing of " arch; failed++ }
  else print (failed ? "FAIL" : "ok") " cuda-report"
  printf "%d passed, %d failed, 0 skipped\n", (n > failed ? n - failed : 0), failed
  exit (failed > 0)
}'
