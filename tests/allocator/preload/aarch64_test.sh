#!/bin/sh
# The front end built for aarch64 by a cross compiler: its contents and, where there is an emulator, its answers to a
# program there.
#   aarch64_test.sh SOURCES DIRECTORY COMPILER EMULATOR [FLAG ...]
set -eu
sources=$1 directory=$2 compiler=$3 emulator=$4
shift 4
tests=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$directory"
cd "$directory"
if ! echo 'int main(void) { return 0; }' | "$compiler" -x c - -o empty 2>error; then
  echo "skipped: $compiler has no C library: $(cat error)"
  exit 77
fi

fail() {
  echo "failed: $*"
  exit 1
}

"$compiler" -std=c11 -Werror -D_GNU_SOURCE '-DFOREBAY_CORE_SONAME="libforebay-core.so.0"' -fPIC -shared "-I$sources/../.." "$@" \
  "$sources/dlsym_entry.S" "$sources/elf_object.c" "$sources/front_end.c" -o libforebay-preload.so
readelf --dynamic --wide libforebay-preload.so >dynamic
[ "$(grep -c '(NEEDED)' dynamic)" = 1 ] || fail "it needs more than the C library: $(cat dynamic)"
! grep -E '\((INIT|FINI|INIT_ARRAY|FINI_ARRAY|TEXTREL)\)' dynamic || fail "something runs when it is loaded"
readelf --version-info --wide libforebay-preload.so | grep -o 'GLIBC_[0-9.]*' | sort -uV >versions
[ "$(tail -n 1 versions)" = GLIBC_2.17 ] || fail "it needs a newer C library: $(cat versions)"

[ -n "$emulator" ] || { echo "no emulator here: built and not run"; exit 0; }
"$compiler" -fPIC -shared -Wl,-soname,libcuda.so.1 "$tests/programs/aarch64_driver.c" -o libcuda.so.1
"$compiler" -fPIC -shared "$tests/programs/aarch64_neighbour.c" -o libneighbour.so
"$compiler" "$tests/programs/aarch64_program.c" -o program
root=$("$compiler" -print-sysroot)
[ -e "$root/lib/ld-linux-aarch64.so.1" ] || root=/usr/aarch64-linux-gnu
run() {
  "$emulator" -L "$root" -E "LD_LIBRARY_PATH=$directory" -E "LD_PRELOAD=$1" ./program "$2"
}
ours=$directory/libforebay-preload.so neighbour=$directory/libneighbour.so
run "$neighbour" libcuda.so.1 >expected || fail "the program without the preload: $(cat expected)"
for order in "$ours:$neighbour" "$neighbour:$ours"; do
  run "$order" libforebay-preload.so >found 2>errors || fail "$order: $(cat found errors)"
  cmp expected found || fail "$order: $(cat found)"
  # There is no core there: that is said once, and the driver serves.
  [ "$(grep -c 'cannot open libforebay-core' errors)" = 1 ] || fail "$order: $(cat errors)"
done
cat expected
