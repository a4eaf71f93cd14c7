#!/usr/bin/env bash
# Makes the tiny policy, data and questions that the debug forms of configs/ use.  Takes a minute.
#
#   bash launch/debug_files.sh [DIR]      default runs/debug, which the configs name
#
# Afterwards e.g.: python -m coa_jax.sft --config=configs/sft/web.py:debug --workdir=runs/debug/sft
set -euo pipefail

# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
help_or_go_on "$@"
# The command runs in the repository; a directory that is named is meant from where the user stands.
dir="${1:+$(absolute "$1")}"
cd "$COA_ROOT"
use_python
exec "$python" -m coa_jax.debug_files --workdir="${dir:-runs/debug}"
