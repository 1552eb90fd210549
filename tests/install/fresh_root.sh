#!/usr/bin/env bash
# A bare Debian in a directory of its own, this tree cloned into it, and the two commands of the quickstart run there:
# with nothing else installed and no variable set. Or only a wheel with Python, or the Debian packages, or the steps of the
# Containerfile. All mounts are in a namespace that ends with the command.
set -euo pipefail
umask 022
PATH=$PATH:/usr/sbin:/sbin # Root's, where only a user's is set.
source_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)
tree=/forebay # In the new root.

say() { printf '==> %s  %s\n' "$(date +%H:%M:%S)" "$*"; }
fail() { printf 'fresh_root.sh: %s\n' "$*" >&2; exit 1; }
skip() { printf 'skipped: %s\n' "$*"; exit 77; }
usage() {
  cat <<'END'
fresh_root.sh [OPTIONS] [SUITE]

Makes a bare Debian with debootstrap, clones this tree into it, and runs './dev demo' and './dev test' there.

  SUITE             the release, by the name that debootstrap knows; default: bookworm (Debian 12)
  --only demo|test  run one of the two commands
  --wheel FILE      instead, install only Python, and try this wheel there as a user who is not root (wheel_trial.py)
  --packages DIR    instead, install the Debian packages of this directory there, and try them (package_trial.sh)
  --containerfile   instead, run the steps of the Containerfile in such directories, a fresh one for each stage
  --keep            leave the directory, and say where it is; otherwise it is removed, whatever happens
  --help            print this text

It needs root, debootstrap and git, and 4 GB free in TMPDIR (default: /tmp). Only what is committed is cloned. Packages
come from the mirror that /etc/apt of this machine names for the release, through the same proxy, or from debootstrap's
own choice. The exit code is 0 when all commands pass, 1 when one fails, and 77 when this machine cannot run them.
END
}

# ---- arguments ----

suite=bookworm keep='' commands=(demo test) wheel='' packages='' containerfile=''
while [ $# -gt 0 ]; do
  case $1 in
    --help | -h) usage && exit 0 ;;
    --keep) keep=yes ;;
    --only)
      case ${2:-} in
        demo | test) commands=("$2") && shift ;;
        *) fail "--only wants demo or test" ;;
      esac
      ;;
    --wheel)
      if [ ! -f "${2:-}" ]; then fail "--wheel wants a file"; fi
      wheel=$2 && shift
      ;;
    --packages)
      ls "${2:-}"/*.deb >/dev/null 2>&1 || fail "--packages wants a directory with packages; './dev package' makes it"
      packages=$2 && shift
      ;;
    --containerfile) containerfile=$source_root/Containerfile ;;
    -*) fail "what is '$1'? See fresh_root.sh --help" ;;
    *) suite=$1 ;;
  esac
  shift
done

# ---- requirements of this machine ----

[ "$(id -u)" = 0 ] || skip "only root can make a root directory of another system"
for program in debootstrap git unshare chroot; do
  command -v "$program" >/dev/null || skip "$program is not installed"
done
unshare --mount --pid --fork true 2>/dev/null || skip "root may not mount here, as in most containers"
[ -n "$wheel$packages" ] || git -c safe.directory='*' -C "$source_root" rev-parse HEAD >/dev/null 2>&1 ||
  skip "$source_root is no git checkout, and there is nothing to clone"

# ---- one directory, which goes at the end together with every process that was started in it ----

work=$(mktemp -d "${TMPDIR:-/tmp}/forebay-fresh-root-XXXXXX")
root=$work/root child=''

clean_up() {
  local status=$?
  trap - EXIT
  trap '' HUP INT TERM
  if [ -n "$child" ]; then
    # The processes are in a namespace whose first one dies with unshare; the others die with that.
    kill -KILL -- "-$child" 2>/dev/null || true
    wait "$child" 2>/dev/null || true
  fi
  if [ -n "$keep" ] && [ -d "$root$tree" ]; then
    say "The root directory is kept: $root. Remove it with: rm -rf $work"
  else
    # The last process may still be ending.
    local i
    for i in 1 2 3 4 5; do
      rm -rf --one-file-system "$work" 2>/dev/null && break
      sleep "$i"
    done
    [ ! -e "$work" ] || say "Could not remove all of $work"
  fi
  exit "$status"
}
trap clean_up EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM

# Runs a command with mounts and processes of its own, and waits for it in such a way that a signal is heeded at once.
in_namespace() {
  local status=0
  set -m # A process group of its own; without it, commands in the background ignore SIGINT, which tests send.
  unshare --mount --propagation private --pid --fork --kill-child --mount-proc -- "$@" </dev/null &
  child=$!
  set +m
  wait "$child" || status=$?
  child=''
  return "$status"
}

# ---- package sources ----

# "URI RELEASE COMPONENT" for each of the distribution's own archives of this suite in /etc/apt. Others would need
# keys and certificates that a bare system does not have.
sources_of_host() {
  command -v apt-get >/dev/null || return 0
  apt-get --print-uris update 2>/dev/null |
    sed -nE "s#^'(https?://[^']*)/dists/([^']+)/(main|universe)/binary-[^']*/Packages[^']*'.*#\1 \2 \3#p" |
    awk -v suite="$suite" '
      $1 !~ /\/(debian|debian-security|ubuntu|ubuntu-ports)(\/[0-9TZ]+)?\/?$/ {next}
      ($2 == suite || $2 == suite "-updates" || $2 == suite "-security") && !seen[$0]++' || true
}

# Settings of apt that decide whether an archive can be reached, but not the installed packages.
apt_settings() {
  if command -v apt-config >/dev/null; then
    apt-config dump |
      grep -E '^Acquire::((http|https)::(Proxy(::[^ ]*)?|Timeout)|Retries|ForceIPv[46]|Check-Valid-Until|Check-Date) ' || true
  fi
  # Variables do not pass into the root directory.
  [ -z "${http_proxy:-}" ] || printf 'Acquire::http::Proxy "%s";\n' "$http_proxy"
  [ -z "${https_proxy:-}" ] || printf 'Acquire::https::Proxy "%s";\n' "$https_proxy"
}

# ---- the root directory ----

make_root() {
  local sources mirror settings proxy
  sources=$(sources_of_host)
  mirror=$(awk -v suite="$suite" '$2 == suite && $3 == "main" {print $1; exit}' <<<"$sources")
  settings=$(apt_settings)
  proxy=$(sed -nE 's/^Acquire::http::Proxy "(.+)";$/\1/p' <<<"$settings" | tail -n 1)
  say "Making a bare $suite in $root, from ${mirror:-the mirror that debootstrap chooses}"
  # debootstrap downloads with wget, which knows nothing of apt's proxy.
  in_namespace env ${proxy:+"http_proxy=$proxy"} debootstrap --variant=minbase \
    ${wheel:+--include=python3,python3-venv,ca-certificates} "$suite" "$root" ${mirror:+"$mirror"} \
    >"$work/debootstrap.log" 2>&1 || {
    tail -n 20 "$work/debootstrap.log" >&2
    fail "debootstrap could not make it; the end of what it printed is above"
  }
  if [ -n "$mirror" ]; then awk '{print "deb", $1, $2, $3}' <<<"$sources" >"$root/etc/apt/sources.list"; fi
  if [ -n "$settings" ]; then printf '%s\n' "$settings" >"$root/etc/apt/apt.conf.d/90host"; fi
  if grep -q 'https://' "$root/etc/apt/sources.list" && [ -f /etc/ssl/certs/ca-certificates.crt ]; then
    # A bare system trusts no archive yet.
    mkdir -p "$root/etc/ssl/certs"
    cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
  fi
}

clone_tree() { # directory in the file system of this machine
  local target=$1
  # The checkout may belong to another user, which git refuses.
  printf '[safe]\n\tdirectory = *\n' >"$work/gitconfig"
  export GIT_CONFIG_GLOBAL=$work/gitconfig
  local commit
  commit=$(git -C "$source_root" rev-parse HEAD)
  say "Cloning $(git -C "$source_root" log -1 --format='%h (%s)') into it"
  if [ -n "$(git -C "$source_root" status --porcelain)" ]; then
    say "Changes in $source_root that are not committed are left out"
  fi
  git clone --quiet --no-hardlinks --no-checkout "$source_root" "$target"
  git -C "$target" checkout --quiet --detach "$commit"
}

# ---- the commands ----

# The first process of the namespace: it mounts, and stays to wait for processes that lose their parent.
# shellcheck disable=SC2016  # Its own variables.
enter='
  set -eu
  root=$1
  shift
  mount -t proc proc "$root/proc"
  mount --rbind /sys "$root/sys"
  mount -o remount,bind,ro "$root/sys"
  mount -t devpts -o newinstance,ptmxmode=0666,mode=620 devpts "$root/dev/pts"
  mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
  status=0
  chroot "$@" || status=$?
  exit "$status"'

run_command() { # demo or test
  local begin=$SECONDS status=0
  say "Running ./dev $1 there, with no variable set"
  in_namespace bash -c "$enter" bash "$root" "$root" /bin/sh -c "cd $tree && exec /usr/bin/env -i ./dev $1" || status=$?
  if [ "$status" = 0 ]; then
    say "./dev $1 passed after $(((SECONDS - begin + 30) / 60)) minutes"
  else
    say "./dev $1 FAILED with exit code $status after $(((SECONDS - begin + 30) / 60)) minutes"
    failed+=("./dev $1")
  fi
}

# The variables by which pip reaches its index pass, and no others.
try_wheel() {
  local here variables=()
  here=$(dirname "${BASH_SOURCE[0]}")
  mkdir -p "$root/trial" "$root/home/user"
  chown 1000:1000 "$root/home/user"
  cp "$wheel" "$here/wheel_trial.py" "$source_root/samples/pytorch/minimal.py" "$root/trial"
  if [ -f /etc/ssl/certs/ca-certificates.crt ]; then cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"; fi
  printf '127.0.0.1 localhost %s\n' "$(hostname)" >"$root/etc/hosts"
  mapfile -t variables < <(env | grep -E '^(PIP_(INDEX_URL|EXTRA_INDEX_URL|TRUSTED_HOST)|https?_proxy|HTTPS?_PROXY|FOREBAY_TRIAL_TORCH)=')
  say "Trying $(basename "$wheel") there as user 1000"
  in_namespace bash -c "$enter" bash "$root" --userspec=1000:1000 "$root" /usr/bin/env -i HOME=/home/user \
    PATH=/usr/bin:/bin PIP_CERT=/etc/ssl/certs/ca-certificates.crt PIP_DISABLE_PIP_VERSION_CHECK=1 \
    ${variables[@]+"${variables[@]}"} python3 /trial/wheel_trial.py "/trial/$(basename "$wheel")" /trial/minimal.py
}

try_packages() {
  mkdir -p "$root/trial" "$root/home/user"
  chown 1000:1000 "$root/home/user"
  cp "$packages"/*.deb "$root/trial"
  cp -r "$source_root/tests/install/package_trial.sh" "$source_root/tests/install/consumer" "$source_root/samples/08-from-c" \
    "$root/trial"
  printf '127.0.0.1 localhost %s\n' "$(hostname)" >"$root/etc/hosts"
  say "Trying the packages of $packages there"
  in_namespace bash -c "$enter" bash "$root" "$root" /usr/bin/env -i \
    /bin/sh /trial/package_trial.sh /trial
}

# Runs one step of a Containerfile in the root directory of its stage.
run_step() { # KEYWORD text
  local keyword=$1 text=$2 from=$source_root target
  case $keyword in
    ARG | CMD | ENTRYPOINT | USER) ;; # The base is this root directory; the image's command is run below.
    FROM)
      stage=$((stage + 1)) directory=/ root=$work/stage-$stage
      [[ $text != *" AS "* ]] || stages[${text##* AS }]=$root
      say "Stage $stage: $text"
      cp -a "$work/root" "$root"
      ;;
    WORKDIR) directory=$text && mkdir -p "$root$text" ;;
    COPY)
      if [[ $text =~ ^--from=([^ ]+)\ (.*) ]]; then from=${stages[${BASH_REMATCH[1]}]} text=${BASH_REMATCH[2]}; fi
      target=$root${text##* }
      say "COPY $text"
      if [ "$from" = "$source_root" ]; then
        [ "${text% *}" = . ] || fail "only the whole tree is copied here, not '${text% *}'"
        clone_tree "$target"
      else
        mkdir -p "$target" && cp -a "$from${text% *}/." "$target"
      fi
      ;;
    RUN)
      say "RUN $text"
      in_namespace bash -c "$enter" bash "$root" "$root" /usr/bin/env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
        /bin/sh -c "cd $directory && $text" || fail "on a bare $suite, a step of the Containerfile fails"
      ;;
    *) fail "this script does not know the step '$keyword' of the Containerfile" ;;
  esac
}

# The steps by hand, and again by a builder where one works here. The base is the bare root directory in both.
run_containerfile() {
  local line step='' stage=0 directory=/ builder image=localhost/forebay-fresh-root
  local -A stages=()
  while IFS= read -r line || [ -n "$line" ]; do
    if [[ $line =~ ^[[:space:]]*(#|$) ]]; then continue; fi
    step+=$line
    if [[ $step == *\\ ]]; then step=${step%\\} && continue; fi
    run_step "${step%% *}" "${step#* }"
    step=
  done <"$containerfile"
  say "Training on 2 ranks in the last stage"
  in_namespace bash -c "$enter" bash "$root" --userspec=1000:1000 "$root" /usr/bin/env -i HOME=/tmp PATH=/usr/bin:/bin \
    forebay-gpt --ranks 2 --stage 3 --steps 3 --layers 2 --hidden 64 --heads 2 || fail "forebay-gpt fails in the image's files"
  for builder in podman docker; do
    if command -v $builder >/dev/null && $builder info >/dev/null 2>&1; then
      say "Building the image with $builder"
      tar -C "$work/root" -c . | $builder import - "$image-base" >/dev/null
      $builder build --network host --build-arg "BASE=$image-base" -f "$containerfile" -t "$image" "$source_root" ||
        fail "$builder cannot build the Containerfile"
      $builder run --rm "$image" forebay-gpt --ranks 2 --stage 3 --steps 3 || fail "the image cannot train"
      $builder rmi "$image" "$image-base" >/dev/null || true
      return
    fi
  done
  say "SKIPPED: building the image, because neither podman nor docker works here"
}

make_root
if [ -n "$containerfile" ]; then
  run_containerfile
  say "On a bare $suite, the steps of the Containerfile work"
  exit
fi
if [ -n "$packages" ]; then
  try_packages || fail "on a bare $suite, the packages fail"
  say "On a bare $suite, the packages work"
  exit
fi
if [ -n "$wheel" ]; then
  try_wheel || fail "on a bare $suite, the wheel fails"
  say "On a bare $suite, the wheel works"
  exit
fi
clone_tree "$root$tree"
failed=()
for command in "${commands[@]}"; do run_command "$command"; done
say "The root directory has grown to $(du -sm "$root" | cut -f 1) MiB"
if [ ${#failed[@]} -gt 0 ]; then fail "on a bare $suite, what fails is: ${failed[*]}"; fi
say "On a bare $suite, what was run passes: ${commands[*]}"
