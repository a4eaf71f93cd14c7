#!/usr/bin/env bash
# Compares RL with more SFT and rejection sampling, where trajectories are few (docs/experiments.md).
#
#   bash launch/few.sh [--workdir DIR] [--seed N] [--arms rl,more,rft] [--dry-run]
#
# Default: seed 0 in runs/few-0, all arms.  Each stage has a folder in DIR, and each policy a folder
# with its two evaluations.  The base is SmolLM2-135M-Instruct in Q4_1 (4 bits).
# To resume, give the same command again; finished stages are skipped.
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

workdir="" seed=0 arms=rl,more,rft dry_run=no
parse_flags "workdir seed arms" "" "$@"
[ -z "$action" ] || fail "unknown argument $action; --help lists the flags"
[[ "$seed" =~ ^[0-9]+$ ]] || fail "--seed $seed: give a number"
[[ "$arms" =~ ^(rl|more|rft)(,(rl|more|rft))*$ ]] || fail "--arms $arms: give some of rl,more,rft"
workdir="$(absolute "${workdir:-$COA_ROOT/runs/few-$seed}")"
cd "$COA_ROOT"
use_python
base="$COA_ROOT/weights/SmolLM2-135M-Instruct"
[ -d "$base" ] || do_it "$python" -m coa_jax fetch smollm2 "$base"
[ "$dry_run" = yes ] || mkdir -p "$workdir"

# stage NAME VARIANT COMMAND FLAG...: runs a command into the folder NAME, unless it has finished.
stage() {
  local name="$1" variant="$2" command="$3"
  shift 3
  [ ! -e "$workdir/$name/finished" ] || return 0
  do_it "$python" -u -m coa_jax "$command" --config="configs/few/factbook.py:$variant" \
    --workdir="$workdir/$name" "$@"
  [ "$dry_run" = yes ] || touch "$workdir/$name/finished"
}

# measure POLICY: evaluates a policy on the test tasks, greedily and at temperature 1.
measure() {
  local variant
  for variant in greedy evaluate; do
    stage "evaluate-$1-$variant" "$variant" evaluate --config.model="$workdir/$2" \
      --config.stage="$variant"
  done
}

stage distill distill distill --config.tasks.seed="$seed" --config.teacher.seed="$seed"
stage sft sft sft --config.model="$base" --config.seed="$seed" \
  --config.data="$workdir/distill/train.jsonl" \
  --config.validation="$workdir/distill/validation.jsonl"
[ -e "$workdir/sft/best" ] || do_it "$python" -m coa_jax export --workdir="$workdir/sft" \
  --best --dtype=float32 --output="$workdir/sft/best"
measure sft sft/best
if [[ ",$arms," == *,rl,* ]]; then
  stage rl rl rl --config.model="$workdir/sft/best" --config.seed="$((seed + 100))"
  measure rl rl/model
fi
if [[ ",$arms," == *,more,* ]]; then
  stage more more sft --config.model="$workdir/sft/best" --config.seed="$((seed + 100))" \
    --config.data="$workdir/distill/train.jsonl" \
    --config.validation="$workdir/distill/validation.jsonl"
  measure more more/model
fi
if [[ ",$arms," == *,rft,* ]]; then
  policy=sft/best
  for round in 1 2 3; do
    # Each round samples the tasks of a seed of its own.
    stage "sample-$round" sample evaluate --config.model="$workdir/$policy" \
      --config.seed="$((seed + 100 * round))" --config.stage=sample
    stage "rft-$round" rft rft --config.model="$workdir/$policy" --config.seed="$seed" \
      --config.traces="$workdir/sample-$round/traces.jsonl"
    policy="rft-$round/model"
  done
  measure rft "$policy"
fi
