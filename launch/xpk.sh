#!/usr/bin/env bash
# Runs a command of coa_jax on the TPUs of a GKE cluster with XPK (pip install xpk).
#
#   bash launch/xpk.sh [FLAGS] run COMMAND ARG...   e.g. run sft --config=configs/sft/web.py:7b \
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
#   --image IMAGE      base image, to which the code is added (default python:3.12)
#   --storage NAME     storage attached with `xpk storage create`, where the work directory is
#   --restarts N       number of restarts after a failure or a preemption (default 20)
#   --check            before the run, check on every host everything that the run needs;
#                      --check=compile also compiles the programs of the run
#   --preset KIND      variables for the compiler: tpu, v6e or none (default: by --type)
#   --env NAME=VALUE   a variable of the run; may be repeated
#   --secret-env NAME  the same, with the value of NAME in this shell; keys that the config names need no
#                      flag.  Whoever may read the cluster's workloads can read the values.
#   --dry-run          print the commands, run nothing
#
# The code of this checkout goes into the image, uncommitted changes included.
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

cluster="" zone="" name="" type="" project="" image=python:3.12 storage="" restarts=20 dry_run=no
preset="" check=no
parse_flags "cluster zone name type project image storage restarts preset env" "check" "$@"
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
    [ -n "$preset" ] || preset="$(kind_of "$type")"
    prepare
    command="COA_JAX_VENV=$(environment) bash launch/setup_env.sh tpu $extras && ${checked:+env $checked && }exec env $command"
    create=(xpk workload create "--workload=$name" "${where[@]}" "--tpu-type=$type" --num-slices=1
      "--base-docker-image=$image" "--script-dir=$COA_ROOT" "--max-restarts=$restarts"
      # Without this flag, a workload is restarted only after faults of the cluster.
      --restart-on-user-code-failure)
    [ -z "$storage" ] || create+=("--storage=$storage")
    if [ ${#secrets[@]} -gt 0 ]; then
      # A name without a value passes the value of the variable in this shell.
      file="$(mktemp)"
      trap 'rm -f "$file"' EXIT
      printf '%s\n' "${secrets[@]}" >"$file"
      [ "$dry_run" = no ] || echo "# $file: ${secrets[*]}"
      create+=("--env-file=$file")
    fi
    do_it "${create[@]}" "--command=$command"
    ;;
  list) do_it xpk workload list "${where[@]}" ;;
  delete) do_it xpk workload delete "--workload=$name" "${where[@]}" ;;
  *) fail "unknown action $action; run, list or delete" ;;
esac
