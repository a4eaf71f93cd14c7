#!/usr/bin/env bash
# Runs a command of coa_jax on GPU nodes of a SLURM cluster, from a checkout that all nodes see.
#
#   bash launch/slurm.sh [FLAGS] run COMMAND ARG...   e.g. run sft --config=configs/sft/web.py:7b \
#                                                          --workdir=/shared/runs/a
#   bash launch/slurm.sh [FLAGS] setup [COMMAND ARG...]  makes .venv for GPUs (once), with the packages
#                                                     that the command needs
#
# Flags:
#   --nodes N          default 1
#   --gpus N           GPUs of a node (default 8)
#   --cpus N           cores of a node for the process and its tools (default 64)
#   --time TIME        limit of the job (default 24:00:00)
#   --name NAME        of the job (default coa_jax)
#   --partition NAME   default: the cluster's
#   --account NAME     default: yours
#   --notice SECONDS   time between SIGTERM, after which the run saves, and the time limit of the job
#                      (default 600); give more than the time of an update and a checkpoint
#   --retries N        how often a job that lost a process is queued again (default 20)
#   --check            before the run, check on every host everything that the run needs;
#                      --check=compile also compiles the programs of the run
#   --preset KIND      variables for the compiler: cuda (default) or none
#   --env NAME=VALUE   a variable of the run; may be repeated
#   --secret-env NAME  the same, with the value of NAME in this shell; keys that the config names need no
#                      flag
#   --dry-run          print the job and the commands, run nothing
#
# A node has one process for all of its GPUs.  After a node failure, a preemption, a lost process or the
# time limit, the job is queued again, and the run resumes.  sbatch passes all variables of this shell to
# the job, including keys.
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

nodes=1 gpus=8 cpus=64 time=24:00:00 name=coa_jax partition="" account="" dry_run=no
retries=20 preset=cuda check=no notice=600
parse_flags "nodes gpus cpus time name partition account retries notice preset env" "check" "$@"
[ -n "$action" ] || fail "what to do? setup or run (--help explains)"
for number in "$nodes" "$gpus" "$cpus" "$retries" "$notice"; do
  [[ "$number" =~ ^[1-9][0-9]*$ ]] || fail "--nodes, --gpus, --cpus, --retries, --notice: whole numbers from 1"
done

case "$action" in
  setup)
    needed
    # shellcheck disable=SC2086  # a list of words
    do_it env "COA_JAX_VENV=$(environment)" bash "$COA_ROOT/launch/setup_env.sh" cuda $extras
    ;;
  run)
    needs sbatch
    prepare
    local_devices="$(seq -s, 0 $((gpus - 1)))"
    submit=(sbatch "--job-name=$name" "--nodes=$nodes" --ntasks-per-node=1
      "--gpus-per-node=$gpus" "--cpus-per-task=$cpus" "--time=$time" --requeue --open-mode=append
      "--signal=TERM@$notice" --export=ALL "--chdir=$COA_ROOT" "--output=$name-%j.log")
    [ -z "$partition" ] || submit+=("--partition=$partition")
    [ -z "$account" ] || submit+=("--account=$account")
    # srun does not inherit the number of cores from sbatch; without the flag each process gets one core.
    srun="srun --kill-on-bad-exit=1 --cpus-per-task=$cpus"
    # JAX finds the other processes through SLURM's variables, but would use only one GPU per task.
    job="$(
      cat <<JOB
#!/usr/bin/env bash
set -euo pipefail
export JAX_LOCAL_DEVICE_IDS=$local_devices
$([ -z "$checked" ] || printf '%s env %s' "$srun" "$checked")
status=0
$srun env $command || status=\$?
# See run_again in launch/common.sh.
if [[ "\$status" =~ ^($again)$ && "\${SLURM_RESTART_COUNT:-0}" -lt $retries ]]; then
  scontrol requeue "\$SLURM_JOB_ID"
fi
exit "\$status"
JOB
    )"
    [ "$dry_run" = no ] || printf '%s\n' "$job"
    do_it "${submit[@]}" <<<"$job"
    ;;
  *) fail "unknown action $action; setup or run" ;;
esac
