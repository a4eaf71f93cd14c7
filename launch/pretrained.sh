#!/usr/bin/env bash
# The whole pipeline on a small pretrained model, on a CPU: the claims of the paper in small.
#
#   bash launch/pretrained.sh [--workdir DIR] [--seed N] [--model M] [--config=FILE] [--config.KEY=VALUE ...]
#
# M is a model directory or a GGUF file; without it SmolLM2-135M-Instruct in Q4_1 (4 bits) is fetched (98 MB).
# Writes DIR (default runs/pretrained): metrics, traces, checkpoints, summary.json and the page
# report/index.html.  The same command continues an interrupted run.
set -euo pipefail

# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
fetch=1
rest=()
while [ $# -gt 0 ]; do
  help_or_go_on "$1"
  case "$1" in
    --model=*) rest+=("--model=$(absolute "${1#*=}")"); fetch= ;;
    --model)
      [ $# -ge 2 ] || fail "--model needs a directory or a file"
      rest+=("--model=$(absolute "$2")") fetch=
      shift
      ;;
    --config=*:*debug*) rest+=("$1"); fetch= ;; # a policy of random weights
    *) rest+=("$1") ;;
  esac
  shift
done
[ -z "$fetch" ] || (
  source "$COA_ROOT/launch/setup_env.sh" demo gguf tasks
  python -m coa_jax fetch smollm2 "$COA_ROOT/weights/SmolLM2-135M-Instruct" >&2
)
exec bash "$COA_ROOT/launch/quickstart.sh" --workdir="$COA_ROOT/runs/pretrained" \
  --config="$COA_ROOT/configs/pretrained/factbook.py" ${rest[@]+"${rest[@]}"}
