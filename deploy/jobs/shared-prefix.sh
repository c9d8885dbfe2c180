#!/bin/sh
# Prompts with prefixes in common, then without: what the prefix cache and routing save.
exec "$(dirname "$0")/submit.sh" shared-prefix --rate 4 --duration 60 --prefix-repetition-prefix-len 1024 --prefix-repetition-suffix-len 128 --prefix-repetition-num-prefixes 20 --ignore-eos "$@"
