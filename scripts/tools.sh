#!/usr/bin/env bash
# Builds the linter and buf from their pinned modules into .cache/bin, once per version.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

# tool NAME MODULE-DIRECTORY PACKAGE
tool() {
  local name=$1 dir=$2 package=$3 key
  local bin="$ROOT/.cache/bin/$name"
  key=$(cat "$ROOT/$dir/go.mod" "$ROOT/$dir/go.sum" <("$ROOT/scripts/go" env GOVERSION) | sha256sum | cut -d' ' -f1)
  if [ -x "$bin" ] && [ "$(cat "$bin.key" 2>/dev/null)" = "$key" ]; then
    return
  fi
  note "building $name (a few minutes, once)"
  mkdir -p "$ROOT/.cache/bin"
  (cd "$ROOT/$dir" && "$ROOT/scripts/go" build -trimpath -ldflags='-s -w' -o "$bin.tmp" "$package")
  mv "$bin.tmp" "$bin"
  echo "$key" >"$bin.key"
}

for name in "${@:-golangci-lint buf}"; do
  for name in $name; do
    case $name in
      golangci-lint) tool golangci-lint tools/lint github.com/golangci/golangci-lint/v2/cmd/golangci-lint ;;
      buf) tool buf tools github.com/bufbuild/buf/cmd/buf ;;
      *) die "unknown tool $name" ;;
    esac
  done
done
