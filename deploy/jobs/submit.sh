#!/bin/sh
# Submits a benchmark to a Ray cluster: deploy/jobs/submit.sh KIND [flags of `bench job`]
#
# Run it in the project's folder. RAY_ADDRESS is the dashboard of the cluster that generates the load
# (default http://127.0.0.1:8265); BASE_URL the endpoint, as that cluster reaches it. The last line
# of the output is the result; result.json and report.html are written to OUT on the job's node, by
# default a new folder under /tmp/rayfleet-jobs.
set -eu
kind=$1
shift
default_out=/tmp/rayfleet-jobs/$kind-$(date +%Y%m%d-%H%M%S)
export RAY_ADDRESS="${RAY_ADDRESS:-http://127.0.0.1:8265}"
exec "${RAY:-ray}" job submit --working-dir . --runtime-env deploy/jobs/runtime.yaml \
    --entrypoint-num-cpus "${CPUS:-0.1}" -- "${PYTHON:-python}" -m cluster.bench job "$kind" \
    --base-url "${BASE_URL:-http://127.0.0.1:8000}" --out "${OUT:-$default_out}" \
    --load-tasks "${LOAD_TASKS:-2}" --json "$@"
