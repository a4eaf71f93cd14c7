#!/usr/bin/env bash
# Makes the tiny policy, data and questions that the debug forms of configs/ use.  Takes a minute.
#
#   bash launch/debug_files.sh [DIR]      default runs/debug, which the configs name
#
# Afterwards e.g.: python -m coa_jax.sft --config=configs/sft/web.py:debug --workdir=runs/debug/sft
set -euo pipefail

case "${1:-}" in
  -h | --help) sed -n '2,6s/^# \{0,1\}//p' "$0"; exit 0 ;;
esac
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
# The commands run in the repository; a directory that is named is meant from where the user stands.
dir="${1:+$(absolute "$1")}"
cd "$COA_ROOT"
dir="${dir:-runs/debug}"
python=python
[ ! -x .venv/bin/python ] || python=.venv/bin/python

mkdir -p "$dir"
"$python" -m coa_jax.distill --config=configs/distill/factbook.py --workdir="$dir/distill" \
  --config.tasks.train=40 --config.tasks.validation=4
"$python" -m coa_jax.scratch --config=configs/scratch/factbook.py --workdir="$dir/scratch" \
  --config.data="$dir/distill/train.jsonl" --config.policy.hidden_size=32 \
  --config.policy.intermediate_size=48 --config.policy.num_layers=1 --config.policy.head_dim=16 \
  --config.policy.induction=False
cat >"$dir/questions.jsonl" <<'EOF'
{"question": "What is the capital of Lesotho?", "answer": "Maseru"}
{"question": "What is 12 times 7?", "answer": "84"}
{"question": "What is the capital of Bhutan?", "answer": "Thimphu"}
{"question": "How many sides has a hexagon?", "answer": "6"}
EOF
"$python" -m coa_jax.tasks.examples "$dir/benchmarks"
echo "policy, data and questions -> $dir"
