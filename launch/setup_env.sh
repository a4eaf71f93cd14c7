# shellcheck shell=bash
# Makes or completes the environment in .venv; sourced by the other scripts.
#
#   source launch/setup_env.sh [EXTRA ...]     extras of setup.py: demo gguf tasks web maths mcp serve
#                                               endpoint distill hub gcs s3 tfds textarena openenv notebook
#                                               wandb docs test testjax dev cuda tpu gpucompiler tokamax
#   bash launch/setup_env.sh [EXTRA ...]       the same, without changing the calling shell
#
# Afterwards COA_ROOT is the repository and the programs of .venv come first in PATH.  The working directory
# stays the same.
# PYTHON=/path/of/python chooses the interpreter of a new environment (3.11 or later).  If there is no
# such interpreter, uv (if it is installed) installs Python 3.12.
# The script installs the versions with which the tests run: those of coa_jax/config/constraints/jax-0.10.txt
# with Python 3.11 and 3.12, and of jax-0.12.txt with later versions of Python.  CONSTRAINTS=jax-0.12
# chooses one of these files, a path chooses a file of your own, and CONSTRAINTS=none the newest versions
# that setup.py allows.  Later runs keep to the choice.
# COA_JAX_VENV=.venv-other makes or completes an environment of that name beside .venv.  An absolute path
# names an environment of an image or a shared disk, into which the script installs nothing.
# The second run is instant: .venv/.coa_jax lists the installed extras and a hash of setup.py.  The script
# writes this file last, so the next run completes an interrupted installation.

COA_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
case "${COA_JAX_VENV:-}" in /*) COA_VENV="$COA_JAX_VENV" ;; *) COA_VENV="$COA_ROOT/${COA_JAX_VENV:-.venv}" ;; esac

coa_say() { printf '[setup] %s\n' "$*" >&2; }

# coa_quietly WHAT COMMAND...: runs a command, its output in a log, with a line every 15 s to
# show that it goes on; on failure shows the end of the log.
coa_quietly() {
  local what="$1" log status=0
  shift
  log="$(mktemp "${TMPDIR:-/tmp}/coa_jax-setup.XXXXXX")" || return 1
  coa_say "$what"
  # A reader of a pipe without a writer prints the lines.  The reader ends when this shell closes the
  # pipe or is killed, so a kill leaves no process behind.
  exec 8> >(
    exec 9<&- # the lock of the installation
    waited=0
    while read -r -t 15 _ || [ $? -gt 128 ]; do
      waited=$((waited + 15))
      coa_say "$what: still at it after ${waited} s"
    done
  )
  "$@" >"$log" 2>&1 </dev/null 8>&- 9<&- || status=$?
  exec 8>&-
  if [ "$status" -eq 0 ]; then
    rm -f "$log"
  else
    tail -n 15 "$log" >&2
    coa_say "error: $what failed (exit $status); the whole output is in $log"
  fi
  return "$status"
}

coa_is_root() { [ "$(id -u)" -eq 0 ]; }

coa_find_python() {
  local candidate
  for candidate in ${PYTHON:+"$PYTHON"} python3.11 python3.12 python3.13 python3 python; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
      printf '%s\n' "$candidate"
      return 0
    fi
  done
  for candidate in uv "${HOME:-}/.local/bin/uv"; do
    if command -v "$candidate" >/dev/null 2>&1; then
      coa_quietly "uv installs Python 3.12" "$candidate" python install 3.12 &&
        "$candidate" python find 3.12
      return
    fi
  done
  coa_say "error: no Python 3.11 or later in PATH; install python3.11 or set PYTHON=/path/of/python"
  return 1
}

# coa_apt PACKAGE: installs a Debian package, if this user can.
coa_apt() {
  coa_is_root && command -v apt-get >/dev/null 2>&1 || return 1
  coa_quietly "installing the Debian package $1" bash -c '
    export DEBIAN_FRONTEND=noninteractive
    install() { apt-get install -y -q --no-install-recommends "$1"; }
    install "$1" || { apt-get update -q && install "$1"; }' apt "$1"
}

# coa_make_venv: creates .venv, unless a working .venv exists.
coa_make_venv() {
  local python package
  if "$COA_VENV/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    if "$COA_VENV/bin/python" -m pip --version >/dev/null 2>&1 ||
      "$COA_VENV/bin/python" -m ensurepip -q >/dev/null 2>&1; then
      return 0
    fi
  fi
  python="$(coa_find_python)" || return 1
  if ! "$python" -c 'import venv, ensurepip' >/dev/null 2>&1; then
    package="$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')"
    if ! coa_apt "$package"; then
      coa_say "error: $python cannot make environments; as root: apt-get install $package"
      return 1
    fi
  fi
  coa_quietly "making ${COA_VENV##*/} with $python" "$python" -m venv --clear "$COA_VENV"
}

# coa_constraints: prints the absolute path of the file that CONSTRAINTS names, or "none".
coa_constraints() {
  local file
  if [ "$CONSTRAINTS" = none ]; then
    echo none
    return 0
  fi
  for file in "$COA_ROOT/coa_jax/config/constraints/$CONSTRAINTS.txt" "$CONSTRAINTS" "$PWD/$CONSTRAINTS"; do
    case "$file" in /*) ;; *) continue ;; esac
    if [ -f "$file" ]; then
      printf '%s\n' "$file"
      return 0
    fi
  done
  coa_say "error: CONSTRAINTS=$CONSTRAINTS: no such file, and none in coa_jax/config/constraints"
  return 1
}

# coa_tested: prints the path of the constraint file for the Python of .venv.
coa_tested() {
  "$COA_VENV/bin/python" -c '
import sys
print(sys.argv[1], "jax-0.10.txt" if sys.version_info < (3, 13) else "jax-0.12.txt", sep="/")' \
    "$COA_ROOT/coa_jax/config/constraints"
}

# coa_marked LINE: prints a line of .venv/.coa_jax: 1 hash, 2 extras, 3 constraint file or "none".
coa_marked() { sed -n "$1p" "$COA_VENV/.coa_jax" 2>/dev/null; }

# coa_installed FILE EXTRA...: succeeds if these extras are installed, for this setup.py and folder, under
# the constraints of FILE.  If FILE is empty, any constraints are accepted.
coa_installed() {
  local file="$1" extras extra
  shift
  [ -f "$COA_VENV/.coa_jax" ] || return 1
  [ "$(coa_marked 1)" = "$(coa_hash)" ] || return 1
  extras="$(coa_marked 2)"
  [ -z "$file" ] || [ "$(coa_marked 3)" = "$file" ] || return 1
  for extra in "$@"; do
    case " $extras " in *" $extra "*) ;; *) return 1 ;; esac
  done
  "$COA_VENV/bin/python" -c '' 2>/dev/null
}

coa_hash() {
  "$COA_VENV/bin/python" -c '
import hashlib, pathlib, sys
root = pathlib.Path(sys.argv[1])
files = [root / "setup.py", root / "pyproject.toml", *sorted(root.glob("coa_jax/config/constraints/*.txt"))]
parts = [str(root), sys.version, *(file.read_text() for file in files)]
print(hashlib.sha256("\0".join(parts).encode()).hexdigest())' "$COA_ROOT"
}

# coa_can_compile: succeeds if there are a C compiler, its headers and the headers of this Python.
coa_can_compile() {
  local compiler include
  compiler="${CC:-$("$COA_VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_config_var("CC") or "cc")')}"
  include="$("$COA_VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("include"))')"
  # shellcheck disable=SC2086  # the compiler may have flags
  ${compiler} -E "-I$include" -o /dev/null -x c - <<<'#include <Python.h>' >/dev/null 2>&1
}

# coa_compiler: installs what pip needs to compile pycosat, which reasoning-gym (extra `tasks`) requires.
coa_compiler() {
  local headers
  "$COA_VENV/bin/python" -c 'import pycosat' 2>/dev/null || coa_can_compile && return 0
  headers="$("$COA_VENV/bin/python" -c 'import sys; print("python%d.%d-dev" % sys.version_info[:2])')"
  coa_apt gcc && coa_apt "$headers" && coa_can_compile && return 0
  coa_say "error: reasoning-gym (extra tasks) needs a C compiler and Python's headers; as root: apt-get install gcc $headers"
  return 1
}

# coa_install FILE EXTRA...: installs the package with these extras and all extras installed before, under
# the constraints of FILE.  If FILE is empty, the constraints of the earlier installation apply, or those
# that are tested with this Python.
coa_install() {
  # Compiling all modules of all packages would take longer than everything else; Python compiles a
  # module when it is first imported.
  local pip=("$COA_VENV/bin/python" -m pip install -q --disable-pip-version-check --no-compile)
  local extras hash implied="" what="coa_jax" constraints="${1:-$(coa_marked 3)}"
  shift
  hash="$(coa_hash)" || return 1
  constraints="${constraints:-$(coa_tested)}"
  [ "$constraints" = none ] || pip+=(-c "$constraints")
  # The extras that setup.py includes in `test` and `dev`; a later request for them installs nothing.
  case " $* " in *" test "* | *" dev "*) implied="demo distill endpoint gguf hub maths mcp notebook openenv serve tasks test testjax tfds web" ;; esac
  # shellcheck disable=SC2046,SC2086  # both are lists of words
  extras="$(printf '%s\n' "$@" $implied $(coa_marked 2) |
    sort -u | grep . | paste -sd ' ' -)"
  # These extras contain `tasks`.
  case " $extras " in *" tasks "* | *" testjax "* | *" paper "*) coa_compiler || return 1 ;; esac
  rm -f "$COA_VENV/.coa_jax"
  # What an earlier installation says of the package would hide what this one says.
  rm -rf "$COA_ROOT/coa_jax.egg-info"
  case " $extras " in
    *" test "* | *" dev "*)
      # Install torch first and by version, so that pip prefers a local CPU build.
      coa_quietly "installing torch for the tests" "${pip[@]}" "torch==2.13.0" || return 1
      ;;
  esac
  [ -z "$extras" ] || what="coa_jax[${extras// /,}]"
  coa_quietly "installing $what into ${COA_VENV##*/}" \
    "${pip[@]}" -e "$COA_ROOT${what#coa_jax}" || return 1
  printf '%s\n' "$hash" "$extras" "$constraints" >"$COA_VENV/.coa_jax.new" &&
    mv "$COA_VENV/.coa_jax.new" "$COA_VENV/.coa_jax"
}

# coa_program NAMES PACKAGE MEANING: installs an optional Debian program, or says what its absence means.
coa_program() {
  local name
  for name in $1; do
    command -v "$name" >/dev/null 2>&1 && return 0
  done
  if [ "$coa_fresh" = yes ] && coa_apt "$2"; then return 0; fi
  coa_say "$2 is not installed (as root: apt-get install $2): $3"
}

# coa_known EXTRA...: succeeds if setup.py has all of these extras.
coa_known() {
  local known extra
  known="$(sed -n 's/^    "\([a-z0-9]*\)": .*/\1/p' "$COA_ROOT/setup.py" | paste -sd ' ' -) test testjax dev"
  for extra in "$@"; do
    case " $known " in
      *" $extra "*) ;;
      *) coa_say "error: no extra is named $extra; there are: $known"; return 1 ;;
    esac
  done
}

# coa_complete FILE EXTRA...: installs what is missing.  A subshell runs it, so that a failure or Ctrl-C
# also ends the lock.
coa_complete() {
  local coa_fresh=no extra file="$1"
  shift
  # Two scripts that start together must not install into .venv at the same time.
  if command -v flock >/dev/null 2>&1; then
    exec 9<"$COA_ROOT/launch" || return 1
    if ! flock -n 9; then
      coa_say "waiting for another installation into ${COA_VENV##*/}"
      flock 9
    fi
  fi
  if [[ "${COA_JAX_VENV:-}" = /* ]]; then
    if ! "$COA_VENV/bin/python" -c 'import sys, jax; sys.exit(sys.version_info < (3, 11))'; then
      coa_say "error: COA_JAX_VENV=$COA_VENV has no Python 3.11 or later with JAX"
      return 1
    fi
  elif ! coa_installed "$file" "$@"; then
    coa_fresh=yes
    coa_make_venv && coa_install "$file" "$@" || return 1
  fi
  coa_program bwrap bubblewrap "the code tool isolates programs with Landlock instead"
  for extra in "$@"; do
    if [ "$extra" = test ]; then
      coa_program "chromium chromium-browser google-chrome" chromium \
        "tests that open the report in a browser are skipped"
    fi
  done
}

coa_setup_env() {
  local file=""
  [ -z "${CONSTRAINTS:-}" ] || file="$(coa_constraints)" || return 1
  (cd "$COA_ROOT" && coa_complete "$file" "$@") || return 1
  export PATH="$COA_VENV/bin:$PATH"
  # A training step on a CPU allocates and frees gigabytes.  Touching 3 GiB for the first time takes
  # seconds in pages of 4 KiB and 0.3 s in pages of 2 MiB, so ask malloc for large pages.
  export GLIBC_TUNABLES="${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1}"
}

case "${1:-}" in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; return 0 2>/dev/null || exit 0 ;; esac
coa_known "$@" || { return 2 2>/dev/null || exit 2; }
coa_setup_env "$@" || { return 1 2>/dev/null || exit 1; }
