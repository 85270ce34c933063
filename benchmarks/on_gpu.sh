#!/usr/bin/env bash
# Measure on a GPU all that the documentation says of one, in eight minutes at most:
#
#     benchmarks/on_gpu.sh [KIND [FOLDER]]        # cuda, benchmarks/results/gpu
#
# Needs torch for that kind of device, and fnddp's dependencies, which it takes from a folder .whl of wheels where the
# machine has no network. Each part has a limit of its own; one that fails or is late does not keep the others from
# running. FOLDER gets the output of each, and summary.md: card, versions, commit, and how each part ended.
# On another KIND than cuda the models are small: tests/accelerator/test_gpu.py tries the script that way.
set -u
cd "$(dirname "$0")/.."
kind=${1:-cuda} out=${2:-benchmarks/results/gpu}
deadline=$((SECONDS + 480)) failed=0
mkdir -p "$out"
if ls .whl/*.whl > /dev/null 2>&1; then
    python3 -m pip install -q --no-index --no-deps --no-compile --upgrade --target /tmp/fnddp-site .whl/*.whl
    export PYTHONPATH="/tmp/fnddp-site:${PYTHONPATH:-}"
fi
export PYTHONPATH="$PWD:${PYTHONPATH:-}" PYTHONUNBUFFERED=1

part() { # NAME SECONDS COMMAND...
    local name=$1 limit=$2 left=$((deadline - SECONDS)) begun=$SECONDS code
    shift 2
    ((left < limit)) && limit=$left
    if ((limit < 5)); then
        echo "| $name | no time was left | | \`$*\` |" >> "$out/summary.md"
        failed=1
        return
    fi
    echo "== $name: $*"
    timeout -k 5 "$limit" "$@" 2>&1 | tee "$out/$name.txt"
    code=${PIPESTATUS[0]}
    ((code)) && failed=1
    case $code in 0) code=passed ;; 124 | 137) code="stopped at its limit" ;; *) code="failed ($code)" ;; esac
    echo "| $name | $code | $((SECONDS - begun)) | \`$*\` |" >> "$out/summary.md"
}

python3 - "$kind" > "$out/summary.md" << 'PYTHON' || exit 1
import subprocess, sys
import torch

kind = sys.argv[1]
device = getattr(torch, kind)
name = device.get_device_name(0) if hasattr(device, "get_device_name") else kind
git = subprocess.run(["git", "log", "-1", "--format=%h of %cs"], capture_output=True, text=True).stdout.strip()
print(f"{name}; torch {torch.__version__}; commit {git or 'unknown'}\n\n| part | ended | seconds | command |\n|---|---|--:|---|")
PYTHON

bench=(python3 -m fnddp bench --device "$kind")
whole="error_feedback(powersgd(bf16(allreduce), rank=4))"
if [ "$kind" = cuda ]; then
    part codecs 60 "${bench[@]}" --codecs
    part gpt2 170 "${bench[@]}" allreduce "bf16(two_shot)" "quantize(two_shot)" "quantize(two_shot, bits=4)" "$whole" \
        --ranks 1 --model gpt2 --against ddp,bf16_hook,powersgd_hook,none --pairs 12 --out "$out/gpt2"
    part launches 100 python3 benchmarks/measure_kernels.py --device cuda
    part captured 60 python3 benchmarks/captured_steps.py
    part captured_by_two 60 python3 -m torch.distributed.run --nproc-per-node 2 benchmarks/captured_steps.py
    part shared 60 "${bench[@]}" allreduce "quantize(two_shot)" "$whole" --ranks 2 --against ddp --pairs 8 \
        --out /tmp/fnddp-shared
else
    part codecs 60 "${bench[@]}" --codecs allgather "quantize(allgather)"
    part digits 60 "${bench[@]}" allreduce "quantize(two_shot)" --ranks 1 --model digits --against ddp --pairs 2 \
        --out "$out/digits"
    part captured 60 python3 benchmarks/captured_steps.py --device "$kind" --leaves 4
fi
[ "$kind" = sim ] || part tests 300 python3 -m pytest -q -p no:cacheprovider tests/gpu
cat "$out/summary.md"
exit $failed
