#!/bin/sh
# Prompts with shared prefixes, then without: the gain by prefix cache and routing.
exec "$(dirname "$0")/submit.sh" shared-prefix --rate 4 --duration 60 --prefix-repetition-prefix-len 1024 --prefix-repetition-suffix-len 128 --prefix-repetition-num-prefixes 20 --ignore-eos "$@"
