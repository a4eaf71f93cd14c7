#!/usr/bin/env bash
# The whole pipeline on a CPU: teacher traces, distillation, SFT, RL with live tools, evaluation.
#
#   bash launch/quickstart.sh [--workdir DIR] [--seed N] [--config=FILE] [--config.KEY=VALUE ...]
#
# Smaller recipes for one protocol each are configs/quickstart/web.py, mhqa.py and code.py.
# Writes DIR (default runs/quickstart): metrics, traces, checkpoints, summary.json and the page
# report/index.html.  The same command continues an interrupted run.
set -euo pipefail

# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
unset workdir
rest=()
while [ $# -gt 0 ]; do
  help_or_go_on "$1"
  case "$1" in
    --workdir=*) workdir="${1#*=}" ;;
    --workdir) workdir="${2:-}"; shift $(($# > 1)) ;;
    --config | --model) rest+=("$1" "$(if_here "${2:-}")"); shift $(($# > 1)) ;;
    --config=* | --model=*) rest+=("${1%%=*}=$(if_here "${1#*=}")") ;;
    *) rest+=("$1") ;;
  esac
  shift
done
[ -n "${workdir-runs/quickstart}" ] || fail "--workdir needs a directory"
# The command runs in the repository, but relative paths are relative to the caller's directory.
workdir="${workdir+$(absolute "$workdir")}"

extras=(demo)
case "${rest[*]-}" in
  *configs/pretrained/*) extras+=(gguf tasks) ;;
  *configs/quickstart/code.py*) extras+=(tasks) ;;
  *configs/quickstart/web.py*) extras+=(web) ;;
esac
source "$COA_ROOT/launch/setup_env.sh" "${extras[@]}"
cd "$COA_ROOT"
keep_buffers
exec python -m coa_jax quickstart --workdir "${workdir:-runs/quickstart}" ${rest[@]+"${rest[@]}"}
