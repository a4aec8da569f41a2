# make help

PYTHON ?=
VENV ?= .venv
BIN := $(VENV)/bin
CLUSTER ?=
PYTEST_ARGS ?=
ARGS ?=
export REGISTRY TAG TORCH BASE_IMAGE IMAGE_TOOL

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-cluster images lint format crds messages install install-dev clean bench bench-gpu bench-host gpu test-gpu simulate simulate-operator simulate-batch test-batch-faults soak fuzz

help: ## this list
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-17s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: ## install, fetch a real model, serve it, ask it a question, run a batch (no GPU, no cluster, no account)
	@PYTHON=$(PYTHON) VENV=$(VENV) examples/demo.sh

install: ## a virtual environment with both packages
	@PYTHON=$(PYTHON) VENV=$(VENV) .ci/install

install-dev: ## the same, and everything that lint and tests need
	@PYTHON=$(PYTHON) VENV=$(VENV) .ci/install dev

test: ## lint and one test per mechanism, with a short story on a cluster (20 minutes on two cores); the last lines say what was left out
	@PYTHON=$(PYTHON) VENV=$(VENV) CLUSTER=$(CLUSTER) .ci/test $(PYTEST_ARGS)

test-all: ## lint and every test: each case, clients, dashboards, README, all stories on a cluster (an hour and a half)
	@PYTHON=$(PYTHON) VENV=$(VENV) CLUSTER=$(CLUSTER) .ci/test all $(PYTEST_ARGS)

test-cluster: install-dev ## images, chart and operator on a real cluster (CLUSTER=kind, or the one beside the checkout)
	@VENV=$(VENV) CLUSTER=$(CLUSTER) .ci/test-cluster all $(PYTEST_ARGS)

lint: install-dev ## ruff, mypy --strict, import contracts, generated files, chart and Dockerfiles
	@VENV=$(VENV) .ci/lint

format: install-dev ## put the code into shape
	$(BIN)/ruff check --fix-only --quiet . && $(BIN)/ruff format .

crds: install ## write crds/ and the chart's copy from the models in operator/banyan_operator/api
	$(BIN)/banyan-operator crds --output-dir crds && $(BIN)/banyan-operator crds --output-dir charts/banyan/files/crds

messages: install ## write docs/messages.md, the sentences that users read, from the sources
	$(BIN)/python docs/messages.py

images: ## both container images (REGISTRY=registry.example.com/team TAG=…), and how to push or load them
	@.ci/images

simulate: install-dev ## a million random steps of the engine (make test runs 4,000)
	@BANYAN_SIM_STEPS=1000000 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 4 --dist worksteal tests/simulation/engine/test_simulation.py $(PYTEST_ARGS)

simulate-operator: install-dev ## a million random schedules of the operator (make test runs 80, make test-all 4,000; hours)
	@BANYAN_SIM_SCHEDULES=1000000 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal tests/simulation/operator/test_simulation.py $(PYTEST_ARGS)

simulate-batch: install-dev ## a million random schedules of the batch protocol (make test runs 1,500, make test-all 10,000)
	@BANYAN_SIM_BATCHES=1000000 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal tests/simulation/batch/test_simulation.py $(PYTEST_ARGS)

test-batch-faults: install-dev ## runs killed at each of their writes, in a folder and in S3 (make test-all meets each kind)
	@BANYAN_ALL_FAULTS=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal tests/component/batch $(PYTEST_ARGS)

soak: install-dev ## 100,000 requests of mixed lengths: memory must stay where it is (about half an hour)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/soak.py

fuzz: install-dev ## ten thousand drawn HTTP requests over /openapi.json (make test-all sends a thousand)
	@BANYAN_FUZZ_CASES=10000 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -p no:xdist -s tests/e2e/clients/test_fuzz.py $(PYTEST_ARGS)

bench: install-dev ## Banyan beside llama.cpp, OpenVINO and vLLM on this machine's CPU, into benchmarks/results (ARGS="--models 7m --rounds 1": minutes)
	$(BIN)/python benchmarks/compare.py $(ARGS)

gpu: ## both of the next two within ten minutes, what matters most first, into .gpu/out (ARGS="SECONDS PART…")
	.ci/gpu $(ARGS)

test-gpu: ## on a machine with a GPU: kernels, runners and a server there (.ci/gpu-wheels and .ci/gpu-kernels first, where it has no network)
	.ci/test-gpu

bench-gpu: ## on a machine with a GPU: models with random weights, their steps beside the limit by arithmetic, and served
	.ci/gpu-python benchmarks/gpu.py $(ARGS) && .ci/gpu-python benchmarks/gpu_served.py $(SERVED_ARGS)

bench-host: install-dev ## what the host costs around the model: scheduler, prefix cache, front, start (ARGS="--rounds 1")
	$(BIN)/python benchmarks/host.py $(ARGS)

clean: ## remove the virtual environment and what tests and the example left
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache examples/01-minimal/batches/out archives
