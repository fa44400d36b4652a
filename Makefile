# Every target is one call of dev.py, which makes .venv on first use. Without make: `python3 dev.py TASK`.
# ARGS passes arguments, PYTHON chooses an interpreter: make test PYTHON=python3.12 ARGS="-k retraction"

PYTHON ?= python3
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help demo check test long-test vllm-test vllm-families scenarios golden swarm explore fleet-swarm rank-swarm overload attacks kill-campaign resume-campaign pair-campaign openapi clients schema-campaign bench dist site pages container docs-test mutants kernel-mutants fast-path-campaign parity fake-cuda-coverage kernel-resources gpu-check

help:       ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo:       ## requests per second that one GPU serves within its SLOs; no GPU, no torch
	@$(PYTHON) dev.py demo $(ARGS)

check:      ## ruff, its formatter, mypy --strict, and the golden journals
	@$(PYTHON) dev.py check $(ARGS)

test:       ## the test suite without its long tests; ARGS=--affected for the tests that a change may affect
	@$(PYTHON) dev.py test $(ARGS)

long-test:  ## the long tests, which `make test` leaves out: tests/data/long_tests.txt
	@$(PYTHON) dev.py long-test $(ARGS)

vllm-test:  ## tests of lockstep.vllm with a vLLM in an environment of its own; ARGS=--short for a part
	@$(PYTHON) dev.py vllm-test $(ARGS)

vllm-families: ## answers of lockstep.vllm and of vLLM's own scheduler by model family, 200 requests each; ARGS="moe mla"
	@$(PYTHON) dev.py vllm-families $(ARGS)

scenarios:  ## run the scenarios and rewrite their expected parts; then read the diff
	@$(PYTHON) dev.py scenarios $(ARGS)

golden:     ## record missing golden journals; ARGS=NAME records one again, deliberately: docs/journal.md
	@$(PYTHON) dev.py golden $(ARGS)

swarm:      ## random histories with every invariant checked; ARGS="--steps 10_000_000 --results FILE"
	@$(PYTHON) dev.py swarm $(ARGS)

explore:    ## every interleaving of small worlds, each two features together; ARGS="--transitions 4_000 --csv FILE"
	@$(PYTHON) dev.py explore $(ARGS)

mutants:    ## small changes of the sources that tests must notice, by module; ARGS="core --sample 600"
	@$(PYTHON) dev.py mutants $(ARGS)

kernel-mutants: ## mutants of the simulator's fast path, and which of them no random run finds; ARGS="--module memory.py"
	@$(PYTHON) dev.py kernel-mutants $(ARGS)

parity:     ## take each mechanism of docs/parity.md out of a copy, and see its test fail; ARGS="chunks reserve"
	@$(PYTHON) dev.py parity $(ARGS)

fast-path-campaign: ## 20,000 random runs by the simulator's fast path and by the core, equal; ARGS="--runs 500"
	@$(PYTHON) dev.py fast-path-campaign $(ARGS)

fleet-swarm: ## random histories of prefill and decode engines with a bad network, 10^6 steps; ARGS="--steps 100_000"
	@$(PYTHON) dev.py fleet-swarm $(ARGS)

rank-swarm: ## random histories of four data-parallel ranks, 10^6 steps; ARGS="--steps 100_000"
	@$(PYTHON) dev.py rank-swarm $(ARGS)

attacks:    ## 200 hostile requests and 50 hostile connections: the worst delay of another stream, about three minutes
	@$(PYTHON) dev.py attacks $(ARGS)

overload:   ## overload of a server by all kinds of requests for five minutes; ARGS=--short for one minute
	@$(PYTHON) dev.py overload $(ARGS)

kill-campaign: ## 1,000 kills of a server's engine under 32 streams, no token lost or doubled; ARGS="--every-process"
	@$(PYTHON) dev.py kill-campaign $(ARGS)

resume-campaign: ## 1,000 kills of engine, worker, launcher and server; clients take their streams up; ARGS="--kills 100"
	@$(PYTHON) dev.py resume-campaign $(ARGS)

pair-campaign: ## every feature and pair of features on tensors, 200 requests each: one plain engine's tokens; ARGS="--requests 20"
	@$(PYTHON) dev.py pair-campaign $(ARGS)

openapi:    ## schemathesis against every route of /openapi.json, in an environment of its own; ARGS=--short
	@$(PYTHON) dev.py openapi $(ARGS)

clients:    ## public clients (agents, libraries, load generators), each in an environment of its own; ARGS=--list
	@$(PYTHON) dev.py clients $(ARGS)

schema-campaign: ## 1,000 random JSON schemas through the demo model: every answer validates; ARGS="--schemas 100"
	@$(PYTHON) dev.py schema-campaign $(ARGS)

bench:      ## the benchmarks
	@$(PYTHON) dev.py bench $(ARGS)

dist:       ## wheels and sdists in dist/, installed into an empty environment and used there; ARGS=--no-install
	@$(PYTHON) dev.py dist $(ARGS)

site:       ## the documentation site in site/, with an error for a broken link; ARGS=--serve while pages are edited
	@$(PYTHON) dev.py site $(ARGS)

pages:      ## axe-core, widths and colour schemes of every page in headless Chromium; ARGS="--pictures DIR"
	@$(PYTHON) dev.py pages $(ARGS)

container:  ## the Containerfile: hadolint, and a build or, without a builder, its steps; ARGS=--no-build
	@$(PYTHON) dev.py container $(ARGS)

docs-test:  ## every command line of the documentation as long as it is printed; ARGS=--again goes on after Ctrl-C
	@$(PYTHON) dev.py docs-test $(ARGS)

fake-cuda-coverage: ## share of the lines that only a GPU reaches which run on a fake device, 90 % at least; ARGS=--missing
	@$(PYTHON) dev.py fake-cuda-coverage $(ARGS)

kernel-resources: ## every Triton kernel compiled for four generations of GPUs: registers, spills, shared memory; no GPU
	@$(PYTHON) dev.py kernel-resources $(ARGS)

gpu-check:  ## checks on a machine with an NVIDIA GPU: every kernel and mode, speed, calibration; under nine minutes
	@$(PYTHON) dev.py gpu-check $(ARGS)
