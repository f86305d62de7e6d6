#!/usr/bin/env bash
# Everything that only a GPU can say, each part in under 8 minutes (PYTHON=path/to/python to choose one):
#   bash bench/gpu_check.sh            rsi_kernels: correctness first, then the benchmark
#   bash bench/gpu_check.sh training   networks trained on every GPU of this machine as on the CPU; then preset smoke
# The table goes to bench/results/kernels-<card>.md, to be committed. Without a GPU: one line, exit code 3.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python}
export PYTHONPATH="$PWD:$PWD/kernels:$PWD/sandbox${PYTHONPATH:+:$PYTHONPATH}"
unset TRITON_INTERPRET

if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "gpu_check: this torch sees no CUDA or ROCm device, so nothing was run; tests/kernels checks what can be without"
    exit 3
fi
card=$("$python" -c 'import torch; print(torch.cuda.get_device_name().replace(" ", "-").lower())')

if [ "${1:-kernels}" = training ]; then
    echo "gpu_check: training on $card"
    timeout 240 "$python" -m pytest -q -p no:cacheprovider tests/rsi/test_distributed.py -k gpus
    timeout 240 "$python" -m rsi.train --preset smoke --runs "$(mktemp -d)"
    echo "gpu_check: done in ${SECONDS}s"
    exit
fi

mkdir -p bench/results
result="bench/results/kernels-$card.md"

echo "gpu_check: correctness on $card"
timeout 240 "$python" -m pytest -q -p no:cacheprovider tests/kernels \
    --ignore tests/kernels/test_ahead_of_time.py --ignore tests/kernels/test_package.py
echo "gpu_check: benchmark"
timeout 240 "$python" bench/kernels.py | tee "$result"
echo "gpu_check: done in ${SECONDS}s; the table is in $result"
