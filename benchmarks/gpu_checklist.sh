#!/usr/bin/env bash
# Everything that only a GPU can tell, in order of doubt. Writes tables to $1 (default: benchmarks).
# Runs from a bare source tree: bash benchmarks/gpu_checklist.sh results
set -u
cd "$(dirname "$0")/.."
out=${1:-benchmarks}
mkdir -p "$out"
export PYTHONPATH=src

python3 -m steplab env
python3 -m pytest -m gpu -q -p no:cacheprovider

# The transformer table: one worker per size; interrupted, the same line goes on.
python3 -m steplab bench step --size small medium large xl 2.7b --context 128 256 512 --batch 4 \
    --mode full --recipe precision=fp32 precision=tf32 precision=bf16 \
    precision=fp32,compile=blocks precision=tf32,compile=blocks precision=bf16,compile=blocks \
    --store "$out/store" --out "$out/gpt_gpu.md" "$out/gpt_gpu.csv"

python3 benchmarks/meter_overhead.py --out "$out/meter_overhead_gpu.md"
python3 -m steplab bench precision --store "$out/store" --out "$out/precision_gpu.md"
python3 -m steplab bench collectives --world 1 --mib 1 10 100 --device cuda \
    --store "$out/store" --out "$out/collectives_gpu.md"

# The mixture: the large preset's step, then training on generated series; `data%` is the last word.
python3 -m steplab bench step tsmoe --size flagship --batch 16 --mode full --store "$out/store" \
    --recipe precision=bf16,optimizer=fused precision=bf16,optimizer=fused,compile=blocks \
    precision=bf16,optimizer=fused,impl.experts=loop --out "$out/tsmoe_gpu.md"
python3 -m steplab train --size flagship --batch-size 16 --steps-per-epoch 60 --log-every 10 \
    --checkpoint-every 0 --validate-every 0 --log-perf-metrics --recipe optimizer=fused
