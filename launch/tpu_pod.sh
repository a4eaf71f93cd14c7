#!/usr/bin/env bash
# Runs a command of coa_jax on every host of a Cloud TPU pod slice.
#
#   bash launch/tpu_pod.sh [FLAGS] setup               copy this commit to all hosts, install it
#   bash launch/tpu_pod.sh [FLAGS] run COMMAND ARG...  e.g. run sft --config=configs/sft/web.py:7b \
#                                                           --workdir=/mnt/runs/a
#   bash launch/tpu_pod.sh [FLAGS] logs                the end of each host's log
#   bash launch/tpu_pod.sh [FLAGS] stop                end the command on all hosts
#
# Flags:
#   --name NAME        the TPU VM (required)
#   --zone ZONE        its zone (required)
#   --project PROJECT  default: the one gcloud is configured for
#   --dir DIR          where the code lives on the hosts (default coa_jax, in the home directory)
#   --detach           run: return at once, the command goes on after this shell ends
#   --dry-run          print the commands, run nothing
#
# The work directory must be one that all hosts share (a mounted file share or bucket): the first
# host writes metrics, all hosts write their shards of a checkpoint.  Run the same command again to
# continue after a preemption.  What is committed is what runs: uncommitted changes stay here.
set -euo pipefail

# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

name="" zone="" project="" dir=coa_jax detach=no dry_run=no
parse_flags "name zone project dir" "detach" "$@"
[ -n "$action" ] || fail "what to do? setup, run, logs or stop (--help explains)"
[ -n "$name" ] || fail "--name is missing: the name of the TPU VM"
[ -n "$zone" ] || fail "--zone is missing: the zone of the TPU VM"
[[ "$dir" =~ ^[A-Za-z0-9._/-]+$ ]] || fail "--dir $dir: only letters, digits, . _ - /"
needs gcloud

where=("$name" "--zone=$zone" --worker=all)
[ -z "$project" ] || where+=("--project=$project")

on_all() { do_it gcloud compute tpus tpu-vm ssh "${where[@]}" --command "$1"; }

case "$action" in
  setup)
    archive="${TMPDIR:-/tmp}/coa_jax-$(git -C "$COA_ROOT" rev-parse --short HEAD).tar.gz"
    do_it git -C "$COA_ROOT" archive --format=tar.gz -o "$archive" HEAD
    do_it gcloud compute tpus tpu-vm scp "$archive" "$name:coa_jax.tar.gz" "${where[@]:1}"
    # Some images of TPU VMs have Python 3.10 only: there setup_env.sh takes one from uv.
    on_all "mkdir -p $dir && tar -xzf coa_jax.tar.gz -C $dir && \
{ command -v python3.11 python3.12 python3.13 >/dev/null || python3 -m pip install -q --user uv || true; } && \
bash $dir/launch/setup_env.sh tpu gguf"
    ;;
  run)
    command="$(coa_command ${words[@]+"${words[@]}"})"
    if [ "$detach" = yes ]; then
      on_all "cd $dir && (nohup env $command >run.log 2>&1 </dev/null & echo \$! >run.pid)"
    else
      # The shell becomes the command: its pid is the one noted, its exit code is gcloud's.
      on_all "cd $dir && bash -c 'echo \$\$ >run.pid; exec > >(tee run.log) 2>&1; \
exec env \"\$@\"' run $command"
    fi
    ;;
  logs) on_all "tail -n 20 $dir/run.log" ;;
  stop) on_all "kill \$(cat $dir/run.pid)" ;;
  *) fail "unknown action $action; setup, run, logs or stop" ;;
esac
