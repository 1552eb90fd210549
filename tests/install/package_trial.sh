#!/bin/sh
# Tries the Debian packages as their users do. It runs as root in the bare system of fresh_root.sh --packages:
#   package_trial.sh DIRECTORY    with the packages, samples/08-from-c and tests/install/consumer in it
set -eu
trial=$1
export DEBIAN_FRONTEND=noninteractive LC_ALL=C.UTF-8 PATH=/usr/sbin:/usr/bin:/sbin:/bin

say() { printf '    %s\n' "$*"; }
fail() { printf 'package_trial.sh: %s\n' "$*" >&2; exit 1; }
user() { setpriv --reuid 1000 --regid 1000 --clear-groups env HOME=/home/user "$@"; }
install() { apt-get -qq install -y --no-install-recommends "$@" >"$trial/apt.log" 2>&1 || { tail -n 20 "$trial/apt.log"; fail "apt-get install $*"; }; }

apt-get -qq update
dpkg-query -W -f '${Package}\n' | sort >"$trial/before"

# ---- the programs, without a compiler ----
install "$trial"/forebay_*.deb "$trial"/libforebay0_*.deb "$trial"/libforebay-preload_*.deb "$trial"/forebay-gpt_*.deb
! command -v cc >/dev/null || fail "a package for users brought a compiler"
for file in /usr/bin/forebay /usr/bin/forebay-gpt /usr/lib/*/libforebay*.so*; do
  ! ldd "$file" | grep 'not found' || fail "$file lacks a library"
  case $(dd if="$file" bs=1 skip=0 count=4 2>/dev/null | tr -d '\177') in ELF) ;; *) fail "$file is no program" ;; esac
done
user forebay --version | grep -q '^forebay [0-9]' || fail "forebay --version"
user forebay plan --parameters 7500000000 --ranks 64 --stage 3 --dtype bf16 >/dev/null
[ "$(user forebay run -- /bin/echo trained 2>"$trial/run.log")" = trained ] || fail "forebay run: $(cat "$trial/run.log")"
grep -q 'no CUDA driver' "$trial/run.log" || fail "the preload said: $(cat "$trial/run.log")"
for stage in 0 3; do
  user forebay-gpt --ranks 2 --stage $stage --steps 3 --layers 2 --hidden 64 --heads 2 >"$trial/gpt.log" 2>&1 ||
    { cat "$trial/gpt.log" && fail "forebay-gpt --ranks 2 --stage $stage"; }
  sed -n 's/^ *digest *//p' "$trial/gpt.log" >"$trial/digest-$stage"
done
[ -s "$trial/digest-3" ] || fail "forebay-gpt prints no digest"
cmp "$trial/digest-0" "$trial/digest-3" || fail "2 ranks give other weights at stage 0 than at stage 3"
say "2 ranks trained at stages 0 and 3: digest $(cat "$trial/digest-3")"

# ---- the headers ----
install "$trial"/libforebay-dev_*.deb "$trial"/libforebay-c*_*.deb gcc g++ libc6-dev make cmake pkg-config
mkdir -p /home/user/build && chown -R 1000:1000 /home/user
user sh -euc '
  cd
  cc -std=c99 -Wall -Wextra -Werror "$1/from_c.c" $(pkg-config --cflags --libs forebay-c) -lm -o by-pkg-config
  ./by-pkg-config >by-pkg-config.txt
  cmake -S "$1" -B build/c >/dev/null
  cmake --build build/c >/dev/null
  build/c/from-c >by-cmake.txt
  cmp by-pkg-config.txt by-cmake.txt
  grep -q "stage 3: .* digest " by-cmake.txt
  for way in OFF ON; do
    cmake -S "$2" -B build/cpp-$way -DCONSUMER_PKG_CONFIG=$way >/dev/null
    cmake --build build/cpp-$way >/dev/null
    build/cpp-$way/consumer | grep -q "consumer ok"
    build/cpp-$way/consumer17 | grep -q "consumer ok"
  done' sh "$trial/08-from-c" "$trial/consumer" || fail "a program against the installed headers; see above"
say "programs in C and C++ were built by pkg-config and by CMake, and ran"

# ---- each package: its licence, its files as installed, its end ----
packages=$(for file in "$trial"/*.deb; do dpkg-deb -f "$file" Package; done)
for package in $packages; do
  grep -q 'Apache-2.0' "/usr/share/doc/$package/copyright" || fail "$package has no licence"
  dpkg -V "$package" | grep . && fail "$package: files differ"
  say "$package needs $(dpkg-query -W -f '${Depends}' "$package")"
done
ls /usr/share/man/man1/forebay.1.gz /usr/share/man/man1/forebay-gpt.1.gz /usr/share/man/man3/forebay_step.3.gz >/dev/null
# shellcheck disable=SC2086  # Several names.
apt-get -qq purge -y $packages >"$trial/apt.log" 2>&1
left=$(find /usr /etc /var/lib -name '*forebay*' -not -path '/var/lib/apt/*' -not -path '/var/lib/dpkg/*' 2>/dev/null)
[ -z "$left" ] || fail "purging leaves $left"
! ldconfig -p | grep forebay || fail "the loader's cache still has forebay"
say "purged: nothing is left"
