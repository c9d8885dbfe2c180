#!/bin/sh
# Replays a trace of Mooncake; give it --trace FILE.jsonl, as the job's node sees it. Its prompts have up
# to 126,000 tokens: --length-scale 0.03 makes them 4,000.
exec "$(dirname "$0")/submit.sh" mooncake --duration 600 --ignore-eos "$@"
