#!/usr/bin/env bash
# Runs a command as several processes of one machine, on CPU, each with some simulated devices.
#
#   bash launch/local_processes.sh N [FLAGS] COMMAND ARG...
#     e.g. bash launch/local_processes.sh 2 --devices 4 \
#            coa-jax sft --config=configs/sft/factbook.py --config.mesh.fsdp=-1 \
#            --config.rows=8 --workdir=runs/two
#
# Flags:
#   --devices K   devices of each process (default 1)
#   --port PORT   of the coordinator (default: one that is free)
#   --grace S     seconds between the failure of a process and the kill of the others (default 90)
#   --dry-run     print the commands, run nothing
#
# Each line of output begins with the number of its process.  The script forwards SIGTERM and Ctrl-C to
# all processes as SIGTERM.  If a process fails, the script prints its number and exit code, and kills the
# other processes after --grace seconds.  The exit code is that of the first process that failed.
set -uo pipefail

# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
help_or_go_on "$@"
count="${1:-}"
[[ "$count" =~ ^[1-9][0-9]*$ ]] || fail "how many processes? ${0##*/} N [FLAGS] COMMAND ARG..."
shift
devices=1 port="" grace=90 dry_run=no
while [ $# -gt 0 ]; do
  help_or_go_on "$1"
  case "$1" in
    --dry-run) dry_run=yes ;;
    --devices | --port | --grace)
      [[ "${2:-}" =~ ^[0-9]+$ ]] || fail "$1 needs a number"
      printf -v "${1#--}" %s "$2"
      shift
      ;;
    -*) fail "unknown flag $1; --help lists the flags" ;;
    *) break ;;
  esac
  shift
done
[ $# -gt 0 ] || fail "run what? e.g. coa-jax sft --workdir=runs/two"

# Choose a free port.  The kernel assigns ports above 32768 to other programs.
while [ -z "$port" ]; do
  port=$((10000 + RANDOM % 20000))
  ! (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null || port=""
done

if [ "$dry_run" = yes ]; then
  for ((i = 0; i < count; i++)); do
    echo "JAX_PLATFORMS=cpu XLA_FLAGS='${XLA_FLAGS:+$XLA_FLAGS }\
--xla_force_host_platform_device_count=$devices' COA_JAX_COORDINATOR=127.0.0.1:$port\
 COA_JAX_NUM_PROCESSES=$count COA_JAX_PROCESS_ID=$i $(printf '%q ' "$@")"
  done
  exit 0
fi

export JAX_PLATFORMS=cpu COA_JAX_COORDINATOR="127.0.0.1:$port" COA_JAX_NUM_PROCESSES="$count"
export XLA_FLAGS="${XLA_FLAGS:+$XLA_FLAGS }--xla_force_host_platform_device_count=$devices"
export PYTHONUNBUFFERED=1
pids=()
# A shell lets background processes ignore SIGINT, so Ctrl-C reaches them as SIGTERM.
trap 'kill -TERM "${pids[@]}" 2>/dev/null' TERM INT
exec 4>&2 2>/dev/null # bash has its own words about whoever is killed
for ((i = 0; i < count; i++)); do
  # `exec` makes the process a direct child, so that this shell sees its pid and exit code.
  COA_JAX_PROCESS_ID=$i "$@" > >(sed -u "s/^/[$i] /") 2> >(sed -u "s/^/[$i] /" >&4) </dev/null 4>&- &
  pids+=($!)
done

first=0 deadline=""
while [ ${#pids[@]} -gt 0 ]; do
  # Poll the processes, because `wait -n` can miss a process that ended before the call.
  sleep 0.2 &
  wait $! # which a forwarded signal cuts short
  for i in "${!pids[@]}"; do
    kill -0 "${pids[i]}" && continue
    wait "${pids[i]}"
    code=$?
    unset "pids[$i]"
    [ "$code" -ne 0 ] || continue
    echo "error: process $i ended with exit code $code" >&4
    if [ "$first" = 0 ]; then
      first=$code deadline=$((SECONDS + grace))
    fi
  done
  if [ -n "$deadline" ] && [ "$SECONDS" -gt "$deadline" ] && [ ${#pids[@]} -gt 0 ]; then
    deadline=""
    echo "error: ending the other processes" >&4
    kill -KILL "${pids[@]}"
  fi
done
exit "$first"
