#!/usr/bin/env bash
# Studies of single questions, part by part: bash benchmarks/studies.sh FOLDER NAME PART...
# Parts: modules compile attention hydra sums. Tables go to FOLDER/<study>_NAME.*, Runs to
# FOLDER/store. On an H200 each part takes one to three minutes; without a GPU the sizes are tiny,
# to try the commands. Runs from a bare source tree.
set -eu -o pipefail
cd "$(dirname "$0")/.."
out=${1:?folder}
name=${2:?name of the machine, as in h200}
shift 2
mkdir -p "$out"
export PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH}
lab="python3 -m steplab"
store="--store $out/store"
if python3 -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; then
    gpt="--size xl --context 512 --batch 4"
    small="--size small --context 512 --batch 8"
    short="--size large --context 128 --batch 1"
    lengths="128 256 512 1024 2048 4096 8192 16384 32768 65536"
    heads="--batch 1 --heads 4 --head-width 64 --impl triton_flash cudnn efficient math"
    hydra="500m 1b"
    half=precision=bf16,optimizer=fused
    sums="$half,cuda_graph=step $half,cuda_graph=step,precision.sums=fp32"
    modes="default reduce-overhead max-autotune-no-cudagraphs"
    rounds=8
else
    tiny="--size tiny --layers 2 --width 16 --heads 2 --ff-width 16 --vocab-size 32 --context 16"
    gpt=$tiny small=$tiny short=$tiny
    lengths="64 128"
    heads="--batch 1 --heads 2 --head-width 16 --impl flash math"
    hydra="tiny"
    half=precision=bf16
    sums="$half plain"
    modes="reduce-overhead"
    rounds=2
fi

for part in "$@"; do
    echo "### $part"
    case $part in
    modules) # time per module, and the copies by line
        $lab profile gpt $gpt --recipe $half --by phase module copies $store |
            tee "$out/modules_$name.txt" ;;
    compile) # cold and warm start and step of every mode; autotuning takes a minute or two
        $lab bench compile gpt $small --recipe $half --steps 20 --timeout 150 --modes $modes \
            $store --out "$out/compile_modes_$name.md" ;;
    attention) # times, kept memory and exponents over the length, in fp32 and bf16
        $lab bench attention $heads --context $lengths --dtype fp32 bf16 --seconds 0.1 --warmup 1 \
            --repeats 10 $store --out "$out/attention_lengths_$name.md" ;;
    hydra) # phases, modules, copies by line and memory
        for size in $hydra; do
            $lab profile hydra --size $size --batch 4 --recipe $half --by phase module copies \
                --schedule 1 1 2 1 $store | tee "$out/hydra_${size}_$name.txt"
        done
        $lab bench step hydra --size $hydra --batch 4 --mode full --recipe $half --steps 10 \
            --warmup 3 $store --out "$out/hydra_phases_$name.md" ;;
    sums) # partial sums of bf16 products in bf16 and in fp32, in turns
        $lab bench step gpt $short --mode full --recipe $sums --alternate $rounds $store \
            --out "$out/bf16_sums_$name.md" ;;
    *)
        echo "studies.sh: there is no part $part" >&2
        exit 2
        ;;
    esac
done
