#!/usr/bin/env bash
# Runs a command of coa_jax on a TPU slice of Cloud TPU's queue.  If the slice is preempted, the script
# requests a new slice and runs the command again.
#
#   bash launch/tpu_queue.sh [FLAGS] run COMMAND ARG...  e.g. run sft --config=configs/sft/web.py:7b \
#                                                             --workdir=/mnt/runs/a
#   bash launch/tpu_queue.sh [FLAGS] delete              gives the slice back
#
# Flags:
#   --name NAME        of the request and of the slice (required)
#   --zone ZONE        (required)
#   --type TYPE        e.g. v5p-128, which is 64 chips, a v5p:4x4x4 (required)
#   --version VERSION  software of the hosts (default v2-alpha-tpuv5, for v5p)
#   --project PROJECT  default: the one gcloud is configured for
#   --spot             a cheaper slice, which Cloud TPU may preempt at any time
#   --delete           give the slice back at the end of the command, whatever the exit code is
#   --retries N        number of further slices after the first (default 20)
#   --poll SECONDS     time between two queries of the request's state (default 60)
#   --check            before the run, check on every host everything that the run needs;
#                      --check=compile also compiles the programs of the run
#   --preset KIND      variables for the compiler: tpu, v6e or none (default: by --type)
#   --env NAME=VALUE   a variable of the run; may be repeated
#   --secret-env NAME  the same, with the value of NAME in this shell; keys that the config names need no
#                      flag
#   --dry-run          print the commands, run nothing
#
# The work directory must be on a file share or bucket that all hosts mount and that outlives the slice.
# The script runs the command again on the same slice after the exit codes 3, 134, 137, 139, 143 and 255
# (docs/launch.md); after another exit code the script ends with this code.  Without --delete the slice
# stays, and costs money, until you give it back.
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

name="" zone="" type="" project="" version=v2-alpha-tpuv5 spot=no retries=20 poll=60 dry_run=no
preset="" check=no delete=no
parse_flags "name zone type version project retries poll preset env" "spot check delete" "$@"
[ -n "$action" ] || fail "what to do? run or delete (--help explains)"
[ -n "$name" ] || fail "--name is missing: the name of the request"
[ -n "$zone" ] || fail "--zone is missing: the zone of the slice"
[[ "$retries$poll" =~ ^[0-9]+$ ]] || fail "--retries and --poll are whole numbers"
needs gcloud

use_slice
pod+=(--retries 0)

ask() {
  local request=(gcloud compute tpus queued-resources create "$name" "--node-id=$name"
    "${where[@]}" "--accelerator-type=$type" "--runtime-version=$version")
  [ "$spot" = no ] || request+=(--spot)
  do_it "${request[@]}"
}
# state: prints the state of the request, or NONE if there is no request.  A query that fails is repeated,
# because a network failure must not lead to the deletion of a slice.  Other output of gcloud, such as
# the hint to a newer version, goes to stderr.
state() {
  local told tries complaint
  complaint="$(mktemp)"
  for tries in 1 2 3 4 5; do
    if told="$(gcloud compute tpus queued-resources describe "$name" "${where[@]}" \
      '--format=value(state.state)' 2>"$complaint")" && [[ "$told" =~ ^[A-Z_]+$ ]]; then
      rm -f "$complaint"
      printf '%s\n' "$told"
      return
    fi
    told="$(cat "$complaint")"
    if [[ "$told" =~ NOT_FOUND|"not found"|"does not exist" ]]; then
      rm -f "$complaint"
      echo NONE
      return
    fi
    [ "$tries" = 5 ] || sleep "$poll"
  done
  rm -f "$complaint"
  fail "gcloud does not tell the state of $name: ${told##*$'\n'}; give the same command again to go on"
}
give_back() {
  do_it gcloud compute tpus queued-resources delete "$name" "${where[@]}" --force --quiet
}

# Waits for the slice; fails if the request will never be granted.
wait_for_slice() {
  if [ "$dry_run" = yes ]; then
    do_it gcloud compute tpus queued-resources describe "$name" "${where[@]}" \
      '--format=value(state.state)'
    return
  fi
  local now
  while :; do
    now="$(state)" || exit
    case "$now" in
      ACTIVE) return 0 ;;
      FAILED | SUSPENDED | SUSPENDING | NONE) return 1 ;;
    esac
    echo "waiting for $name: $now" >&2
    sleep "$poll"
  done
}

# The check runs only before the first start, so that a short outage of a service later ends no run.
# If the installation fails on a host, for example for lack of a connection, all hosts try again.
start() {
  local first=(${checks[@]+"${checks[@]}"}) tries code
  for tries in 1 2 3; do
    code=0
    on_slice setup "${words[@]}" || code=$?
    [ "$code" != 0 ] || break
    [ "$code" != 2 ] && [ "$tries" -lt 3 ] || return "$code" # 2: a fault of the command
    echo "the installation on $name has failed; trying again ($tries of 2)" >&2
    sleep "$poll"
  done
  checks=()
  on_slice ${first[@]+"${first[@]}"} run "${words[@]}"
}

case "$action" in
  run)
    [ -n "$type" ] || fail "--type is missing: the kind and size of the slice, e.g. v5p-128"
    coa_command ${words[@]+"${words[@]}"} >/dev/null
    for ((attempt = 0; attempt <= retries; attempt++)); do
      # An interrupted launch may have left a request, which is used unless it was refused.
      now=NONE
      [ "$dry_run" = yes ] || now="$(state)" || exit
      case "$now" in
        # A later failure of gcloud does not end the run.
        NONE) ask || [ "$attempt" -gt 0 ] || exit ;;
        FAILED | SUSPENDED | SUSPENDING) { give_back && ask; } || [ "$attempt" -gt 0 ] || exit ;;
      esac
      if wait_for_slice; then
        status=0
        start || status=$?
        [ "$dry_run" = no ] || end_run "$status" give_back
        # If the slice is gone, the exit code does not matter: a finished run ends at once when it is
        # started again.
        now="$(state)" || exit
        if [ "$now" = ACTIVE ]; then
          run_again "$status" && [ "$attempt" -lt "$retries" ] || end_run "$status" give_back
          echo "exit code $status: the run is started again on $name" >&2
          sleep "$poll"
          continue
        fi
      fi
      echo "$name is gone; slice $((attempt + 1)) of $((retries + 1))" >&2
      give_back || true
      sleep "$poll"
    done
    fail "$name was taken away $((retries + 1)) times; give the same command again to go on"
    ;;
  delete) give_back ;;
  *) fail "unknown action $action; run or delete" ;;
esac
