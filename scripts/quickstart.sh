#!/usr/bin/env bash
# Starts the platform in the background, unless it runs already, and runs a command in a first microVM.
# `make quickstart` calls it after setup and build. The platform stays running; `scripts/quickstart.sh stop` ends it.
#
#   SPACE_DATA_DIR  where sandboxes live (default /var/lib/space for root, else ~/.local/share/space)
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
cd "$ROOT"

# The same default as that of bin/space, so that the commands printed at the end find the server's key.
if [ "$(id -u)" = 0 ]; then DATA_DIR=/var/lib/space; else DATA_DIR=${XDG_DATA_HOME:-$HOME/.local/share}/space; fi
DATA_DIR=${SPACE_DATA_DIR:-$DATA_DIR}
API=127.0.0.1:8700
DATA=127.0.0.1:8701
PID_FILE=$DATA_DIR/quickstart.pid
LOG=$DATA_DIR/quickstart.log
READY_SECONDS=600

ready() { curl -fsS -o /dev/null --max-time 5 "http://$API/readyz" 2>/dev/null; }

# running prints the process ID of the platform that this script started, if it lives. The program is compared too:
# process IDs come round again.
running() {
  local pid
  pid=$(cat "$PID_FILE" 2>/dev/null) || return 1
  [ "$(readlink "/proc/$pid/exe" 2>/dev/null | sed 's/ (deleted)$//')" = "$ROOT/bin/space" ] && echo "$pid"
}

stop() {
  local pid deadline=$((SECONDS + 60))
  if ! pid=$(running); then
    note "the platform is not running"
    return
  fi
  kill "$pid"
  while running >/dev/null; do
    [ $SECONDS -lt $deadline ] || die "process $pid did not end within a minute; see $LOG"
    sleep 0.2
  done
  rm -f "$PID_FILE"
  note "stopped; sandboxes go on until the next start takes them over (data in $DATA_DIR)"
}

start() {
  local pid
  if ready; then
    note "the platform is running already at http://$API"
    return
  fi
  mkdir -p "$DATA_DIR"
  chmod 700 "$DATA_DIR"
  if ! running >/dev/null; then
    note "log: $LOG"
    setsid bin/space up --data-dir "$DATA_DIR" --cache-dir "$SPACE_CACHE_DIR" --api-listen "$API" \
      --data-listen "$DATA" >"$LOG" 2>&1 </dev/null &
    echo $! >"$PID_FILE"
  fi
  pid=$(cat "$PID_FILE")
  wait_ready "$pid"
}

# wait_ready says what the platform waits for until it is ready. The first start makes the base template.
wait_ready() {
  local pid=$1 began=$SECONDS shown='' reason
  while ! ready; do
    reason=$(curl -sS --max-time 5 "http://$API/readyz" 2>/dev/null | sed -n 's/.*"message" *: *"\([^"]*\)".*/\1/p' | head -n1) || true
    if [ -n "$reason" ] && [ "$reason" != "$shown" ]; then
      note "[$((SECONDS - began)) s] $reason"
      shown=$reason
    fi
    kill -0 "$pid" 2>/dev/null || die "the platform ended; the end of $LOG: $(tail -n 5 "$LOG")"
    [ $((SECONDS - began)) -lt $READY_SECONDS ] || die "not ready after $READY_SECONDS s; see $LOG"
    sleep 0.5
  done
  note "ready after $((SECONDS - began)) s at http://$API"
}

first_command() {
  local began
  began=$(date +%s%N)
  bin/space run -- python3 -c 'import platform; print("Hello from a microVM: Linux", platform.release(), "- Python", platform.python_version())'
  note "created, run and deleted in $((($(date +%s%N) - began) / 1000000)) ms"
}

next_steps() {
  heading "Three things to try next"
  cat <<TEXT
    bin/space run -- bash -c 'id; uname -a; node --version'    another microVM, another command
    bin/space run -it -- bash                                  a shell in a microVM of its own
    bin/space doctor                                           what works on this machine, and what to do about the rest

    The platform goes on running in the background (process $(running || echo '?'), data in $DATA_DIR).
    Stop it with: scripts/quickstart.sh stop
TEXT
}

export SPACE_DATA_DIR=$DATA_DIR
case ${1:-} in
  "")
    heading "Starting the platform"
    start
    heading "Running a command in a first microVM"
    first_command
    next_steps
    ;;
  stop) stop ;;
  *) die "usage: scripts/quickstart.sh [stop]" ;;
esac
