# `make help` lists the targets. Each does the set-up it needs; the second time that takes a moment.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
# Model of `make run`: tiny (made on the spot, random weights) or smollm2 (SmolLM2-135M-Instruct from a package).
MODEL ?= tiny
# 1: `make run` goes through a gateway, `xkv gateway serve`.
GATEWAY ?= 0
# Prompts of `make verify`.
COUNT ?= 50
# How long `make soak` takes in all.
MINUTES ?= 30
# Further arguments of pytest, such as `make test ARGS="-k matrix -x"`.
ARGS ?=

BIN := .venv/bin
CARGO_TEST := $(shell command -v cargo-nextest >/dev/null && echo "cargo nextest run --no-fail-fast" || echo "cargo test")
MATRIX := lmcache-0.5.5 lmcache-0.5.6

.PHONY: help
help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: setup
setup:  ## Make .venv: LMCache, vLLM, the tools, and this project compiled into it
	@$(PYTHON) scripts/setup.py main

.PHONY: run
run:  ## Show KV cache surviving a server restart, with real LMCache and real vLLM (MODEL=tiny|smollm2, GATEWAY=1)
	@$(PYTHON) scripts/setup.py main $(filter smollm2,$(MODEL))
	@$(BIN)/python -m demo --model $(MODEL) $(if $(filter 1,$(GATEWAY)),--gateway)

.PHONY: test
test:  ## Run every test: Rust, Python, end to end
	@$(PYTHON) scripts/setup.py main test-tools
	$(CARGO_TEST) --workspace
	scripts/loom
	scripts/fuzz 60
	$(BIN)/python -m pytest $(ARGS)

.PHONY: test-matrix
test-matrix:  ## Run the storage tests against the other supported LMCache versions
	@$(PYTHON) scripts/setup.py $(MATRIX) test-tools
	for version in $(MATRIX); do .venv-$$version/bin/python -m pytest -m matrix $(ARGS); done

.PHONY: images
images:  ## Build the gateway's and the CPU image here, without a registry (root; 10 GB of disk)
	@$(PYTHON) scripts/setup.py main image-tools
	$(BIN)/python scripts/images.py gateway cpu

.PHONY: containers
containers: images  ## Run them by podman: gateway, server and vLLM, the manifests by `podman kube play`
	$(BIN)/python -m pytest -m containers tests/containers $(ARGS)

.PHONY: lint
lint: setup  ## Check format, lints, types, and the stubs against the compiled module
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --quiet -- -D warnings
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict xkv_lmcache xkv_lmcache_autostart demo scripts
	$(BIN)/python -m mypy.stubtest xkv_lmcache._native

.PHONY: bench
bench: setup  ## The launcher's overhead; LMCache's own benchmark; adapters side by side on disk and in memory; a growing store
	@$(BIN)/python -m demo.overhead
	@$(BIN)/python -m demo.bench
	@mkdir -p .run
	@$(BIN)/xkv bench l2 .run /dev/shm --json .run/bench.json $(ARGS)
	@$(BIN)/xkv bench growth .run --json .run/growth.json

.PHONY: verify
verify:  ## xkv verify on a real vLLM with SmolLM2: does a hit in L2 change an answer? (COUNT=50)
	@$(PYTHON) scripts/setup.py main smollm2
	@$(BIN)/python -m demo.verify --count $(COUNT)

.PHONY: soak
soak: setup  ## Load while stores replace and evict the same keys, through both backends (MINUTES=30)
	@$(BIN)/python -m tests.soak --minutes $(MINUTES)

.PHONY: panels
panels:  ## Draw the dashboard's panels over a real run for docs/operators
	@$(PYTHON) scripts/setup.py main plots
	@$(BIN)/python -m tests.monitoring.panels

.PHONY: outage
outage: setup  ## Log volume while the gateway is down under load, for ten minutes
	@$(BIN)/python -m tests.soak.outage

.PHONY: fuzz
fuzz:  ## Fuzz everything that is parsed, and hostile clients against a gateway, for about half an hour
	scripts/fuzz 1800
	XKV_ROUNDS=10 cargo test --release -p xkv-session --test hostile_client random_bytes

.PHONY: clean
clean:  ## Remove what the targets above made, environments included
	rm -rf target fuzz/target .venv .venv-lmcache-* .run .pytest_cache .mypy_cache .ruff_cache .hypothesis xkv_lmcache/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
