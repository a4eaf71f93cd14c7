#!/usr/bin/env bash
# The whole pipeline on a CPU: teacher traces, distillation, SFT, RL with live tools, evaluation.
#
#   bash launch/quickstart.sh [--workdir DIR] [--seed N] [--config=FILE] [--config.KEY=VALUE ...]
#
# Smaller recipes for one protocol each are configs/quickstart/web.py, mhqa.py and code.py.
# Writes DIR (default runs/quickstart): metrics, traces, checkpoints, summary.json and the page
# report/index.html.  The same command continues an interrupted run.
set -euo pipefail

workdir=runs/quickstart
rest=()
while [ $# -gt 0 ]; do
  case "$1" in
    -h | --help) sed -n '2,8s/^# \{0,1\}//p' "$0"; exit 0 ;;
    --workdir=*) workdir="${1#*=}" ;;
    --workdir)
      [ $# -ge 2 ] || { echo "error: --workdir needs a directory" >&2; exit 2; }
      workdir="$2"
      shift
      ;;
    *) rest+=("$1") ;;
  esac
  shift
done
[ -n "$workdir" ] || { echo "error: --workdir needs a directory" >&2; exit 2; }
# The command runs in the repository; a relative directory is meant from where the user stands.
case "$workdir" in
  /* | *://* | runs/quickstart) ;;
  *) workdir="$PWD/$workdir" ;;
esac

source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh" gguf tasks web
# Training on a CPU allocates and frees the same large buffers in every step: keeping them mapped
# instead of returning them to the kernel makes a step about a quarter shorter.
export MALLOC_ARENA_MAX=1 MALLOC_MMAP_MAX_=0
export MALLOC_TRIM_THRESHOLD_=100000000000 MALLOC_TOP_PAD_=268435456
exec python -m coa_jax.quickstart --workdir "$workdir" ${rest[@]+"${rest[@]}"}
