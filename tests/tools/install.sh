#!/bin/sh
# Finds and installs the Debian packages that are missing:  install.sh [--check] group...   (groups: build, test, data, bench)
# --check only looks. What there is is found by the files themselves, so another source than Debian's packages serves too.
set -u
check=
[ "${1:-}" = --check ] && check=1 && shift

has() { command -v "$1" > /dev/null 2>&1; }
header() { # a C header, given an include path
  printf '#include <stddef.h>\n#include <stdio.h>\n#include <%s>\n' "$1" | cc -E $2 - > /dev/null 2>&1
}
lua_header() { header lua.h "$(pkg-config --cflags lua5.4 2> /dev/null || echo -I/usr/include/lua5.4)"; }
file() { [ -e "$1" ]; }

missing=
need() { # package, test...
  package=$1
  shift
  "$@" || missing="$missing $package"
}
for group in "$@"; do
  case $group in
    build)
      need gcc has cc
      need libc6-dev header stdlib.h ""
      need make has make
      need pkg-config has pkg-config
      need lua5.4 has lua5.4
      need liblua5.4-dev lua_header
      need libjansson-dev header jansson.h ""
      need libxxhash-dev header xxhash.h ""
      need zlib1g-dev header zlib.h ""
      need libedit-dev header editline/readline.h ""
      need openmpi-bin has mpirun
      need libopenmpi-dev has mpicc
      ;;
    bench)
      need libdnnl-dev header dnnl.h ""
      ;;
    test)
      need lua-busted has busted
      need lua-check has luacheck
      need g++ has c++
      ;;
    data)
      need bible-kjv has bible
      need dataset-fashion-mnist file /usr/share/datasets/fashion-mnist/train-images-idx3-ubyte.gz
      ;;
    *)
      echo "install.sh: no group '$group'; there are build, test, data and bench" >&2
      exit 2
      ;;
  esac
done
[ -n "$missing" ] || exit 0

line="apt-get install -y --no-install-recommends$missing"
if [ -n "$check" ]; then
  echo "missing:$missing" >&2
  echo "  run  make deps  or, by hand:  sudo $line" >&2
  exit 1
fi
if ! has apt-get; then
  echo "missing (names of Debian's packages):$missing" >&2
  echo "  there is no apt-get here; install them by this system's own means, then run the same command again" >&2
  exit 1
fi
if [ "$(id -u)" = 0 ]; then sudo=
elif has sudo && { sudo -n true 2> /dev/null || [ -t 0 ]; }; then sudo=sudo
else
  echo "missing:$missing" >&2
  echo "  run as root:  $line" >&2
  exit 1
fi
echo "installing:$missing"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
if ! $sudo env DEBIAN_FRONTEND=noninteractive $line > "$log" 2>&1; then # the lists may be old or absent
  { $sudo apt-get update && $sudo env DEBIAN_FRONTEND=noninteractive $line; } > "$log" 2>&1 || {
    tail -n 20 "$log" >&2
    echo "the installation failed; run as root:  apt-get update && $line" >&2
    exit 1
  }
fi
