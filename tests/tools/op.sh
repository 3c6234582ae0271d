#!/bin/sh
# Where an op lives: `make op NAME=layer_norm` prints its row, its rules (all in its family's file), its kernels and its tests, each as file:line.
cd "$(dirname "$0")/../.." || exit 1
name=$1
if [ -z "$name" ]; then
  echo "which op? make op NAME=layer_norm"
  exit 1
fi
# at LABEL PATTERN FILE...: the first line of each file that matches
at() {
  label=$1 pattern=$2
  shift 2
  grep -nE "$pattern" "$@" /dev/null 2>/dev/null | while IFS=: read -r file line text; do
    printf '%-10s %s:%s  %s\n' "$label" "$file" "$line" "$(printf '%s' "$text" | sed 's/^ *//' | cut -c1-110)"
    label=
  done
}
row=$(grep -hE "^(OP|OPV|EW)\($name," runtime/ir/ops.def kernels/elementwise.def | head -n 1)
if [ -z "$row" ]; then
  echo "no op is called $name; the nearest:"
  sed -nE 's/^(OP|OPV|EW)\(([a-z_0-9]+),.*/\2/p' runtime/ir/ops.def kernels/elementwise.def | grep -i -- "$(printf %.4s "$name")" || echo "  (see docs/ops.md)"
  exit 1
fi
at row "^(OP|OPV|EW)\($name," runtime/ir/ops.def kernels/elementwise.def
for rule in $(printf '%s' "$row" | grep -oE '\b(shape|place|grad|cost)_[a-z0-9_]+' | awk '!seen[$0]++'); do
  case $rule in grad_none) continue ;; esac
  at "$(printf %s "$rule" | cut -d_ -f1)" "^(dt_status|void|dt_cost) $rule\(|^(UNARY|COST)\($rule[,)]" runtime/ir/*.c
done
case $row in
EW*)
  at shape '^dt_status shape_elementwise\(' runtime/ir/elementwise.c
  at place '^dt_status place_elementwise\(' runtime/ir/elementwise.c
  at cost '^COST\(cost_elementwise\)' runtime/ir/elementwise.c
  at kernel 'K\(kernel_vm\) =' kernels/cpu/*.c
  at cuda 'KERNEL\(vm\)' kernels/cuda/*.cu ;;
OPV*) echo "kernel     none: a view, a leaf, or work of the executor" ;;
*)
  at kernel "K\(kernel_$name\)( =|;)" kernels/cpu/*.c
  at cuda "(KERNEL|CONV)\($name[,)]" kernels/cuda/*.cu ;;
esac
at test "^ *[{]\"$name[ \"]" tests/c/test_ir.c tests/c/op_bench.h tests/c/test_cuda.c
exit 0
