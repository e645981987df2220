#!/usr/bin/env bash
# Everything that must hold before a change is accepted. Sets up first; goes on after a failed check so that one run
# shows all of them; the exit status is that of the worst. Ends with a table of the stages and their times.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
cd "$ROOT"

names=() results=() times=()
failed=0

# stage NAME COMMAND... runs one stage and notes its result.
stage() {
  local name=$1 start=$SECONDS result=ok
  shift
  heading "$name: $*"
  if ! "$@"; then
    result=FAILED
    failed=1
  fi
  names+=("$name") results+=("$result") times+=("$((SECONDS - start))")
  [ "$result" = ok ]
}

summary() {
  local i colour
  heading "Summary"
  for i in "${!names[@]}"; do
    colour=$GREEN
    [ "${results[$i]}" = ok ] || colour=$RED
    printf '    %s%-7s%s %4d s  %s\n' "$colour" "${results[$i]}" "$PLAIN" "${times[$i]}" "${names[$i]}"
  done
  printf '    total   %4d s\n' "$SECONDS"
}
trap summary EXIT

# What everything else needs: stop when it fails.
stage "setup" scripts/setup.sh || exit 1
stage "build" make build || exit 1
stage "tools" scripts/tools.sh || exit 1

stage "protocol lint" .cache/bin/buf lint || true
stage "protocol compatibility" .cache/bin/buf breaking --against api/proto.binpb || true
stage "vet" scripts/go vet ./... || true
stage "lint" .cache/bin/golangci-lint run --concurrency="$(nproc)" ./... || true
stage "unit tests" scripts/go test -race -timeout 20m ./cmd/... ./internal/... || true
stage "end-to-end tests" scripts/go test -count=1 -timeout 40m ./test/... || true
exit "$failed"
