#!/usr/bin/env bash
# The ops at the flagship's shapes on a GPU: bash benchmarks/op_targets.sh FOLDER [attention|experts]
# attention takes about two minutes, most of it compilation; so does experts.
set -u
cd "$(dirname "$0")/.."
out=${1:-benchmarks}
mkdir -p "$out"
export PYTHONPATH=src
store="$out/store"

if [ "${2:-attention}" = attention ]; then
    python3 -m steplab bench attention --batch 16 --heads 12 --context 4096 --head-width 64 128 \
        --dtype bf16 --impl triton_flash cudnn flash flex compiled-reference --seconds 0.5 \
        --store "$store" --out "$out/attention_gpu.md" "$out/attention_gpu.csv" \
        --plot "$out/attention_gpu.svg"
    python3 -m steplab bench attention --batch 1 --heads 16 --context 16384 --head-width 64 \
        --dtype bf16 --impl triton_flash cudnn compiled-reference --objective backward \
        --seconds 0.5 --store "$store" --out "$out/attention_16k_gpu.md" "$out/attention_16k_gpu.csv"
else
    python3 -m steplab bench experts --impl fused grouped capacity loop compiled-grouped \
        --seconds 0.5 --store "$store" --out "$out/experts_gpu.md" "$out/experts_gpu.csv"
fi
