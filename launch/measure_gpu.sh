#!/usr/bin/env bash
# Measures one GPU in five parts of at most nine minutes, the most important part first.
#
#   bash launch/measure_gpu.sh PART [--workdir DIR] [--debug] [--dry-run]
#
# PART 1: decoding of a 0.5B model, with and without CUDA graphs.  2: decoding of 1.5B, with the time
# of each kernel, and of 7B.  3: attention, and SFT of 1.5B with three sets of compiler flags.
# 4: rollouts with tools of 1.5B and 7B.  5: a step of RL of 1.5B, and `coa-jax doctor --device`.
# All weights are random; nothing is downloaded.  Default: runs/gpu.
# Each measurement has a time limit of its own, and adds one JSON line to DIR/results.jsonl; its
# figures are in DIR/NAME.json, its messages in DIR/NAME.err.  Later parts reuse the compiled programs
# in DIR/cache.  --debug has tiny sizes, to try the script on a CPU.
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

workdir="" debug=no dry_run=no
parse_flags workdir debug "$@"
part="$action"
parse_flags workdir debug ${words[@]+"${words[@]}"}
[[ "$part" =~ ^[1-5]$ ]] || fail "give a part from 1 to 5, e.g. bash launch/measure_gpu.sh 1"
[ -z "$action" ] || fail "unknown argument $action; --help lists the flags"
workdir="$(absolute "${workdir:-$COA_ROOT/runs/gpu}")"
cd "$COA_ROOT"
use_python
export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-$workdir/cache}"
export XLA_PYTHON_CLIENT_MEM_FRACTION="${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.92}"
graphs=--xla_gpu_enable_command_buffer
[ "$dry_run" = yes ] || mkdir -p "$workdir"

# measure SECONDS NAME XLA_FLAGS COMMAND...: one measurement; its failure does not end the part.
measure() {
  local limit="$1" name="$2" flags="--xla_gpu_enable_latency_hiding_scheduler=true${3:+ $3}"
  local rc=0 began="$SECONDS" rest=$((530 - SECONDS))
  shift 3
  set -- "$python" -u -m coa_jax "$@" --out="$workdir/$name.json"
  if [ "$dry_run" = yes ]; then
    do_it env XLA_FLAGS="$flags" timeout "$limit" "$@"
    return
  fi
  [ "$debug" = no ] || limit=3600 rest=3600 # because a CPU may be slow
  [ "$limit" -le "$rest" ] || limit="$rest"
  if [ "$limit" -gt 0 ]; then
    XLA_FLAGS="$flags" timeout -k 5 "$limit" "$@" >"$workdir/$name.out" 2>"$workdir/$name.err" || rc=$?
  else
    rc=124
  fi
  printf '{"part": %d, "what": "%s", "xla_flags": "%s", "exit_code": %d, "seconds": %d}\n' \
    "$part" "$name" "$flags" "$rc" $((SECONDS - began)) | tee -a "$workdir/results.jsonl"
}

# In debug, later flags replace earlier ones.
small() { [ "$debug" = no ] || tiny=("$@"); }
tiny=()

decode() { # decode SECONDS NAME XLA_FLAGS SIZE BATCHES [FLAG ...]
  local limit="$1" name="decode-$2" flags="$3" size="$4" batches="$5"
  shift 5
  small --random=tiny --prompt=16 --new=8 --chunk=4 --batch=2 --repeats=1
  measure "$limit" "$name" "$flags" bench-decode --random="qwen2.5-$size" --dtype=bfloat16 \
    --prompt=512 --new=128 --chunk=32 --batch="$batches" "$@" ${tiny[@]+"${tiny[@]}"}
}

workload() { # workload NAME [FLAG ...]: writes the rollouts to measure, which needs no GPU
  local name="$1"
  shift
  small --rollouts=4 --group_size=2 --turns=1 --prompt_tokens=16 --gen_tokens=4,8 --final_tokens=4,8 \
    --observation_tokens=4,8 --tool_seconds=0.01,0.02 --vocab_size=400
  set -- "$python" -m coa_jax bench-workload --preset=W1 --out="$workdir/$name.json" "$@"
  [ -e "$workdir/$name.json" ] || do_it env JAX_PLATFORMS=cpu "$@" ${tiny[@]+"${tiny[@]}"} >&2
}

case "$part" in
  1)
    [ "$dry_run" = yes ] || ! command -v nvidia-smi >/dev/null || nvidia-smi -q >"$workdir/gpu.txt" || true
    decode 110 graphs "" 0.5b 8,32
    decode 80 no-graphs "$graphs=" 0.5b 8,32
    decode 80 graphs-of-loops "$graphs=+WHILE,+CONDITIONAL --xla_gpu_graph_min_graph_size=1" 0.5b 8,32
    ;;
  2)
    decode 170 1.5b "" 1.5b 32 --profile
    decode 350 7b "" 7b 8,32,64
    ;;
  3)
    for length in 4096 32768; do
      small --length=256 --kv_heads=2 --groups=1 --head_dim=16
      measure 70 "attention-$length" "" bench-attention --rows=1 --length="$length" --segments=4 \
        --kv_heads=4 --groups=7 ${tiny[@]+"${tiny[@]}"}
    done
    for set in "plain;" "cublas;--xla_gpu_enable_triton_gemm=false" "no-graphs;$graphs="; do
      small --random=tiny --batch=2 --length=64 --steps=1
      measure 125 "sft-${set%%;*}" "${set#*;}" bench-sft --random=qwen2.5-1.5b --dtype=bfloat16 \
        --batch=4 --length=8192 --rows=1 --remat=attention ${tiny[@]+"${tiny[@]}"}
    done
    ;;
  4)
    workload w1
    workload w128 --rollouts=128 --group_size=8
    for size in 1.5b 7b; do
      for name in w1 w128; do
        slots=32
        [ "$name" = w1 ] || slots=128
        small --random=tiny --slots=4 --chunk=4
        measure 130 "rollout-$size-$name" "" bench-rollout --random="qwen2.5-$size" --dtype=bfloat16 \
          --chunk=16 --slots="$slots" --workload="$workdir/$name.json" --repeats=1 ${tiny[@]+"${tiny[@]}"}
      done
    done
    ;;
  5)
    workload w1
    small --random=tiny --slots=4 --chunk=4 --repeats=1
    measure 260 rl-1.5b "" bench-rl --random=qwen2.5-1.5b --dtype=bfloat16 --remat=attention \
      --workload="$workdir/w1.json" ${tiny[@]+"${tiny[@]}"}
    # The checks with interpreted kernels take long on a CPU.
    [ "$debug" = yes ] || measure 260 doctor "" doctor --device
    ;;
esac
