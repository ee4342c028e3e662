#!/bin/sh
# `make demo`: plan, validate, train and compare a small DeepSeek-V3 proxy on this machine.
# Every command is printed before it runs; they are what a person would type.
set -eu

mfsdp=.venv/bin/mfsdp
plan=runs/demo-plan.json
mkdir -p runs

say() { printf '\n\033[1m%s\033[0m\n' "$1" >&2; }
[ -t 2 ] && [ -z "${NO_COLOR:-}" ] || say() { printf '\n%s\n' "$1" >&2; }

seconds() { date +%s; }
started=$(seconds)
times=""

run() {
    name=$1
    shift
    say "\$ mfsdp $*"
    from=$(seconds)
    "$mfsdp" "$@"
    times="$times
  $(printf '%-28s %4d s' "$name" $(($(seconds) - from)))"
}

train() {
    run "train, engine $1" train "$plan" --engine "$1" --steps 200 --eval-interval 50 \
        --eval-steps 4 --lr 1e-3 --lr-warmup-steps 10 --run-dir "runs/demo-$1" --overwrite
}

run plan plan deepseek-v3-proxy-tiny --pp 2 --vpp 2 --world-size 4 --mbs 1 --gbs 8 --seq 128 \
    --out "$plan"
run validate validate "$plan" --numeric
train mfsdp
train distopt
run compare-runs compare-runs runs/demo-mfsdp runs/demo-distopt \
    --abs-tolerance 0.002 --rel-tolerance 0 --png runs/demo-losses.png

say "demo done in $(($(seconds) - started)) s:$times"
echo "  the two curves: runs/demo-losses.png" >&2
