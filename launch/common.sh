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

# run_again CODE: whether a command that ended so is to be given again on the same machines.  3: a
# process of the run is gone (coa_jax.parallel.processes), or the run was told to stop and has saved.
# 137, 143: the process was killed.  134, 139: the process crashed in native code; JAX also ends a
# process with 134 if the other processes do not start within 5 minutes.  255: ssh has lost a host.
run_again() { [[ "$1" =~ ^($again|255)$ ]]; }
again="3|134|137|139|143"

# parse_flags VALUES SWITCHES ARG...: reads the flags at the head of the arguments into variables of
# their names.  VALUES names those with a value, as `--name x` or `--name=x`, SWITCHES those that
# are only there or not, which become "yes"; --check=compile becomes "compile".  The first word that is none becomes `action`, what
# comes after it the array `words`.  Where VALUES has `config.*`, flags of that form go into the
# array `settings` as they are.  Where it has `env`, --env NAME=VALUE and --secret-env NAME go into
# the arrays `variables` and `secrets`.
parse_flags() {
  # No flag has a name that begins like these, and so none is hidden by them.
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

# add_variable env NAME=VALUE, add_variable secret-env NAME: one for the processes of the run.
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

# plain VALUE FLAG: refuses a value that would not be one word: it becomes part of a command.
plain() { [[ "$1" =~ ^[A-Za-z0-9._/:@,-]+$ ]] || fail "$2 $1: only letters, digits, . _ / : @ , -"; }

# coa_command COMMAND ARG...: the shell command that runs `python -m coa_jax.COMMAND ARG...` in a
# checkout as one of several processes.
#
# Before COMMAND stand the variables of `presets` and of --env.
coa_command() {
  [ $# -gt 0 ] || fail "run what? e.g. run sft --config=configs/sft/web.py:7b --workdir=DIR"
  [[ "$1" =~ ^[a-z_]+$ ]] || fail "run $1: not a command; e.g. distill, sft, rl, evaluate"
  local command
  command="$(environment)/bin/python -u -m coa_jax.$1"
  shift
  [ $# -eq 0 ] || command+="$(printf ' %q' "$@")"
  printf 'COA_JAX_DISTRIBUTED=1 COA_JAX_STOP_CODE=3%s %s' "$(assignments)" "$command"
}

# environment: the folder of Python on the hosts: .venv, or that of --env COA_JAX_VENV=FOLDER.
environment() {
  local word
  for word in ${variables[@]+"${variables[@]}"}; do
    case "$word" in COA_JAX_VENV=?*) printf %q "${word#*=}"; return ;; esac
  done
  echo .venv
}

# check_command COMMAND ARG...: the same command with --check, as the variable `check` says.
check_command() {
  case "$1" in sft | rl | rft | dpo | evaluate) ;; *) fail "--check: there is none of $1" ;; esac
  printf '%s --check' "$(coa_command "$@")"
  [ "$check" != compile ] || printf '=compile'
}

# prepare: the variables, packages and keys of the run, which `words` starts; fills `command` and, if
# hosts are checked before the run, `checked`.
prepare() {
  presets "$preset"
  needed
  carried
  command="$(coa_command ${words[@]+"${words[@]}"})" checked=""
  [ "$check" = no ] || checked="$(check_command "${words[@]}")"
}

# assignments: what stands before a command for the variables of `presets` and of --env.
assignments() {
  [ ${#tuned[@]} -eq 0 ] || printf ' %q' "${tuned[@]}"
  [ ${#variables[@]} -eq 0 ] || printf ' %q' "${variables[@]}"
}
tuned=() variables=() secrets=() check=no

# presets KIND: fills `tuned` with variables for chips (tpu, v6e, cuda); none for nothing.  The TPU
# compiler takes all of these flags for every generation (tests/test_launch_presets.py); what they gain
# was not measured.  A kernel on v6e may use more of the vector memory than XLA gives it by default.
# Compiled programs are kept beside the work directory, so that a run that goes on compiles nothing.
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
  # A whole bucket has no place beside it.
  [[ -z "$workdir" || "${workdir%/}" =~ ^[a-z0-9]+://[^/]*$ ]] ||
    tuned+=("JAX_COMPILATION_CACHE_DIR=$(dirname "$workdir")/compiled")
}

# kind_of TYPE: the argument of `presets` for a type of TPU slice, e.g. v5p-128 or v6e-256.
kind_of() { case "$1" in v6e* | ct6e*) echo v6e ;; *) echo tpu ;; esac; }

# use_slice: fills `where` with the flags of gcloud that name a TPU slice, and `pod` with the command
# that runs tpu_pod.sh there, with the flags of this script that both scripts take.  `checks` are the
# flags of the variable `check`.
use_slice() {
  local word
  where=("--zone=$zone") pod=(bash "$COA_ROOT/launch/tpu_pod.sh" --name "$name" --zone "$zone") checks=()
  [ -z "$project" ] || where+=("--project=$project") pod+=(--project "$project")
  pod+=(--preset "${preset:=$(kind_of "$type")}")
  for word in ${variables[@]+"${variables[@]}"}; do pod+=(--env "$word"); done
  for word in ${secrets[@]+"${secrets[@]}"}; do pod+=(--secret-env "$word"); done
  case "$check" in yes) checks=(--check) ;; compile) checks=(--check=compile) ;; esac
}

# end_run CODE REMOVE: ends this script with the exit code CODE of the run.  With --delete, the function
# REMOVE deletes the machines; otherwise a line on stderr says that they still cost money.
end_run() {
  if [ "$delete" = yes ]; then
    "$2" || echo "error: $name was not deleted, and still costs money" >&2
  elif [ "$dry_run" = no ]; then
    echo "$name still exists, and costs money; to delete it: bash launch/${0##*/} --name $name" \
      "${where[@]} delete" >&2
  fi
  exit "$1"
}

# flag_of NAME: the value of a flag among `words`.
flag_of() {
  local at
  for ((at = 0; at < ${#words[@]}; at++)); do
    case "${words[at]}" in
      "--$1="*) printf %s "${words[at]#*=}"; return ;;
      "--$1") printf %s "${words[at + 1]:-}"; return ;;
    esac
  done
}

# needed: fills `extras` with those of setup.py that the command in `words` needs, by its config.  Keys
# that the config names are added to `secrets`.  COA_JAX_PYTHON names a Python with this package, by default that of .venv.
needed() {
  local python="${COA_JAX_PYTHON:-$COA_ROOT/.venv/bin/python}" told name word given=() follows=no
  local there=" ${secrets[*]-} "
  for word in ${variables[@]+"${variables[@]}"}; do there+="${word%%=*} "; done
  extras=gguf
  [ ${#words[@]} -gt 0 ] || return 0
  case "${words[0]}" in
    sft | rl | rft | dpo | evaluate | distill | synthesize) ;;
    serve) extras="gguf serve"; return ;;
    *) return 0 ;;
  esac
  for word in "${words[@]:1}"; do
    case "$follows$word" in
      # A word that begins with -- is no value: the flag before it is a switch.
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
    extras="endpoint gguf maths mcp tasks web"
    case "${words[*]}" in *gs://*) extras+=" gcs" ;; esac
    case "${words[*]}" in *s3://*) extras+=" s3" ;; esac
    return
  fi
  told="$(PYTHONPATH="$COA_ROOT" "$python" -m coa_jax.needs "${words[0]}" ${given[@]+"${given[@]}"})" ||
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

# use_python: sets `python` to that of .venv, or to the one in PATH if there is no .venv.
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
