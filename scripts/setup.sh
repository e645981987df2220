#!/usr/bin/env bash
# Installs what building and running need on Debian or Ubuntu: packages by name from the machine's own sources, and
# Go from the Go module proxy if the machine's is missing or too old. Says what it does first; does nothing twice.
#
#   scripts/setup.sh         install what is missing
#   scripts/setup.sh --check only say what is missing; the exit status tells
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

# Run the platform: microVMs, their disks, the base template. Build and test it: a C compiler for the race detector.
PACKAGES=(qemu-system-x86 qemu-utils mmdebstrap debian-archive-keyring e2fsprogs util-linux uidmap iproute2 procps
  ca-certificates curl git make gcc libc6-dev)

missing_packages() {
  local p
  for p in "${PACKAGES[@]}"; do
    [ "$(dpkg-query -W -f='${db:Status-Status}' "$p" 2>/dev/null)" = installed ] || echo "$p"
  done
}

# install_packages refreshes the package lists only if they do not know a package or a download fails.
install_packages() {
  local install=(apt-get install -y -q --no-install-recommends -o Dpkg::Use-Pty=0 "$@")
  export DEBIAN_FRONTEND=noninteractive
  if ! apt-cache show "$@" >/dev/null 2>&1; then
    as_root apt-get update -q
    as_root "${install[@]}"
  elif ! as_root "${install[@]}"; then
    note "that failed, perhaps because the package lists are old: refreshing them and trying again"
    as_root apt-get update -q
    as_root "${install[@]}"
  fi
}

# fetch_go has any Go from 1.13 on download the wanted toolchain as a module, checked against the checksum database,
# and puts a copy with its execute bits into the cache.
fetch_go() {
  local bootstrap=$1 need=$2 target="$SPACE_CACHE_DIR/go/$2" work dir
  work=$(mktemp -d)
  # shellcheck disable=SC2064
  trap "chmod -R u+w '$work'; rm -rf '$work'" EXIT
  note "fetching Go $need from the Go module proxy"
  (cd "$work" && GOFLAGS=-modcacherw GO111MODULE=on GOTOOLCHAIN=local GOPATH="$work/path" GOMODCACHE="$work/path/pkg/mod" \
    "$bootstrap" mod download -json "golang.org/toolchain@v0.0.1-go$need.linux-$(arch_go)") >"$work/answer" ||
    die "could not fetch Go $need: $(cat "$work/answer")"
  dir=$(sed -n 's/^[[:space:]]*"Dir": "\(.*\)",\{0,1\}$/\1/p' "$work/answer")
  [ -x "$dir" ] || die "the Go module proxy sent no toolchain: $(cat "$work/answer")"
  chmod -R u+w "$dir"
  # A module cannot hold other modules, so the toolchain's own go.mod files travel under another name.
  find "$dir" -name _go.mod -execdir mv _go.mod go.mod ';'
  find "$dir/bin" "$dir/pkg/tool" -type f -exec chmod +x {} +
  mkdir -p "$(dirname "$target")"
  rm -rf "$target"
  mv "$dir" "$target.tmp.$$" && mv "$target.tmp.$$" "$target"
  "$target/bin/go" version
}

arch_go() {
  case $(uname -m) in
    x86_64) echo amd64 ;;
    *) die "only x86_64 machines are supported, this is $(uname -m)" ;;
  esac
}

main() {
  command -v apt-get >/dev/null || die "only Debian and Ubuntu are supported: apt-get is missing"
  arch_go >/dev/null
  local packages need bootstrap
  mapfile -t packages < <(missing_packages)
  need=$(go_needed)
  if ! find_go >/dev/null; then
    bootstrap=$(command -v go || true)
    [ -n "$bootstrap" ] || packages+=(golang-go)
  fi
  if [ "${1:-}" = --check ]; then
    [ ${#packages[@]} = 0 ] && find_go >/dev/null && exit 0
    note "missing: ${packages[*]:-}$(find_go >/dev/null || echo " Go >= $need")"
    exit 1
  fi
  if [ ${#packages[@]} -gt 0 ]; then
    heading "Installing packages: ${packages[*]}"
    install_packages "${packages[@]}"
  fi
  if ! find_go >/dev/null; then
    heading "Installing Go $need below $SPACE_CACHE_DIR/go"
    fetch_go "$(command -v go)" "$need"
  fi
  note "everything is there: $(qemu-system-x86_64 --version | head -n1), Go $(go_version "$(find_go)")"
}

main "$@"
