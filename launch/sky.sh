#!/usr/bin/env bash
# Runs a command of coa_jax on any cloud with SkyPilot (pip install skypilot).
#
#   bash launch/sky.sh [FLAGS] run COMMAND ARG...   e.g. run sft --config=configs/sft/web.py:7b \
#                                                        --workdir=/runs/a
#
# Flags:
#   --name NAME        of the job (default coa-jax)
#   --gpus KIND:N      of a node, e.g. H100:8 (default), or a TPU such as tpu-v5p-64
#   --nodes N          default 1
#   --bucket URL       s3://... or gs://..., mounted at /runs, where the work directory is (required)
#   --spot             cheaper machines, which the cloud may preempt at any time
#   --retries N        number of restarts of a run that fails (default 20)
#   --check            before the run, check on every host everything that the run needs;
#                      --check=compile also compiles the programs of the run
#   --preset KIND      variables for the compiler: cuda, tpu, v6e or none (default: by --gpus)
#   --env NAME=VALUE   a variable of the run; may be repeated
#   --secret-env NAME  the same, with the value of NAME in this shell; keys that the config names need no
#                      flag
#   --dry-run          print the task and the commands, run nothing
#
# The job is a managed job: if the machines are preempted, SkyPilot finds new machines, and the run resumes
# from its work directory.  The code of this checkout is copied, uncommitted changes included.
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

name=coa-jax gpus=H100:8 nodes=1 bucket="" spot=no dry_run=no
retries=20 preset="" check=no
parse_flags "name gpus nodes bucket retries preset env" "spot check" "$@"
[ "$action" = run ] || fail "what to do? run COMMAND ARG... (--help explains)"
[ -n "$bucket" ] || fail "--bucket is missing: where the work directory is kept, e.g. gs://mine"
[[ "$nodes" =~ ^[1-9][0-9]*$ ]] || fail "--nodes is a whole number from 1"
[[ "$retries" =~ ^[0-9]+$ ]] || fail "--retries is a whole number"
needs sky

extra=cuda
[[ "$gpus" != tpu* ]] || extra=tpu
[ -n "$preset" ] || preset="$extra"
[[ "$gpus" != tpu-v6e* || "$preset" != tpu ]] || preset=v6e
prepare
# On GPU machines, JAX does not know the other machines; SkyPilot's variables name them.
if [ "$extra" = cuda ]; then
  others="COA_JAX_COORDINATOR=\$(echo \"\$SKYPILOT_NODE_IPS\" | head -n 1):8476"
  others+=" COA_JAX_NUM_PROCESSES=\$SKYPILOT_NUM_NODES COA_JAX_PROCESS_ID=\$SKYPILOT_NODE_RANK"
  command="$others $command" checked="${checked:+$others $checked}"
fi
task="$(
  cat <<TASK
name: $name
num_nodes: $nodes
workdir: $COA_ROOT
resources:
  accelerators: $gpus
  use_spot: $([ "$spot" = yes ] && echo true || echo false)
  job_recovery:
    max_restarts_on_errors: $retries
    recover_on_exit_codes: [${again//|/, }]
file_mounts:
  /runs:
    source: $bucket
    mode: MOUNT
setup: |
  COA_JAX_VENV=$(environment) bash launch/setup_env.sh $extra $extras
run: |
$([ -z "$checked" ] || printf '  env %s || exit' "$checked")
  exec env $command
TASK
)"
launch=(sky jobs launch --yes "--name=$name")
for secret in ${secrets[@]+"${secrets[@]}"}; do launch+=(--secret "$secret"); done
if [ "$dry_run" = yes ]; then
  printf '%s\n' "$task"
  do_it "${launch[@]}" task.yaml
else
  file="$(mktemp --suffix=.yaml)"
  trap 'rm -f "$file"' EXIT
  printf '%s\n' "$task" >"$file"
  do_it "${launch[@]}" "$file"
fi
