#!/usr/bin/env bash
# All that a GPU must show, in under four minutes: the error budget, the checks of device_checks.py, the tests that are
# marked `gpu`, and the benchmark of five shapes. For a bare machine with torch, Triton and transformers: nothing is
# installed, nothing is downloaded.
#
#   OUT=results bench/gpu_session.sh
#
# OUT                 the folder for logs and JSON, made where it is missing
# GPU_SESSION_DEVICE  torch device (default cuda); with cpu all of it runs at tiny sizes, to try the script itself
# PYTHON              the interpreter (default python3)
set -uo pipefail
: "${OUT:?OUT must name the folder for the results}"
device="${GPU_SESSION_DEVICE:-cuda}"
python="${PYTHON:-python3}"
# both as seen from where the script was called; a link stays one, by which Python knows its environment
if [[ "$python" == */* && "$python" != /* ]]; then python="$PWD/$python"; fi
{ mkdir -p "$OUT" && OUT="$(CDPATH='' cd -- "$OUT" && pwd)"; } || exit 1
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
export PYTHONPATH="$PWD:$PWD/tests${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
unset TRITON_INTERPRET
seconds=235  # for everything: a step that would run past it is stopped
small=() tiny=()
if [[ "$device" == cpu ]]; then small=(--small) tiny=(--tiny); fi
: >"$OUT/summary.txt"
status=0

# step NAME SECONDS COMMAND...: its output in NAME.log, a line in the summary; what runs longer is stopped, and fails
step() {
  local name="$1" limit="$2" started="$SECONDS" left=$((seconds - SECONDS)) code
  shift 2
  ((left > 0)) || left=1
  ((limit < left)) || limit="$left"
  echo "== $name"
  timeout "$limit" "$@" 2>&1 | tee "$OUT/$name.log"
  code="${PIPESTATUS[0]}"
  echo "$name: exit code $code, $((SECONDS - started)) s" | tee -a "$OUT/summary.txt"
  ((code == 0)) || status=1
}

step check 60 "$python" -m grpo_kernels.cli check --device "$device"
step cases 75 "$python" bench/device_checks.py --device "$device" "${small[@]}" --output "$OUT/cases.json"
if missing="$("$python" -c 'import pytest, hypothesis, numpy' 2>&1)"; then
  # the checks above are tests too; a file of settings could ask for a newer pytest than this machine has
  mapfile -t files < <(grep -l 'mark\.gpu' tests/test_*.py | grep -v test_bench_device)
  step tests 40 "$python" -m pytest -c /dev/null --rootdir "$PWD" -p no:cacheprovider -q -rfEs -m gpu "${files[@]}"
else
  echo "tests: not run, ${missing##*$'\n'}" | tee -a "$OUT/summary.txt"
fi
step bench 235 "$python" -m grpo_kernels.cli bench session --device "$device" "${tiny[@]}" --output "$OUT"
cat "$OUT/summary.txt"
exit "$status"
