#!/usr/bin/env bash
# Shows on one 80 GB GPU, or a v5e-8, what SFT and RL change: base, SFT, RL and a control, with intervals.
#
#   bash launch/proof.sh MODEL [--tasks gsm8k|hotpotqa] [--machine h100|v5e-8] [--data FILE]
#                        [--format hermes|tags] [--workdir DIR] [--seed N] [--debug] [--dry-run]
#
# MODEL is a directory or a name of the Hub, such as Qwen/Qwen3-0.6B or Qwen/Qwen3-1.7B.  Default:
# GSM8K with programs, in runs/proof-gsm8k.  First the script prints the hours of each stage.  The
# first trajectories are right answers of MODEL itself; --data names others (docs/data.md, Records),
# for example chains of agents with --format tags.  At the end there are a table and the page
# DIR/report/index.html.  --debug has tiny sizes, to try the script.
# To resume, give the same command again; finished stages are skipped.
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

tasks=gsm8k machine=h100 data="" format=hermes workdir="" seed=0 debug=no dry_run=no
values="tasks machine data format workdir seed"
parse_flags "$values" debug "$@"
model="$action"
parse_flags "$values" debug ${words[@]+"${words[@]}"}
[ -n "$model" ] || fail "give a model, e.g. bash launch/proof.sh Qwen/Qwen3-0.6B"
[ -z "$action" ] || fail "unknown argument $action; --help lists the flags"
[[ "$tasks" =~ ^(gsm8k|hotpotqa)$ ]] || fail "--tasks $tasks: give gsm8k or hotpotqa"
[[ "$machine" =~ ^(h100|v5e-8)$ ]] || fail "--machine $machine: give h100 (any GPU with 80 GB) or v5e-8"
[[ "$format" =~ ^(hermes|tags)$ ]] || fail "--format $format: give hermes or tags"
[[ "$seed" =~ ^[0-9]+$ ]] || fail "--seed $seed: give a number"
[ "$format" = hermes ] || [ -n "$data" ] ||
  fail "--format tags: a base model writes no chains of agents; name some with --data"
model="$(if_here "$model")" data="${data:+$(if_here "$data")}"
workdir="$(absolute "${workdir:-$COA_ROOT/runs/proof-$tasks}")"
cd "$COA_ROOT"
use_python
export XLA_PYTHON_CLIENT_MEM_FRACTION="${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.92}"
variant=",$format,$machine"
[ "$debug" = no ] || variant+=,debug
searched=()
[ "$tasks" = gsm8k ] || searched=(--config.tools.wiki_search.corpus="$workdir/corpus.jsonl")

coa() { do_it "$python" -u -m coa_jax "$@"; }

# once NAME COMMAND...: runs a command, unless it has finished.
once() {
  local name="$1"
  shift
  [ ! -e "$workdir/finished/$name" ] || return 0
  "$@"
  [ "$dry_run" = yes ] || touch "$workdir/finished/$name"
}

# train NAME VARIANT COMMAND FLAG...: trains a policy into the folder NAME, and writes its page.
train() {
  local name="$1" stage="$2" command="$3"
  shift 3
  coa "$command" --config="configs/proof/$tasks.py:$stage$variant" --workdir="$workdir/$name" "$@"
  coa report --workdir="$workdir/$name"
}

# sample NAME VARIANT FOLDER MODEL SEED: lets a policy answer questions, with results in FOLDER.
sample() {
  coa evaluate --config="configs/proof/$tasks.py:$2$variant" --workdir="$workdir/$3" \
    --config.stage="$1" --config.model="$4" --config.seed="$5" ${searched[@]+"${searched[@]}"}
}

# more: the control.  Its number of updates is known when RL has finished.
more() {
  local steps=STEPS
  [ "$dry_run" = yes ] || steps="$("$python" -m coa_jax proof updates --workdir="$workdir")"
  train more more rft --config.model="$workdir/sft/model" --config.seed="$((seed + 1))" \
    --config.traces="$workdir/again/traces.jsonl" --config.optimizer.total_steps="$steps"
}

given=() known=()
[ -z "$data" ] || given=(--given) known=(--config.distilled.records="$data")
[ "$debug" = yes ] || coa proof hours --tasks="$tasks" --model="$model" --machine="$machine" \
  ${given[@]+"${given[@]}"}
[ "$dry_run" = yes ] || mkdir -p "$workdir/finished"
[ "$tasks" = gsm8k ] || once corpus coa proof corpus --tasks="$tasks" --workdir="$workdir"
once evaluate-base sample base evaluate evaluations "$model" 0
if [ -z "$data" ]; then
  once sample sample sample sample sample "$model" "$seed"
  once sft train sft rft rft --config.model="$model" --config.seed="$seed" \
    --config.traces="$workdir/sample/traces.jsonl"
else
  once sft train sft sft sft --config.model="$model" --config.seed="$seed" --config.data="$data"
fi
once evaluate-sft sample sft evaluate evaluations "$workdir/sft/model" 0
once rl train rl rl rl --config.model="$workdir/sft/model" --config.seed="$seed" \
  ${searched[@]+"${searched[@]}"} ${known[@]+"${known[@]}"}
once evaluate-rl sample rl evaluate evaluations "$workdir/rl/model" 0
once again sample again again again "$workdir/sft/model" "$((seed + 1))"
once more more
once evaluate-more sample more evaluate evaluations "$workdir/more/model" 0
once evaluations coa report --workdir="$workdir/evaluations"
coa proof table --workdir="$workdir"
