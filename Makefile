# Every target sets up .venv on first use. `make TARGET PYTHON=python3` uses that interpreter and installs nothing.
.DEFAULT_GOAL := help
BOOTSTRAP ?= python3
PIP_ARGS ?=
# pip would compile thousands of files that no run imports; the first import compiles those that one does.
install = -m pip install --quiet --disable-pip-version-check --no-compile $(PIP_ARGS)
VENV := .venv
# A run imports the same files in hundreds of processes. Where this is set, each of them would compile them again.
unexport PYTHONDONTWRITEBYTECODE
# A test of ranks leaves cores idle while they wait for each other: three files at a time on two cores, in order, as files
# of few long tests would otherwise come last, on one core. WORKERS= runs them one by one.
WORKERS ?= -n 3 --dist loadfile --no-loadscope-reorder
# Threads of an operator wait for each other by spinning, which takes the cores from ranks that compute.
test test-rest test-verify test-all test-models test-megatron: export OMP_NUM_THREADS ?= 1
# Ranks of the tests of frameworks have these from the start; every process would import them for five seconds.
PRELOAD := --preload transformers.trainer,accelerate,peft
# Triton 3.6's interpreter of kernels breaks with a newer numpy.
oldest := torch==2.11.0 triton==3.6.0 'numpy<2.4'
newest := torch
# The releases of Megatron that the tests know: TESTED of that module.
megatrons := $(shell sed -n 's/^TESTED = (\(.*\))/\1/p' tritoncomm/integrations/megatron/patching.py | tr -d '",')
ifeq ($(strip $(megatrons)),)
$(error no versions of Megatron: TESTED is not in tritoncomm/integrations/megatron/patching.py)
endif
unpacked := $(patsubst %,.megatron/%,$(wordlist 2,99,$(megatrons)))
peers := deepspeed==0.19.8 yunchang==0.6.4 transformers==5.23.0 accelerate==1.15.0 peft==0.21.2

ifdef PYTHON
PY := PYTHONPATH=.:kernels $(PYTHON)
DEMO :=
READY :=
SITE :=
MEGATRON :=
else
PY := $(VENV)/bin/python
DEMO := $(VENV)/.demo
READY := $(VENV)/.ready
PEERS := $(VENV)/.peers
SITE := $(VENV)/.site
MEGATRON := $(lastword $(megatrons))
endif

.PHONY: help demo test test-rest test-verify test-all test-megatron test-models test-matrix test-world test-oldest test-newest programs docs docs-site dist check faults soak fuzz mutations bench bench-against effects fake-gpu-test gpu gpu-test gpu-bench gpu-ranks clean

help:  ## lists the targets
	@sed -n 's/^\([a-z][a-z -]*\):.*  ## \(.*\)/\1|\2/p' $(firstword $(MAKEFILE_LIST)) | while IFS='|' read -r names text; do \
	    printf '%-24s %s\n' "$$names" "$$text"; done

demo: $(DEMO)  ## trains a small transformer on two ranks
	$(PY) -m tritoncomm demo

# `make test` is the library by itself, in under five minutes on two cores. `make test-rest` is everything else that CI
# runs: frameworks, check mode, commands, benchmarks, simulated GPUs, the documentation, inductor, and ranks that fail.
FAULTS := tests/debug/test_faults.py tests/p2p/test_faults.py tests/debug/test_disagreements_without_check.py
LIBRARY := $(foreach name,core mappings p2p reshard tensor kernels,$(sort $(wildcard tests/$(name)/test_*.py))) \
    $(foreach name,collective errors groups imports parallel record surface ulysses variables wire_sum,tests/test_$(name).py)
LIBRARY := $(filter-out $(FAULTS) tests/core/test_compile.py tests/p2p/test_megatron.py,$(LIBRARY))
REST := $(filter-out $(LIBRARY),$(sort $(wildcard tests/*/test_*.py tests/test_*.py)))

test: $(READY)  ## tests the library, in under five minutes
	@$(PY) -m pytest -m "not slow" -q $(WORKERS) $(DURATIONS:%=--durations=%) $(LIBRARY)

# An interpreter of yours has the Megatron that it has; here the oldest release is installed, and the newest tested as well.
# A GPT is trained with the newest alone: it takes half a minute, and `make test-megatron` trains it with every release.
GPT := --deselect tests/integrations/test_megatron.py::test_a_gpt_trains_to_the_same_bits
test-rest: $(READY) $(PEERS) $(MEGATRON:%=.megatron/%)  ## runs the other tests of CI: frameworks, commands
	@$(PY) -m pytest -m "not slow" -q $(WORKERS) $(PRELOAD) $(if $(MEGATRON),--megatron $(firstword $(megatrons)) $(GPT)) $(DURATIONS:%=--durations=%) $(REST)
	$(if $(MEGATRON),$(PY) -m pytest tests/integrations/test_megatron.py -m "not slow" -q --megatron $(MEGATRON))

# Every release in a process of its own; all of them run, whichever fails.
test-megatron: $(READY) $(PEERS) $(unpacked)  ## tests every known release of Megatron
	status=0; for version in $(megatrons); do \
	    $(PY) -m pytest tests/integrations/test_megatron.py tests/p2p/test_megatron.py -q --megatron $$version || status=1; \
	done; exit $$status

# Every environment that is there; ARGS="--environments newest --parts tests" runs a part.
test-matrix: $(READY) $(PEERS) $(unpacked)  ## runs the table of versions
	$(PY) tools/matrix.py $(ARGS)

# Releases of Megatron are for Python 3.12 and newer, so that pip offers none on an older one; unpacked they work there too.
.megatron/%: | $(READY)
	rm -rf $@.part
	$(PY) -m pip download --quiet --disable-pip-version-check $(PIP_ARGS) --no-deps --python-version 3.12 --implementation cp \
	    --only-binary=:all: --platform manylinux_2_28_x86_64 --platform manylinux_2_24_x86_64 --platform manylinux2014_x86_64 \
	    -d $@.part megatron-core==$*
	$(PY) -m zipfile -e $@.part/*.whl $@.part
	rm $@.part/*.whl
	mv $@.part $@

# All causal language models of the installed transformers: two seeds, grouped and full key/value heads, 1 and 2 ranks.
test-models: $(READY) $(PEERS)  ## tests every model of transformers
	$(PY) -m pytest tests/integrations/test_models.py -v $(WORKERS)

# Peers' own test suites and recipes with the newest releases, first alone, then with ours in their place. Their sources
# come from GitHub; WORLD_MEGATRON=, WORLD_DEEPSPEED=, WORLD_YUNCHANG= and WORLD_COLOSSALAI= name a folder or a git
# repository instead. ARGS="--only TRL" runs one suite, and --write puts the rows into docs/compatibility.md.
world := torch transformers accelerate trl peft datasets requests pytest-mock deepspeed yunchang spmd-types
test-world: $(if $(PYTHON),,.venv-world/.ready $(MEGATRON:%=.megatron/%))  ## runs peers' own tests with ours in their place
	PYTHONPATH=$(MEGATRON:%=$(CURDIR)/.megatron/%:)$(CURDIR):$(CURDIR)/kernels:$(CURDIR)/tools$(PYTHONPATH:%=:%) \
	    $(or $(PYTHON),.venv-world/bin/python) -m outside $(ARGS)

.venv-world/.ready: pyproject.toml
	$(BOOTSTRAP) -m venv .venv-world
	.venv-world/bin/python $(install) --upgrade -e '.[cli,test]' $(world)
	@touch $@

test-verify: $(READY) $(PEERS)  ## tests `tritoncomm verify` with all faults
	$(PY) -m pytest tests/test_verify.py tests/test_verify_recipes.py tests/test_verify_steps.py tests/integrations/test_megatron.py -k "test_verify or one_process" -q $(WORKERS) $(DURATIONS:%=--durations=%)

test-all: $(READY) $(PEERS)  ## runs all tests
	$(PY) -m pytest -q

# The oldest versions that are supported, and the newest that there are, each in an environment of its own; torch brings
# several GB of CUDA libraries. BOOTSTRAP=python3.13 chooses the Python.
test-oldest test-newest: test-%:  ## runs the tests with other versions
	$(BOOTSTRAP) -m venv .venv-$*
	.venv-$*/bin/python $(install) -e '.[cli,plot,test,bench]' $($*)
	.venv-$*/bin/python $(install) --no-deps megatron-core==$(firstword $(megatrons))
	.venv-$*/bin/python $(install) $($*) $(peers)
	.venv-$*/bin/python -m pytest -m "not slow" -q $(WORKERS)

# Random programs of tensor operators on shards, against plain torch.
programs: $(READY)  ## compares random programs on shards with plain torch
	PYTHONPATH=.:kernels:tests/helpers:tools $(if $(PYTHON),$(PYTHON),$(PY)) tools/programs.py 20000

faults: $(READY)  ## kills, stops and delays ranks in every kind of call
	$(PY) -m pytest $(FAULTS) -q -n 3

soak: $(READY)  ## calls for half an hour and watches what grows
	PYTHONPATH=.:kernels:tests/helpers:tools $(if $(PYTHON),$(PYTHON),$(PY)) tools/soak.py

# ARGS="--domains calls --seed 7 --cases 700" runs one round of one domain again.
fuzz: $(READY)  ## feeds 100,000 drawn inputs to all that takes input
	PYTHONPATH=.:kernels:tests/helpers:tools $(if $(PYTHON),$(PYTHON),$(PY)) tools/fuzz.py $(ARGS)

mutations: $(READY)  ## makes wrong lines that tests have to notice
	$(PY) tools/mutations.py

# The pages that are made out of code and committed figures.
docs: $(READY)  ## writes the pages that are made out of code and figures
	PYTHONPATH=.:kernels $(if $(PYTHON),$(PYTHON),$(PY)) docs/operators.py
	$(PY) bench/report.py --write
	$(PY) -m bench.audit --write
	$(PY) docs/draw.py
	$(PY) -m docs.mapping_pictures

# A link that leads nowhere, a page outside the navigation and a documented argument that does not exist are errors.
docs-site: $(SITE)  ## builds the site of the documentation in site/
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

# Built in an environment of its own, then imported and used from a folder outside of the checkout.
dist: $(READY)  ## builds wheel and source distribution in dist/
	rm -rf dist
	$(PY) -m hatchling build -d dist
	$(PY) -m pytest tests/test_packaging.py -q

check: $(READY)  ## runs ruff and basedpyright
	$(PY) tools/names.py
	$(PY) -m ruff check --no-cache .
	$(PY) -m ruff format --no-cache --check .
	$(PY) -m basedpyright

bench: $(READY) $(PEERS)  ## runs the benchmarks
	$(PY) -m pytest bench -q --benchmark-disable-gc

# This tree against another commit, measured alternately on this machine: make bench-against BASE=<commit>
bench-against: $(READY) $(PEERS)  ## measures another commit too: BASE=<commit>
	$(PY) -m bench.against $(BASE)

# What users see of calls, bit for bit, on this tree and on another commit: a redesign changes nothing.
# ARGS="--domains sums" compares a part.
effects: $(READY)  ## compares effects with a commit: BASE=<commit>
	PYTHONPATH=.:kernels:tests/helpers $(if $(PYTHON),$(PYTHON),$(PY)) tools/effects.py $(BASE) $(ARGS)
	PYTHONPATH=.:kernels $(if $(PYTHON),$(PYTHON),$(PY)) tools/entries.py $(BASE)

# The compiled kernels without a GPU: launched by Triton, run as PTX on the CPU. SM=sm80 or sm100 for another GPU.
SM ?= sm90
fake-gpu-test: $(READY)  ## runs compiled kernels on the CPU: SM=sm80, sm90, sm100
	$(PY) -m pytest --device $(SM) tests/fake_gpu/on_stub.py tests/kernels tests/gpu/test_ranks.py -q

# All that needs a GPU, of most worth first; the limits of the parts add up to less than 25 minutes. It fails unless every
# part ran and passed. PARTS="test ranks" runs some of them: test nccl kernels ranks local step bench tune tuned. With twelve
# minutes of a GPU: PARTS=first takes at most 7, PARTS=second 5. DRY=1 runs on a CPU what each part needs.
PARTS ?=
gpu: $(READY)  ## runs all that needs a GPU, in 25 minutes
	$(PY) tools/gpu_run.py all $(if $(DRY),--dry) $(if $(PARTS),--parts $(PARTS))

gpu-test: $(READY)  ## runs the tests of kernels and ranks on GPUs
	$(PY) tools/gpu_run.py all --parts test kernels

gpu-ranks: $(READY)  ## runs ranks on GPUs, and their benchmark
	$(PY) tools/gpu_run.py all --parts ranks local

gpu-bench: $(READY)  ## runs the benchmarks of a GPU
	timeout 265 $(PY) bench/gpu_bench.py

# The demo needs torch and what the command needs. `make test` adds the rest to the same environment.
$(VENV)/.demo: pyproject.toml constraints.txt
	@echo "installing torch and the command into $(VENV): downloads it, then takes about half a minute"
	$(BOOTSTRAP) -m venv $(VENV)
	$(VENV)/bin/python $(install) -c constraints.txt -e '.[cli]'
	@touch $@

$(VENV)/.ready: $(VENV)/.demo
	@echo "installing Triton and what tests and lint need into $(VENV)"
	$(VENV)/bin/python $(install) -c constraints.txt -e '.[cli,plot,test,bench,dev]'
	@touch $@

# What benchmarks and the tests of the integrations compare with.
$(VENV)/.peers: $(VENV)/.ready
	$(VENV)/bin/python $(install) --no-deps megatron-core==$(firstword $(megatrons))
	$(VENV)/bin/python $(install) -c constraints.txt $(peers)
	@touch $@

$(VENV)/.site: $(VENV)/.demo
	$(VENV)/bin/python $(install) -c constraints.txt -e '.[site]'
	@touch $@

clean:  ## removes the environments and caches
	rm -rf $(VENV) .venv-oldest .venv-newest .venv-world .world .megatron dist site .pytest_cache .ruff_cache .benchmarks
