#!/usr/bin/env bash
# The whole pipeline on a small pretrained model, on a CPU: the claims of the paper in small.
#
#   bash launch/pretrained.sh [--workdir DIR] [--seed N] [--model M] [--config=FILE] [--config.KEY=VALUE ...]
#
# M is a model directory or a GGUF file; without it SmolLM2-135M-Instruct is fetched (98 MB).
# Writes DIR (default runs/pretrained): metrics, traces, checkpoints, summary.json and the page
# report/index.html.  The same command continues an interrupted run.
set -euo pipefail

here="$(dirname "${BASH_SOURCE[0]}")"
case " $* " in
  *" -h "* | *" --help "*) sed -n '2,8s/^# \{0,1\}//p' "$0"; exit 0 ;;
  *" --model"* | *:debug*) ;;
  *) bash "$here/fetch_smollm2.sh" ;;
esac
exec bash "$here/quickstart.sh" --workdir="$(cd "$here/.." && pwd)/runs/pretrained" \
  --config=configs/pretrained/factbook.py "$@"
