#!/usr/bin/env bash
# Compares RL algorithms: from one fine-tuned policy, on the same number of samples, with seeds.
#
#   bash launch/algorithms.sh [--workdir DIR] [--model DIR] [--algorithms A,B] [--seeds 0,1,2]
#                             [--steps N] [--questions N] [--name NAME] [--dry-run]
#                             [--config.KEY=VALUE ...]
#
# Default: six algorithms, three seeds, 16 steps of 192 samples, 400 held-out questions each, from
# the policy that configs/sft/factbook.py leaves in runs/sft/model, into runs/algorithms.  To resume,
# give the same command again; finished runs are skipped.  At the end the script prints a table, which
# `coa-jax sweep --workdir=DIR` prints at any time.
#
# To compare settings instead of algorithms, call the script once for each setting, with one
# algorithm, with the setting as --config.KEY=VALUE, and with --name, which names the row of the
# table.
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

workdir="" model="" algorithms=grpo,dapo,dr_grpo,rloo,gspo,ppo
seeds=0,1,2 steps=16 questions=400 name="" dry_run=no
parse_flags "workdir model algorithms seeds steps questions name config.*" "" "$@"
[ -z "$action" ] || fail "unknown argument $action; --help lists the flags"
for number in steps questions; do
  [[ "${!number}" =~ ^[1-9][0-9]*$ ]] || fail "--$number ${!number}: give a number above 0"
done
IFS=, read -ra seed_list <<<"$seeds"
for seed in "${seed_list[@]}"; do
  [[ "$seed" =~ ^[0-9]+$ ]] || fail "--seeds $seeds: give numbers with commas between them"
done
IFS=, read -ra algorithm_list <<<"$algorithms"
[[ "$name" =~ ^[A-Za-z0-9._-]*$ ]] || fail "--name $name: give letters, digits, dots and hyphens"
[ -z "$name" ] || [ "${#algorithm_list[@]}" = 1 ] ||
  fail "--name $name: it names the runs of one algorithm; give --algorithms one name"

# The commands run in the repository, but relative paths are relative to the caller's directory.
workdir="${workdir:+$(absolute "$workdir")}" model="${model:+$(absolute "$model")}"
cd "$COA_ROOT"
workdir="${workdir:-runs/algorithms}" model="${model:-runs/sft/model}"
use_python
keep_buffers

# measure MODEL RUN: evaluates a policy; the questions are the same for all policies.
measure() {
  [ ! -f "$2/evaluate/summary.json" ] || return 0
  do_it "$python" -u -m coa_jax evaluate --config=configs/evaluate/factbook.py \
    --workdir="$2/evaluate" --config.model="$1" --config.num_tasks="$questions"
}

measure "$model" "$workdir/start"
for seed in "${seed_list[@]}"; do
  for algorithm in "${algorithm_list[@]}"; do
    run="$workdir/${name:-$algorithm}-$seed"
    [ ! -f "$run/evaluate/summary.json" ] || continue
    knobs=()
    # The learning rate of the preset is meant for critics with billions of pretrained parameters.
    [ "$algorithm" != ppo ] || knobs=(--config.algorithm.critic_learning_rate=1e-3)
    do_it "$python" -u -m coa_jax rl --config=configs/rl/factbook.py --workdir="$run" \
      --config.model="$model" --config.algorithm.name="$algorithm" --config.seed="$seed" \
      --config.optimizer.total_steps="$steps" ${knobs[@]+"${knobs[@]}"} \
      ${settings[@]+"${settings[@]}"}
    measure "$run/model" "$run"
  done
done
do_it "$python" -m coa_jax sweep --workdir="$workdir"
