#!/usr/bin/env bash
# Installs coa_jax beside another package into one new environment, and tries both.
#
#   bash launch/neighbour.sh "REQUIREMENT ..." MODULE EXTRA[,EXTRA ...] [ARGUMENT OF PYTEST ...]
#   bash launch/neighbour.sh google-tunix==0.1.7 tunix hub,endpoint,distill,web,mcp,serve tests/data
#
# The script prints the versions that pip chose, imports MODULE and coa_jax, runs the debug variants of SFT
# and RL, and then the named tests.  It removes the environment at the end.  PYTHON=/path/of/python chooses
# the interpreter.
set -euo pipefail

# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
help_or_go_on "${1:-}"
[ $# -ge 4 ] || fail "give requirements of pip, the module to import, extras of setup.py, and tests; see --help"
read -ra requirements <<<"$1"
module="$2" extras="$3"
shift 3

folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.11}" -m venv "$folder/venv"
export PATH="$folder/venv/bin:$PATH"
pip install -q "${requirements[@]}" -e "${COA_ROOT}[testjax,$extras]"
pip check
pip list --format=freeze
python -c "import coa_jax, $module"
(
  cd "$folder"
  coa-jax debug-files
  coa-jax sft --config=configs/sft/factbook.py:debug --workdir=sft
  coa-jax rl --config=configs/rl/factbook.py:debug --workdir=rl
)
cd "$COA_ROOT"
python -m pytest -n 2 "$@"
