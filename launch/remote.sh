# Helpers of the scripts that start runs on other machines; sourced by them.
# shellcheck shell=bash disable=SC2034

COA_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

# The head of the script, without its hashes.
usage() { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; }
fail() { echo "error: $*" >&2; exit 2; }

# do_it COMMAND...: prints a command as it could be typed, and runs it unless dry_run is yes.
do_it() {
  if [ "${dry_run:-no}" = yes ]; then
    printf '%q ' "$@"
    echo
  else
    "$@"
  fi
}

# needs PROGRAM: refuses to go on without it, unless nothing will be run.
needs() { [ "${dry_run:-no}" = yes ] || command -v "$1" >/dev/null || fail "$1 is not installed"; }

# plain VALUE FLAG: refuses a value that would not be one word: it becomes part of a command.
plain() { [[ "$1" =~ ^[A-Za-z0-9._/:@-]+$ ]] || fail "$2 $1: only letters, digits, . _ / : @ -"; }

# coa_command COMMAND ARG...: the shell command that runs `python -m coa_jax.COMMAND ARG...` in a
# checkout as one of several processes.
coa_command() {
  [ $# -gt 0 ] || fail "run what? e.g. run sft --config=configs/sft/web.py:7b --workdir=DIR"
  [[ "$1" =~ ^[a-z_]+$ ]] || fail "run $1: not a command; e.g. distill, sft, rl, evaluate"
  local command=".venv/bin/python -u -m coa_jax.$1"
  shift
  [ $# -eq 0 ] || command+="$(printf ' %q' "$@")"
  printf 'COA_JAX_DISTRIBUTED=1 %s' "$command"
}
