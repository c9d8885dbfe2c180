#!/bin/sh
# Replays a trace of Mooncake; give it --trace FILE.jsonl, as the job's node sees it.
exec "$(dirname "$0")/submit.sh" mooncake --duration 600 --ignore-eos "$@"
