#!/usr/bin/env bash
# Runs a command of coa_jax on one Cloud TPU VM: makes the VM, copies the code, runs.
#
#   bash launch/tpu_vm.sh [FLAGS] run COMMAND ARG...   e.g. run sft --config=configs/sft/factbook.py \
#                                                           --workdir=/home/me/runs/a
#   bash launch/tpu_vm.sh [FLAGS] logs                 the end of the log
#   bash launch/tpu_vm.sh [FLAGS] delete               deletes the VM and all on its disk
#
# Flags:
#   --name NAME        name of the TPU VM (required); an existing VM of this name is used
#   --zone ZONE        its zone (required)
#   --type TYPE        default v5litepod-8
#   --version VERSION  software of the VM (default v2-alpha-tpuv5-lite; v5p: v2-alpha-tpuv5)
#   --project PROJECT  default: the one gcloud is configured for
#   --spot             a cheaper VM, which Cloud TPU may preempt at any time
#   --delete           delete the VM and its disk at the end of the command, whatever the exit code is;
#                      otherwise the VM stays, and costs money, until you delete it
#   --check            before the run, check on every host everything that the run needs;
#                      --check=compile also compiles the programs of the run
#   --retries N        number of restarts of a run that lost a process or its connection (default 20)
#   --poll SECONDS     wait before a restart (default 10)
#   --preset KIND      variables for the compiler: tpu, v6e or none (default: by --type)
#   --env NAME=VALUE   a variable of the run; may be repeated
#   --secret-env NAME  the same, with the value of NAME in this shell; keys that the config names need no
#                      flag
#   --dry-run          print the commands, run nothing
#
# To resume, give the same `run` again: the script starts a stopped VM, and creates a preempted VM again,
# with an empty disk.  With --spot, keep the work directory on a mounted file share or bucket.  The script
# copies the last commit, without uncommitted changes.
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

name="" zone="" project="" type=v5litepod-8 version=v2-alpha-tpuv5-lite spot=no dry_run=no
retries=20 poll=10 preset="" check=no delete=no
parse_flags "name zone project type version retries poll preset env" "spot check delete" "$@"
[ -n "$action" ] || fail "what to do? run, logs or delete (--help explains)"
[ -n "$name" ] || fail "--name is missing: the name of the TPU VM"
[ -n "$zone" ] || fail "--zone is missing: the zone of the TPU VM"
needs gcloud

use_slice
pod+=(--retries "$retries" --poll "$poll")

remove() { do_it gcloud compute tpus tpu-vm delete "$name" "${where[@]}" --quiet; }

case "$action" in
  run)
    coa_command ${words[@]+"${words[@]}"} >/dev/null
    now=NONE
    [ "$dry_run" = yes ] || now="$(gcloud compute tpus tpu-vm describe "$name" "${where[@]}" \
      '--format=value(state)' 2>/dev/null)" || now=NONE
    case "$now" in
      PREEMPTED | TERMINATED)
        echo "$name was taken away ($now): it is made anew" >&2
        remove
        now=NONE
        ;;
      STOPPED) do_it gcloud compute tpus tpu-vm start "$name" "${where[@]}" ;;
    esac
    if [ "$now" = NONE ]; then
      create=(gcloud compute tpus tpu-vm create "$name" "${where[@]}"
        "--accelerator-type=$type" "--version=$version")
      [ "$spot" = no ] || create+=(--spot)
      do_it "${create[@]}"
    fi
    status=0
    { on_slice setup "${words[@]}" && on_slice ${checks[@]+"${checks[@]}"} run "${words[@]}"; } || status=$?
    end_run "$status" remove
    ;;
  logs) on_slice logs ;;
  delete) remove ;;
  *) fail "unknown action $action; run, logs or delete" ;;
esac
