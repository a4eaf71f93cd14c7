#!/usr/bin/env bash
# Installs coa_jax beside another package into one new environment, and tries both.
#
#   bash launch/neighbour.sh REQUIREMENT MODULE EXTRA[,EXTRA ...] [TEST ...]
#   bash launch/neighbour.sh google-tunix==0.1.7 tunix hub,endpoint,distill,web,mcp,serve
#
# The script imports MODULE and coa_jax, runs the debug variants of SFT and RL, and then tests/records and
# the named tests.  It removes the environment at the end.  PYTHON=/path/of/python chooses the interpreter.
set -euo pipefail

# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
help_or_go_on "${1:-}"
[ $# -ge 3 ] || fail "give a requirement of pip, the module to import, and extras of setup.py; see --help"
requirement="$1" module="$2" extras="$3"
shift 3

folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.11}" -m venv "$folder/venv"
export PATH="$folder/venv/bin:$PATH"
pip install -q "$requirement" -e "$COA_ROOT[testjax,$extras]"
pip check
python -c "import coa_jax, $module"
(
  cd "$folder"
  coa-jax debug-files
  coa-jax sft --config=configs/sft/factbook.py:debug --workdir=sft
  coa-jax rl --config=configs/rl/factbook.py:debug --workdir=rl
)
cd "$COA_ROOT"
python -m pytest -n 2 tests/records "$@"
