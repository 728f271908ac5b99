#!/bin/sh
# Climbs the ladders of the benchmarks on one GPU, at most 8 minutes each; a ladder that fails does
# not stop the others. Usage: benchmarks/tune_ladders.sh OUT [minutes]
out=${1:?where to put the reports} minutes=${2:-8}
climb() {
    name=$1
    shift
    python3 -m steplab tune "$@" --budget "$minutes" --store "$out/store" --out "$out/$name" \
        >"$out/$name.txt" 2>"$out/$name.log" || echo "$name: exit $?"
    tail -n 6 "$out/$name.txt"
}
mkdir -p "$out"
climb tsmoe_flagship tsmoe --size flagship --batch 16
climb tsmoe_small tsmoe --size small --batch 4
climb gpt_small gpt --size small --batch 4
climb gpt_xl gpt --size xl --batch 4
climb own_model examples/own_model.py:recurrent --batch 64
