#!/bin/sh
# Replays a Mooncake trace: --trace FILE.jsonl, a path on the job's node. Prompts have up to 126,000
# tokens; --length-scale 0.03 scales them to 4,000.
exec "$(dirname "$0")/submit.sh" mooncake --duration 600 --ignore-eos "$@"
