#!/usr/bin/env bash
# Everything that needs a GPU, part by part: bash benchmarks/gpu_checklist.sh FOLDER PART...
# Parts: env tests modes flagship curve small ops loss graphs museum gpt xl precision ema megalodon
# playbook hydra texts forecast tune fp8. Tables go to FOLDER, Runs to FOLDER/store. Runs from a bare
# source tree; an interrupted table continues with the missing cells.
set -u
cd "$(dirname "$0")/.."
out=${1:-benchmarks}
shift || true
mkdir -p "$out"
export PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH}
lab="python3 -m steplab"
store="--store $out/store"
fused=precision=bf16,optimizer=fused

for part in "${@:-env}"; do
    echo "### $part"
    case $part in
    env) $lab env ;;
    tests) python3 -m pytest -m gpu -q -p no:cacheprovider ;;
    modes) # every compile mode trains with both static dispatches
        recipes=()
        for experts in grouped capacity; do
            for mode in default reduce-overhead max-autotune max-autotune-no-cudagraphs; do
                recipes+=("$fused,impl.experts=$experts,compile=whole,compile.mode=$mode")
            done
        done
        $lab bench step tsmoe --size tiny --batch 8 --mode full --steps 5 $store \
            --recipe "${recipes[@]}" --out "$out/modes_gpu.md" ;;
    flagship) python3 benchmarks/flagship.py --out "$out/flagship_gpu.md" "$out/flagship_gpu.json" ;;
    small) python3 benchmarks/flagship.py expert grouped ours ours, --size small --batch 4 \
        --out "$out/small_gpu.md" "$out/small_gpu.json" ;;
    curve) python3 benchmarks/loss_curve.py --out "$out/loss_curve_gpu.md" ;;
    ops) for op in attention experts; do bash benchmarks/op_targets.sh "$out" $op; done ;;
    loss) $lab bench loss --weight same fp32 --reduction mean none $store --out "$out/loss_gpu.md" ;;
    graphs) python3 benchmarks/cuda_graphs.py --out "$out/cuda_graphs_gpu.md" ;;
    museum) python3 benchmarks/fault_museum.py --where cuda --steps 20 --store "$out/museum" \
        --pack "$out/museum_gpu.zip" --pack-limit 2000 --out "$out/fault_museum_gpu.md" ;;
    gpt) # the transformer table: one worker per size
        $lab bench step --size small medium large xl 2.7b --context 128 256 512 --batch 4 \
            --mode full --recipe precision=fp32 precision=tf32 precision=bf16 \
            precision=fp32,compile=blocks precision=tf32,compile=blocks \
            precision=bf16,compile=blocks $store --out "$out/gpt_gpu.md" "$out/gpt_gpu.csv" ;;
    xl) # memory with and without gradients, products and softmax per phase
        $lab bench step --size xl --context 128 256 512 --batch 4 --steps 5 --warmup 3 $store \
            --mode infer forward forward+backward --recipe plain precision=bf16 --out "$out/xl_gpu.md"
        for recipe in plain precision=bf16,optimizer=fused impl.attention=math; do
            $lab profile --size xl --context 512 --recipe $recipe $store
        done ;;
    precision)
        $lab bench precision $store --out "$out/precision_gpu.md"
        python3 benchmarks/meter_overhead.py --out "$out/meter_overhead_gpu.md"
        $lab bench collectives --world 1 --mib 1 10 100 --device cuda $store \
            --out "$out/collectives_gpu.md" ;;
    ema) python3 benchmarks/ema_kernels.py | tee "$out/ema_kernels_gpu.txt" ;;
    megalodon) python3 benchmarks/megalodon_notes.py | tee "$out/megalodon_gpu.txt" ;;
    playbook)
        $lab profile megalodon --seq-lens 512 2048 --dtype bf16 --bf16-sweep --schedule 1 1 2 1 \
            --out "$out/playbook" $store
        $lab profile megalodon --seq-lens 512 --forward-only --out "$out/playbook" $store ;;
    texts) # train on Python's own sources and go on from the checkpoint
        for model in hydra megalodon; do
            $lab train $model --size tiny --recipe precision=bf16 --checkpoint-dir "$out/$model"
            $lab generate --prompt "def " --length 200 --checkpoint "$out/$model"
        done ;;
    hydra) KINETO_LOG_LEVEL=6 python3 benchmarks/hydra_notes.py --out "$out/hydra_gpu" ;;
    forecast) python3 benchmarks/forecast_throughput.py --device cuda --recipe plain \
        precision=bf16 --out "$out/forecast_throughput_gpu.md" ;;
    tune) python3 benchmarks/tune_ladders.py "$out/ladders" 8 ;;
    fp8) python3 benchmarks/fp8_questions.py "$out/fp8" ;; # goes on where the last call ended
    *) echo "There is no part $part." >&2 && exit 2 ;;
    esac
done
