# Shared by the scripts here: messages, timings, where things are. Sourced, not run.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
SPACE_CACHE_DIR=${SPACE_CACHE_DIR:-${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/space}

if [ -t 1 ] && [ -z "${NO_COLOR:-}" ]; then
  BOLD=$'\e[1m' RED=$'\e[31m' GREEN=$'\e[32m' PLAIN=$'\e[0m'
else
  BOLD='' RED='' GREEN='' PLAIN=''
fi

heading() { printf '\n%s==> %s%s\n' "$BOLD" "$*" "$PLAIN"; }
note() { printf '    %s\n' "$*"; }
die() {
  printf '%serror:%s %s\n' "$RED" "$PLAIN" "$*" >&2
  exit 1
}

# as_root runs a command as root, or says which command a person must run.
as_root() {
  if [ "$(id -u)" = 0 ]; then
    "$@"
  elif command -v sudo >/dev/null; then
    sudo -E "$@"
  else
    die "this needs root and sudo is not installed; run as root: $*"
  fi
}

# go_needed is the version that go.mod asks for.
go_needed() { awk '$1 == "go" { print $2; exit }' "$ROOT/go.mod"; }

# go_version prints the version of a go program, or nothing.
go_version() { GOTOOLCHAIN=local "$1" env GOVERSION 2>/dev/null | sed -n 's/^go\([0-9.]*\).*/\1/p'; }

# at_least A B: version A is B or newer.
at_least() { [ "$(printf '%s\n%s\n' "$1" "$2" | sort -V | head -n1)" = "$2" ]; }

# find_go prints the path of a Go that is new enough: the machine's, else the one that setup.sh fetched.
find_go() {
  local need candidate
  need=$(go_needed)
  for candidate in "$(command -v go || true)" /usr/local/go/bin/go "$SPACE_CACHE_DIR/go/$need/bin/go"; do
    if [ -n "$candidate" ] && [ -x "$candidate" ] && at_least "$(go_version "$candidate")" "$need"; then
      echo "$candidate"
      return 0
    fi
  done
  return 1
}
