# Helpers of the scripts that start runs, here or on other machines; sourced by them.
# shellcheck shell=bash disable=SC2034

COA_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

# The head of the script, without its hashes.
usage() { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; }
# help_or_go_on ARG...: prints the head of the script and ends if the first argument asks for help.
help_or_go_on() { case "${1:-}" in -h | --help) usage; exit 0 ;; esac; }
# A path from the root of the file system.
absolute() { case "$1" in /* | *://*) echo "$1" ;; *) echo "$PWD/$1" ;; esac; }
# The absolute path of a file or folder (also as FILE:VARIANT) that exists here; other names unchanged.
if_here() { if [ -e "${1%%:*}" ]; then absolute "$1"; else echo "$1"; fi; }
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

# run_again CODE: succeeds if a command that ended with CODE must run again on the same machines.  3: a
# process of the run is lost (coa_jax.parallel.processes), or the run received SIGTERM and has saved.
# 137, 143: the process was killed.  134, 139: the process crashed in native code; JAX also ends a
# process with 134 if the other processes do not start within 5 minutes.  255: ssh lost a host.
run_again() { [[ "$1" =~ ^($again|255)$ ]]; }
again="3|134|137|139|143"

# parse_flags VALUES SWITCHES ARG...: reads the flags at the head of the arguments into variables of
# the same names.  VALUES lists the flags with a value (`--name x` or `--name=x`).  SWITCHES lists the
# flags without a value, whose variables become "yes"; --check=compile becomes "compile".  The first
# word that is no flag becomes `action`, and the words after it become the array `words`.  If VALUES
# contains `config.*`, flags of this form are appended unchanged to the array `settings`.  If VALUES
# contains `env`, --env NAME=VALUE and --secret-env NAME go into the arrays `variables` and `secrets`.
parse_flags() {
  # Names of flags do not begin with two underscores, so these variables hide no flag.
  local __values=" $1 " __switches=" $2 dry-run " __name __value
  shift 2
  action="" words=() settings=() variables=() secrets=()
  while [ $# -gt 0 ]; do
    __name="${1%%=*}" __name="${__name#--}"
    case "$1" in
      -h | --help) usage; exit 0 ;;
      --*)
        if [[ "$__switches" == *" $__name "* && "$1" =~ ^(--check=compile|[^=]*)$ ]]; then
          printf -v "${__name//-/_}" %s "$([[ "$1" == *=* ]] && echo compile || echo yes)"
        elif [[ "$__name" == config.* && "$__values" == *" config.* "* ]]; then
          settings+=("$1")
        elif [[ "$__values" == *" ${__name/#secret-env/env} "* ]]; then
          __value="${1#*=}"
          if [[ "$1" != *=* ]]; then
            [ $# -ge 2 ] || fail "$1 needs a value"
            __value="$2"
            shift
          fi
          case "$__name" in
            env | secret-env) add_variable "$__name" "$__value" ;;
            *) plain "$__value" "--$__name"; printf -v "$__name" %s "$__value" ;;
          esac
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

# add_variable env NAME=VALUE, add_variable secret-env NAME: adds a variable of the run's processes.
add_variable() {
  local name="${2%%=*}"
  [[ "$name" =~ ^[A-Za-z_][A-Za-z0-9_]*$ ]] || fail "--$1 $name: no name of a variable"
  if [ "$1" = env ]; then
    [[ "$2" == *=* ]] || fail "--env $2: give NAME=VALUE; --secret-env $2 takes it from here"
    variables+=("$2")
  else
    [ "$2" = "$name" ] || fail "--secret-env $name: give the name only; the value is taken from here"
    secrets+=("$name")
  fi
}

# plain VALUE FLAG: refuses a value that is not a single word, because it becomes part of a command.
plain() { [[ "$1" =~ ^[A-Za-z0-9._/:@,-]+$ ]] || fail "$2 $1: only letters, digits, . _ / : @ , -"; }

# coa_command COMMAND ARG...: the shell command that runs `coa-jax COMMAND ARG...` in a
# checkout as one of several processes.
#
# The variables of `presets` and of --env stand before COMMAND.
coa_command() {
  [ $# -gt 0 ] || fail "run what? e.g. run sft --config=configs/sft/web.py:7b --workdir=DIR"
  [[ "$1" =~ ^[a-z-]+$ ]] || fail "run $1: not a command; e.g. distill, sft, rl, evaluate"
  local command
  command="$(environment)/bin/python -u -m coa_jax $1"
  shift
  [ $# -eq 0 ] || command+="$(printf ' %q' "$@")"
  printf 'COA_JAX_DISTRIBUTED=1 COA_JAX_STOP_CODE=3%s %s' "$(assignments)" "$command"
}

# environment: prints the folder of Python on the hosts: .venv, or FOLDER of --env COA_JAX_VENV=FOLDER.
environment() {
  local word
  for word in ${variables[@]+"${variables[@]}"}; do
    case "$word" in COA_JAX_VENV=?*) printf %q "${word#*=}"; return ;; esac
  done
  echo .venv
}

# check_command COMMAND ARG...: prints the same command with the value of --check that `check` has.
check_command() {
  case "$1" in sft | rl | rft | dpo | evaluate) ;; *) fail "--check: there is none of $1" ;; esac
  printf '%s --check' "$(coa_command "$@")"
  [ "$check" != compile ] || printf '=compile'
}

# prepare: determines the variables, packages and keys of the run that `words` starts.  Sets `command`
# and, if hosts are checked before the run, `checked`.
prepare() {
  presets "$preset"
  needed
  carried
  command="$(coa_command ${words[@]+"${words[@]}"})" checked=""
  [ "$check" = no ] || checked="$(check_command "${words[@]}")"
}

# assignments: prints the assignments of the variables of `presets` and of --env, for a command.
assignments() {
  [ ${#tuned[@]} -eq 0 ] || printf ' %q' "${tuned[@]}"
  [ ${#variables[@]} -eq 0 ] || printf ' %q' "${variables[@]}"
}
tuned=() variables=() secrets=() check=no delete=no zone=""

# presets KIND: sets `tuned` to the variables for a kind of chip (tpu, v6e, cuda, or none).  The TPU
# compiler accepts all of these flags for every generation (tests/test_launch_presets.py).  Their effect
# on speed was not measured.  A kernel on v6e may use more vector memory than XLA's default.  Compiled
# programs are stored beside the work directory, so that a resumed run compiles nothing.
presets() {
  local workdir cuda=--xla_gpu_enable_latency_hiding_scheduler=true
  local tpu="--xla_tpu_enable_async_collective_fusion=true"
  tpu+=" --xla_tpu_enable_async_collective_fusion_fuse_all_gather=true"
  tpu+=" --xla_tpu_enable_async_collective_fusion_multiple_steps=true"
  tpu+=" --xla_tpu_overlap_compute_collective_tc=true --xla_enable_async_all_gather=true"
  tuned=()
  case "$1" in
    tpu) tuned+=("LIBTPU_INIT_ARGS=$tpu") ;;
    v6e) tuned+=("LIBTPU_INIT_ARGS=$tpu --xla_tpu_scoped_vmem_limit_kib=98304") ;;
    cuda) tuned+=("XLA_FLAGS=$cuda" XLA_PYTHON_CLIENT_MEM_FRACTION=0.92) ;;
    none) return ;;
    *) fail "--preset $1: one of tpu, v6e, cuda, none" ;;
  esac
  workdir="$(flag_of workdir)"
  # There is no folder beside a whole bucket.
  [[ -z "$workdir" || "${workdir%/}" =~ ^[a-z0-9]+://[^/]*$ ]] ||
    tuned+=("JAX_COMPILATION_CACHE_DIR=$(dirname "$workdir")/compiled")
}

# kind_of TYPE: prints the argument of `presets` for a type of TPU slice, e.g. v5p-128 or v6e-256.
kind_of() { case "$1" in v6e* | ct6e*) echo v6e ;; *) echo tpu ;; esac; }

# use_slice: sets `where` to the flags of gcloud that name a TPU slice, and `pod` to the command that runs
# tpu_pod.sh on this slice, with the flags that both scripts have.  `checks` gets the flag for `check`.
use_slice() {
  local word
  where=("--zone=$zone") pod=(bash "$COA_ROOT/launch/tpu_pod.sh" --name "$name" --zone "$zone") checks=()
  [ -z "$project" ] || where+=("--project=$project") pod+=(--project "$project")
  pod+=(--preset "${preset:=$(kind_of "$type")}")
  for word in ${variables[@]+"${variables[@]}"}; do pod+=(--env "$word"); done
  for word in ${secrets[@]+"${secrets[@]}"}; do pod+=(--secret-env "$word"); done
  case "$check" in yes) checks=(--check) ;; compile) checks=(--check=compile) ;; esac
}

# on_slice ARGUMENTS...: runs tpu_pod.sh on the slice of `use_slice`.  A dry run prints this command and,
# as comments, the commands of tpu_pod.sh.
on_slice() {
  do_it "${pod[@]}" "$@" || return # with its exit code
  [ "$dry_run" = no ] || "${pod[@]}" --dry-run "$@" | sed -E 's/^(# )?/  # /'
}

# end_run CODE REMOVE: ends this script with the exit code CODE of the run.  With --delete, the function
# REMOVE deletes the machines; otherwise a line on stderr says that they still cost money.
end_run() {
  if [ "$delete" = yes ]; then
    "$2" || echo "error: $name was not deleted, and still costs money" >&2
  elif [ "$dry_run" = no ]; then
    echo "$name still exists, and costs money; to delete it: bash launch/${0##*/} --name $name" \
      "${where[*]} delete" >&2
  fi
  exit "$1"
}

# flag_of NAME: prints the value of a flag in `words`.
flag_of() {
  local at
  for ((at = 0; at < ${#words[@]}; at++)); do
    case "${words[at]}" in
      "--$1="*) printf %s "${words[at]#*=}"; return ;;
      "--$1") printf %s "${words[at + 1]:-}"; return ;;
    esac
  done
}

# needed: sets `extras` to the extras of setup.py that the command in `words` needs, according to its
# config.  Keys that the config names are added to `secrets`.  COA_JAX_PYTHON names a Python with this
# package; the default is the Python of .venv.
needed() {
  local python="${COA_JAX_PYTHON:-$COA_ROOT/.venv/bin/python}" told name word given=() follows=no
  local there=" ${secrets[*]-} "
  for word in ${variables[@]+"${variables[@]}"}; do there+="${word%%=*} "; done
  extras=gguf
  [ ${#words[@]} -gt 0 ] || return 0
  case "${words[0]}" in
    sft | rl | rft | dpo | evaluate | distill | synthesize) ;;
    serve) extras="demo gguf serve"; return ;;
    *) return 0 ;;
  esac
  for word in "${words[@]:1}"; do
    case "$follows$word" in
      # A word that begins with -- is not a value, so the flag before it is a switch.
      no--config* | no--noconfig.* | no--workdir* | no--wandb_project*) given+=("$word") ;;
      yes--config* | yes--noconfig.* | yes--workdir* | yes--wandb_project*)
        given+=("$word"); follows=no ;;
      yes--*) follows=no ;;
      yes*) given+=("$word"); follows=no; continue ;;
    esac
    case "$word" in
      *=*) ;;
      --config* | --workdir | --wandb_project) follows=yes ;;
    esac
  done
  if [ ! -x "$python" ]; then
    echo "note: $python is not there to read the config: the packages of all tools are installed" >&2
    extras="demo endpoint gguf maths mcp tasks web"
    case "${words[*]}" in *gs://*) extras+=" gcs" ;; esac
    case "${words[*]}" in *s3://*) extras+=" s3" ;; esac
    return
  fi
  told="$(PYTHONPATH="$COA_ROOT" "$python" -m coa_jax needs "${words[0]}" ${given[@]+"${given[@]}"})" ||
    exit
  extras="$(sed -n 's/^extras: *//p' <<<"$told")"
  for name in $(sed -n 's/^variables: *//p' <<<"$told"); do
    [[ "$there" == *" $name "* ]] || secrets+=("$name")
  done
}

# carried: fails unless all secrets are in this environment.
carried() {
  local name
  for name in ${secrets[@]+"${secrets[@]}"}; do
    [ "${dry_run:-no}" = yes ] || [ -n "${!name:-}" ] || fail "the run needs $name: set it here"
  done
}

# use_python: sets `python` to the Python of .venv, or without .venv to the Python in PATH.
use_python() {
  python=python
  [ ! -x "$COA_ROOT/.venv/bin/python" ] || python="$COA_ROOT/.venv/bin/python"
}

# keep_buffers: training on a CPU allocates and frees the same large buffers in every step.  Keeping
# them mapped, instead of returning them to the kernel, makes a step about a quarter shorter.
keep_buffers() {
  export MALLOC_ARENA_MAX=1 MALLOC_MMAP_MAX_=0
  export MALLOC_TRIM_THRESHOLD_=100000000000 MALLOC_TOP_PAD_=268435456
}
