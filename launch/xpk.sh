#!/usr/bin/env bash
# Runs a command of coa_jax on the TPUs of a GKE cluster with XPK (pip install xpk).
#
#   bash launch/xpk.sh [FLAGS] run COMMAND ARG...   e.g. run rl --config=configs/rl/web.py:7b \
#                                                        --workdir=/mnt/runs/a
#   bash launch/xpk.sh [FLAGS] list                 workloads of the cluster
#   bash launch/xpk.sh [FLAGS] delete               ends the workload
#
# Flags:
#   --cluster CLUSTER  made with `xpk cluster create` (required)
#   --zone ZONE        of the cluster (required)
#   --name NAME        of the workload (required, but not to list)
#   --type TYPE        e.g. v5p-128 (required to run)
#   --project PROJECT  default: the one gcloud is configured for
#   --image IMAGE      that the code is put into (default python:3.11)
#   --storage NAME     storage attached with `xpk storage create`, where the work directory is
#   --restarts N       after a failure or a preemption (default 20)
#   --dry-run          print the commands, run nothing
#
# The code of this checkout goes into the image, uncommitted changes included.
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

cluster="" zone="" name="" type="" project="" image=python:3.11 storage="" restarts=20 dry_run=no
parse_flags "cluster zone name type project image storage restarts" "" "$@"
[ -n "$action" ] || fail "what to do? run, list or delete (--help explains)"
[ -n "$cluster" ] || fail "--cluster is missing: the name of the GKE cluster"
[ -n "$zone" ] || fail "--zone is missing: the zone of the cluster"
[ "$action" = list ] || [ -n "$name" ] || fail "--name is missing: the name of the workload"
needs xpk

where=("--cluster=$cluster" "--zone=$zone")
[ -z "$project" ] || where+=("--project=$project")

case "$action" in
  run)
    [ -n "$type" ] || fail "--type is missing: the kind and size of the slice, e.g. v5p-128"
    command="bash launch/setup_env.sh tpu gguf && exec env $(coa_command ${words[@]+"${words[@]}"})"
    create=(xpk workload create "--workload=$name" "${where[@]}" "--tpu-type=$type" --num-slices=1
      "--base-docker-image=$image" "--script-dir=$COA_ROOT" "--max-restarts=$restarts")
    [ -z "$storage" ] || create+=("--storage=$storage")
    do_it "${create[@]}" "--command=$command"
    ;;
  list) do_it xpk workload list "${where[@]}" ;;
  delete) do_it xpk workload delete "--workload=$name" "${where[@]}" ;;
  *) fail "unknown action $action; run, list or delete" ;;
esac
