#!/usr/bin/env bash
# Lint, types and tests, in an environment made for them.
#
#   bash launch/test.sh [--slow] [--lint | --tests] [PYTEST ARGUMENT ...]
#
# --slow runs the slow tests as well, --lint only lint and types, --tests only the tests.  Everything is
# run even if an earlier part fails; the exit code is 0 only if all parts pass.
set -euo pipefail

# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
arguments=() parts="lint tests"
for argument in "$@"; do
  help_or_go_on "$argument"
  case "$argument" in
    --slow)
      arguments+=(-m "slow or not slow")
      # With the programs of a user's run; the default tests have less optimized ones.
      export JAX_DISABLE_MOST_OPTIMIZATIONS="${JAX_DISABLE_MOST_OPTIMIZATIONS:-0}"
      ;;
    --lint | --tests) parts="${argument#--}" ;;
    *) arguments+=("$argument") ;;
  esac
done

source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh" test
cd "$COA_ROOT"

failed=()
if [[ "$parts" = *lint* ]]; then
  echo "== ruff"
  python -m ruff check . || failed+=(ruff)
  python -m ruff format --check . || failed+=("ruff format")
  echo "== mypy"
  python -m mypy || failed+=(mypy)
fi
if [[ "$parts" = *tests* ]]; then
  echo "== pytest"
  # Two processes, because each process holds a few GB of compiled programs.
  python -m pytest -n 2 --dist worksteal ${arguments[@]+"${arguments[@]}"} || failed+=(pytest)
fi

[ ${#failed[@]} -eq 0 ] || { echo "error: failed: ${failed[*]}" >&2; exit 1; }
