#!/bin/sh
# All that a GPU must show, on a fresh machine: installs rayfleet, and vLLM into an environment of its
# own to measure beside (WITHOUT_PEER=1 leaves it out), then runs each step of gpu.py. Run in the
# project's folder; gpu.json and gpu.md go to deploy/benchmarks/results/, or to the folder given. One
# to two hours; a step that fails or hangs is told, and the others are measured all the same.
set -u
cd "$(dirname "$0")/../.." || exit 1
results=${1:-deploy/benchmarks/results}
python=${PYTHON:-.venv/bin/python}
peer=${VLLM:-.venv-vllm/bin/vllm}

test -x "$python" || make install || exit 1
if [ -z "${WITHOUT_PEER:-}" ] && [ ! -x "$peer" ]; then
    "$python" -m venv .venv-vllm && .venv-vllm/bin/python -m pip install --quiet vllm ||
        echo "vLLM cannot be installed: measured without it" >&2
fi
set -- --out "$results"
if [ -x "$peer" ]; then set -- "$@" --peer "$peer"; fi
exec "$python" -m deploy.benchmarks.gpu "$@"
