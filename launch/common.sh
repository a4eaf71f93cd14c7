# Helpers of the scripts that start runs, here or on other machines; sourced by them.
# shellcheck shell=bash disable=SC2034

COA_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

# The head of the script, without its hashes.
usage() { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; }
# A path from the root of the file system.
absolute() { case "$1" in /*) echo "$1" ;; *) echo "$PWD/$1" ;; esac; }
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

# parse_flags VALUES SWITCHES ARG...: reads the flags at the head of the arguments into variables of
# their names.  VALUES names those with a value, as `--name x` or `--name=x`, SWITCHES those that
# are only there or not, which become "yes".  The first word that is none becomes `action`, what
# comes after it the array `words`.  Where VALUES has `config.*`, flags of that form go into the
# array `settings` as they are.
parse_flags() {
  # No flag has a name that begins like these, and so none is hidden by them.
  local __values=" $1 " __switches=" $2 dry-run " __name __value
  shift 2
  action="" words=() settings=()
  while [ $# -gt 0 ]; do
    __name="${1%%=*}" __name="${__name#--}"
    case "$1" in
      -h | --help) usage; exit 0 ;;
      --*)
        if [[ "$__switches" == *" $__name "* && "$1" != *=* ]]; then
          printf -v "${__name//-/_}" yes
        elif [[ "$__name" == config.* && "$__values" == *" config.* "* ]]; then
          settings+=("$1")
        elif [[ "$__values" == *" $__name "* ]]; then
          __value="${1#*=}"
          if [[ "$1" != *=* ]]; then
            [ $# -ge 2 ] || fail "$1 needs a value"
            __value="$2"
            shift
          fi
          plain "$__value" "--$__name"
          printf -v "$__name" %s "$__value"
        else
          fail "unknown flag $1; --help lists the flags"
        fi
        ;;
      -*) fail "unknown flag $1; --help lists the flags" ;;
      *) action="$1"; shift; words=("$@"); return ;;
    esac
    shift
  done
}

# plain VALUE FLAG: refuses a value that would not be one word: it becomes part of a command.
plain() { [[ "$1" =~ ^[A-Za-z0-9._/:@,-]+$ ]] || fail "$2 $1: only letters, digits, . _ / : @ , -"; }

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
