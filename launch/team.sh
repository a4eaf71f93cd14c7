#!/usr/bin/env bash
# Distils a LangGraph team of agents, whose model is SmolLM2-135M-Instruct (Q4_1) behind
# `coa-jax serve`.
#
#   bash launch/team.sh [--workdir DIR] [--number N] [--attempts N] [--held N] [--updates N]
#                       [--student smollm2|tiny] [--port N] [--dry-run]
#
# The team (examples/langgraph_team) tries N training questions of each of two sources, --attempts times
# each, and --held test questions of each source once.  Its logs are read with default settings.  The
# student is trained on the right runs, for --updates updates: adapters of SmolLM2, or all weights of the
# tiny policy of `coa-jax debug-files`.  It answers the same test questions.  Default folder: runs/team.
# To resume, give the same command again; finished stages and attempts are not repeated.
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

workdir="" number=40 attempts=2 held=20 updates=40 student=smollm2 port=8010 dry_run=no
parse_flags "workdir number attempts held updates student port" "" "$@"
[ -z "$action" ] || fail "unknown argument $action; --help lists the flags"
[[ "$student" =~ ^(smollm2|tiny)$ ]] || fail "--student $student: give smollm2 or tiny"
workdir="$(absolute "${workdir:-$COA_ROOT/runs/team}")"
cd "$COA_ROOT"
use_python
base="$COA_ROOT/weights/SmolLM2-135M-Instruct" url="http://127.0.0.1:$port"
[ -d "$base" ] || do_it "$python" -m coa_jax fetch smollm2 "$base"
[ "$dry_run" = yes ] || mkdir -p "$workdir"

# stage NAME COMMAND...: runs a command, unless it has finished.
stage() {
  [ ! -e "$workdir/$1.finished" ] || return 0
  do_it "${@:2}"
  [ "$dry_run" = yes ] || touch "$workdir/$1.finished"
}

# coa COMMAND FLAG...: a command of coa-jax.
coa=("$python" -u -m coa_jax)

# logs SPLIT NUMBER ATTEMPTS: the team tries questions of a split.
logs() {
  stage "logs-$1" "$python" examples/langgraph_team/team.py --url "$url/v1" --split "$1" \
    --number "$2" --attempts "$3" --output "$workdir/$1.jsonl" --questions "$workdir/$1-questions.jsonl"
}

if [ ! -e "$workdir/logs-test.finished" ]; then
  serve=("${coa[@]}" serve --config=configs/serve/factbook.py --config.model="$base"
    --config.port="$port" --config.engine.max_length=2048 --config.engine.slots=8)
  if [ "$dry_run" = yes ]; then
    do_it "${serve[@]}"
  else
    "${serve[@]}" >"$workdir/serve.log" 2>&1 &
    server=$!
    trap 'kill "$server" 2>/dev/null || true' EXIT
    until curl -sf "$url/health" >/dev/null; do
      kill -0 "$server" || fail "the server ended; see $workdir/serve.log"
      sleep 1
    done
  fi
  logs train "$number" "$attempts"
  logs test "$held" 1
  [ "$dry_run" = yes ] || kill "$server"
fi

stage distill "${coa[@]}" distill --config=configs/distill/traces.py --workdir="$workdir/distill" \
  --config.traces.files="$workdir/train.jsonl"

sft=("--config.model=$base" --config.prompt_style=brief --config.batch_size=4
  --config.lora.rank=8 --config.optimizer.learning_rate=2e-3)
evaluate=()
if [ "$student" = tiny ]; then
  sft=(--config=configs/sft/tiny.py) evaluate=(--config=configs/evaluate/tiny.py)
  [ -d runs/debug/scratch/model ] || do_it "${coa[@]}" debug-files
fi
stage sft "${coa[@]}" sft "${sft[@]}" --workdir="$workdir/sft" \
  --config.data="$workdir/distill/train.jsonl" --config.validation= \
  --config.optimizer.total_steps="$updates"
# The protocol has the tools that the logs call; the first record names it.
protocol=PROTOCOL
[ "$dry_run" = yes ] || protocol="$(sed -nE '1s/.*"protocol": ?"([^"]*)".*/\1/p' "$workdir/distill/train.jsonl")"
tools="${protocol#free_}"
tools="$(sed -E 's/(wiki_search|code)_?/\1,/g; s/,$//' <<<"$tools")"
stage evaluate "${coa[@]}" evaluate ${evaluate[@]+"${evaluate[@]}"} \
  --workdir="$workdir/evaluate" --config.model="$workdir/sft/model" --config.temperature=0 \
  --config.tasks="$workdir/test-questions.jsonl" --config.num_tasks=0 --config.samples=1 \
  --config.protocol="$protocol" --config.tools.names="$tools" --config.tools.wiki_search.top_k=2
do_it "$python" examples/langgraph_team/compare.py "$workdir/test.jsonl" "$workdir/evaluate"
