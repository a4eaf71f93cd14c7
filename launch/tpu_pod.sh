#!/usr/bin/env bash
# Runs a command of coa_jax on every host of a Cloud TPU pod slice.
#
#   bash launch/tpu_pod.sh [FLAGS] setup [COMMAND ARG...]  copy this commit to all hosts, install it
#                                                      with the packages that the command needs
#   bash launch/tpu_pod.sh [FLAGS] check COMMAND ARG...    check on every host everything that the command
#                                                      needs
#   bash launch/tpu_pod.sh [FLAGS] run COMMAND ARG...  e.g. run sft --config=configs/sft/web.py:7b \
#                                                           --workdir=/mnt/runs/a
#   bash launch/tpu_pod.sh [FLAGS] logs                the end of each host's log
#   bash launch/tpu_pod.sh [FLAGS] stop                end the command on all hosts
#
# Flags:
#   --name NAME        the TPU VM (required)
#   --zone ZONE        its zone (required)
#   --project PROJECT  default: the one gcloud is configured for
#   --dir DIR          folder of the code on the hosts (default coa_jax, in the home directory)
#   --check            run: check before; --check=compile also compiles the programs of the run
#   --retries N        number of restarts of a run that lost a process (default 20)
#   --poll SECONDS     wait before a restart (default 10)
#   --preset KIND      variables for the compiler: tpu (default), v6e or none
#   --env NAME=VALUE   a variable of the run; may be repeated
#   --secret-env NAME  the same, with the value of NAME in this shell; keys that the config names need no
#                      flag
#   --detach           run: return at once; the command continues after this shell ends, but is not
#                      restarted
#   --dry-run          print the commands, run nothing
#
# The work directory must be one that all hosts share (a mounted file share or bucket): the first
# host writes metrics, all hosts write their shards of a checkpoint.  Run the same command again to
# continue after a preemption.  The script copies the last commit, without uncommitted changes.
set -euo pipefail

# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

name="" zone="" project="" dir=coa_jax check=no retries=20 poll=10 preset=tpu detach=no dry_run=no
parse_flags "name zone project dir retries poll preset env" "check detach" "$@"
[ -n "$action" ] || fail "what to do? setup, check, run, logs or stop (--help explains)"
[ -n "$name" ] || fail "--name is missing: the name of the TPU VM"
[ -n "$zone" ] || fail "--zone is missing: the zone of the TPU VM"
[[ "$dir" =~ ^[A-Za-z0-9._/-]+$ ]] || fail "--dir $dir: only letters, digits, . _ - /"
[[ "$retries$poll" =~ ^[0-9]+$ ]] || fail "--retries and --poll are whole numbers"
needs gcloud

where=("$name" "--zone=$zone" --worker=all)
[ -z "$project" ] || where+=("--project=$project")

on_all() { do_it gcloud compute tpus tpu-vm ssh "${where[@]}" --command "$1"; }

# The values of secrets are passed in a file, because all users of a machine can see the arguments of a
# command.  A command that needs the secrets begins with `read_secrets`.
send_secrets() {
  read_secrets=""
  [ ${#secrets[@]} -gt 0 ] || return 0
  carried
  local secret
  file=SECRETS
  if [ "$dry_run" = no ]; then
    file="$(mktemp)"
    trap 'rm -f "$file"' EXIT
    for secret in "${secrets[@]}"; do printf 'export %s=%q\n' "$secret" "${!secret}"; done >"$file"
  else
    echo "# SECRETS: ${secrets[*]}"
  fi
  on_all "install -m 600 /dev/null .coa_jax.env"
  do_it gcloud compute tpus tpu-vm scp "$file" "$name:.coa_jax.env" "${where[@]:1}"
  read_secrets='. "$HOME/.coa_jax.env" && '
}

check_all() { on_all "${read_secrets}cd $dir && env $(check_command "${words[@]}")"; }

# If an earlier run still uses the chips, run.pid keeps its pid, so that `stop` finds that run.
is_there="grep -qs coa_jax /proc/\$(cat run.pid 2>/dev/null)/cmdline"

run_once() {
  if [ "$detach" = yes ]; then
    on_all "${read_secrets}cd $dir && $begin(nohup env $command >run.log 2>&1 </dev/null & \
$is_there || echo \$! >run.pid)"
  else
    # `exec` gives the command the pid in run.pid, and gives gcloud the command's exit code.  With -p, tee
    # and the command continue after the connection is closed.
    on_all "${read_secrets}cd $dir && ${begin}bash -c '$is_there || echo \$\$ >run.pid; exec > >(tee -p run.log) 2>&1; \
exec env \"\$@\"' run $command"
  fi
}

case "$action" in
  setup)
    needed
    archive="${TMPDIR:-/tmp}/coa_jax-$(git -C "$COA_ROOT" rev-parse --short HEAD).tar.gz"
    [ "$dry_run" = yes ] || [ -z "$(git -C "$COA_ROOT" status --porcelain)" ] ||
      echo "note: $COA_ROOT has uncommitted changes, which are not copied" >&2
    do_it git -C "$COA_ROOT" archive --format=tar.gz -o "$archive" HEAD
    do_it gcloud compute tpus tpu-vm scp "$archive" "$name:coa_jax.tar.gz" "${where[@]:1}"
    # Many images of TPU VMs have only Python 3.10, or a Python that cannot create environments.  On these
    # images uv installs Python 3.12.
    unpack="mkdir -p $dir && tar -xzf coa_jax.tar.gz -C $dir && "
    venv="$(environment)"
    if [[ "$venv" = /* ]]; then # is taken as it is
      on_all "${unpack}COA_JAX_VENV=$venv bash $dir/launch/setup_env.sh tpu $extras"
      exit
    fi
    on_all "${unpack}\
python=\$(for p in python3.12 python3.13; do \
\$p -c 'import ensurepip' 2>/dev/null && command -v \$p && exit; done; \
PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install -q --user uv >&2 && \
~/.local/bin/uv python install -q 3.12 >&2 && ~/.local/bin/uv python find 3.12 || true) && \
COA_JAX_VENV=$venv PYTHON=\$python bash $dir/launch/setup_env.sh tpu $extras"
    ;;
  check)
    [ ${#words[@]} -gt 0 ] || fail "check what? e.g. check rl --config=configs/rl/web.py:7b --workdir=DIR"
    presets "$preset"
    needed
    check_command "${words[@]}" >/dev/null
    send_secrets
    check_all
    ;;
  run)
    presets "$preset"
    needed
    command="$(coa_command ${words[@]+"${words[@]}"})"
    [ "$check" = no ] || check_command "${words[@]}" >/dev/null
    send_secrets
    [ "$check" = no ] || check_all
    begin="rm -f run.stop && " # of an earlier run
    for ((attempt = 0; ; attempt++)); do
      status=0
      run_once || status=$?
      begin=""
      run_again "$status" || exit "$status"
      # The host must answer with a word: an unreachable host must not count as stopped by `stop`.
      [[ "$(on_all "[ ! -e $dir/run.stop ] || echo was-stopped")" != *was-stopped* ]] || exit 130 # as after Ctrl-C
      # The other processes may still wait for the lost process, and hold the chips.
      on_all "kill -9 \$(cat $dir/run.pid) 2>/dev/null || true" || true
      [ "$attempt" -lt "$retries" ] || exit "$status"
      echo "exit code $status: the run is started again ($((attempt + 1)) of $retries)" >&2
      sleep "$poll"
    done
    ;;
  logs) on_all "tail -n 20 $dir/run.log" ;;
  stop) on_all "touch $dir/run.stop; kill \$(cat $dir/run.pid)" ;;
  *) fail "unknown action $action; setup, check, run, logs or stop" ;;
esac
