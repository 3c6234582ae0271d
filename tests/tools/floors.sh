#!/bin/sh
# The table of floors, proved by reading every #include: a file includes only from floors below its own, or from its own
# folder. Then two rules that text alone shows: a graph keeps no place for new nodes, which a builder (dt_build) has, and
# attributes are read by name and not by number. Prints each line that breaks a rule, then the closing line of the tests.
# Words of the rules are in docs/tour.md.
#   floors.sh [folder]      of that tree instead of this one
cd "${1:-$(dirname "$0")/../..}" || exit 2
files=$(find runtime kernels lua -name '*.[ch]' -o -name '*.def' -o -name '*.cu' -o -name '*.cuh' | LC_ALL=C sort)

# Kernels know the contract in runtime/dev/kernel.h and nothing else of their own floor; the .def tables are lists without code
# that every floor from 2 may expand.
# shellcheck disable=SC2086
{
  grep -nE '^[[:space:]]*#[[:space:]]*include' $files
  grep -nE '\bg(->|\.)(phase|serves|file|line|block|chunk)\b' $files | sed 's/:[^:]*$/:@cursor/'
  grep -nE '\b(attr|slot)\[[0-9]' $files | grep -E 'attr\[|a(->|\.)slot\[' | sed 's/:[^:]*$/:@attributes/'
} | awk -F: '
function folder(path) { sub(/\/[^\/]*$/, "", path); return path }
function floor_of(dir) {
  if (dir ~ /^runtime\/base$/) return 0
  if (dir ~ /^runtime\/tensor$/) return 1
  if (dir ~ /^(runtime\/dev|kernels.*)$/) return 2
  if (dir ~ /^runtime\/dev\/./) return 2.5 # plug-ins
  if (dir ~ /^runtime\/ir$/) return 3
  if (dir ~ /^runtime\/pass$/) return 4
  if (dir ~ /^runtime\/comm$/) return 5
  if (dir ~ /^runtime\/comm\/./) return 5.5 # plug-ins
  if (dir ~ /^runtime\/plan$/) return 6
  if (dir ~ /^runtime\/(data|store)$/) return 7
  if (dir ~ /^runtime\/exec$/) return 8
  if (dir == "runtime") return 9
  if (dir ~ /^lua/) return 10
  return -1
}
function exists(p,  line, r) { if (p in known) return known[p]; r = (getline line < p) >= 0; close(p); return known[p] = r }
function clean(p) { while (sub(/[^\/]+\/\.\.\//, "", p)); gsub(/\/\.\//, "/", p); return p }
function bad(rule, why) { failed[rule]++; print "  " $1 ":" $2 ": " why }
BEGIN { n = split("floors facade lua.h mpi.h cuda cursor attributes", rules, " ") }
{
  if ($NF == "@cursor") { bad("cursor", "a graph has no cursor; new nodes are made by a dt_build, which says where they go"); next }
  if ($NF == "@attributes") { bad("attributes", "attributes have names: a.op.field; by number only through a spec\047s slot"); next }
  text = $0; sub(/^[^:]*:[^:]*:/, "", text)
  if (!match(text, /[<"][^>"]*[>"]/)) next
  name = substr(text, RSTART + 1, RLENGTH - 2)
  dir = folder($1); own = floor_of(dir)
  if (own < 0) bad("floors", "the folder " dir " has no floor; name it in tests/tools/floors.sh and docs/tour.md")
  if (name ~ /^(lua|lauxlib|lualib)\.h$/ && dir !~ /^lua/) bad("lua.h", name " is for lua/ only")
  if (name ~ /^mpi\.h$/ && dir !~ /^runtime\/comm\/mpi/) bad("mpi.h", "mpi.h is for runtime/comm/mpi/ only")
  if (name ~ /^nccl/ && dir !~ /^runtime\/comm/) bad("mpi.h", name " is for runtime/comm/ only")
  if (name ~ /^(cuda|cublas|nvrtc|cudnn)/ && dir !~ /^(runtime\/dev|runtime\/comm|kernels\/cuda)/)
    bad("cuda", name " is for runtime/dev, runtime/comm and kernels/cuda only")
  if (text ~ /</) next
  path = clean(dir "/" name)
  if (!exists(path)) path = exists("runtime/" name) ? "runtime/" name : exists(name) ? name : ""
  if (path == "") { bad("floors", "\"" name "\" is nowhere"); next }
  to = folder(path); at = floor_of(to)
  if (dir ~ /^lua/ && at > 0 && at < 9 && path != "runtime/plan/plan.h")
    bad("facade", "the bindings see the core through runtime/dt.h; lua/l_graph.h alone sees graphs and plans, by plan/plan.h")
  if (path == "runtime/plan/plan.h" && dir ~ /^lua/ && $1 != "lua/l_graph.h") bad("facade", "only lua/l_graph.h includes plan/plan.h")
  if (own >= 3 && own < 5 && to == "runtime/dev" && path != "runtime/dev/kernel.h")
    bad("floors", "graphs and passes know no device, only the contract runtime/dev/kernel.h")
  if (to == dir || at < own) next
  if (path ~ /\.def$/ && own >= 2) next
  if (dir ~ /^kernels/ && path == "runtime/dev/kernel.h") next
  bad("floors", "floor " own " includes " path " of floor " at)
}
END {
  for (i = 1; i <= n; i++) if (failed[rules[i]]) { print "FAIL floors: " rules[i]; f++ } else { print "ok floors: " rules[i]; p++ }
  printf "%d passed, %d failed, 0 skipped\n", p, f
  exit f > 0
}'
