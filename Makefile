# Thin: every target is one call of h3trt, which says with --help what it does.

PYTHON ?= python3
VENV ?= .venv
PROFILE ?= cpu
CHECKPOINT ?= build/checkpoint
SUBJECT ?= block
CLIENT ?= perf_analyzer

# Values reach the shell through the environment and never as text of a recipe, so that quotes, dollars, backquotes and
# newlines in them mean themselves. $(value) takes them before make expands anything; unexport keeps make from expanding
# what was given on its command line.
unexport PROMPT SECONDS ASPECT_RATIO WIDTH HEIGHT SEED FORWARDS OUT PROFILE CHECKPOINT SUBJECT CLIENT
export H3_PROMPT := $(value PROMPT)
export H3_SECONDS := $(value SECONDS)
export H3_ASPECT_RATIO := $(value ASPECT_RATIO)
export H3_WIDTH := $(value WIDTH)
export H3_HEIGHT := $(value HEIGHT)
export H3_SEED := $(value SEED)
export H3_FORWARDS := $(value FORWARDS)
export H3_OUT := $(value OUT)
export H3_PROFILE := $(value PROFILE)
export H3_CHECKPOINT := $(value CHECKPOINT)
export H3_SUBJECT := $(value SUBJECT)
export H3_CLIENT := $(value CLIENT)

H3TRT := $(VENV)/bin/h3trt
INSTALLED := $(VENV)/.installed

.PHONY: help setup demo test soak checkpoint engines serve generate verify bench perf doctor peers browser analyzer lint types clean

help: ## show the targets
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

setup: $(INSTALLED) ## install everything into .venv (PYTHON=python3.11 chooses the interpreter)

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' || \
	  { echo "h3trt runs on Python 3.11 and 3.12 (Triton needs numpy 1, which newer ones have no build of);" \
	    "$(PYTHON) is another or missing: make setup PYTHON=python3.12" >&2; exit 2; }
	@$(PYTHON) -c 'import venv, ensurepip' || \
	  { echo "$(PYTHON) cannot make virtual environments: apt-get install python3-venv" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --progress-bar off -c constraints.txt -e '.[serve,export,test]'
	@touch $@

demo: setup ## miniature checkpoint, engines, Triton, one request: out/demo.mp4
	$(H3TRT) demo

# A process for each processor, and so a thread for each process: more would wait for one another.
test: setup ## the whole test suite
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -m 'not soak' -n auto --maxprocesses 4 \
	  --dist loadfile --no-loadscope-reorder

soak: setup ## the tests that take longer than the test suite may
	$(VENV)/bin/python -m pytest -m soak

checkpoint: setup ## a miniature checkpoint (CHECKPOINT=directory)
	$(H3TRT) checkpoint tiny "$$H3_CHECKPOINT"

engines: setup ## build the engines of a checkpoint (PROFILE=cpu CHECKPOINT=directory)
	$(H3TRT) engines build --profile "$$H3_PROFILE" --checkpoint "$$H3_CHECKPOINT"

serve: setup ## serve the engines with Triton until Ctrl-C (PROFILE=cpu)
	$(H3TRT) serve --profile "$$H3_PROFILE"

generate: setup ## ask the server for a clip (PROMPT= SECONDS= ASPECT_RATIO= WIDTH= HEIGHT= SEED= FORWARDS= OUT=)
	@$(H3TRT) generate \
	  $${H3_SECONDS:+--seconds "$$H3_SECONDS"} \
	  $${H3_ASPECT_RATIO:+--aspect-ratio "$$H3_ASPECT_RATIO"} \
	  $${H3_WIDTH:+--width "$$H3_WIDTH"} \
	  $${H3_HEIGHT:+--height "$$H3_HEIGHT"} \
	  $${H3_SEED:+--seed "$$H3_SEED"} \
	  $${H3_FORWARDS:+--forwards "$$H3_FORWARDS"} \
	  $${H3_OUT:+--out "$$H3_OUT"} \
	  -- "$$H3_PROMPT"

verify: setup ## compare engines and pipeline with the reference (PROFILE=cpu)
	$(H3TRT) verify --profile "$$H3_PROFILE"

bench: setup ## measure on this machine's GPU (PROFILE=h200_inductor SUBJECT=block)
	$(H3TRT) bench --profile "$$H3_PROFILE" -- "$$H3_SUBJECT"

perf: setup ## latency and throughput under load (PROFILE=cpu CLIENT=perf_analyzer or aiperf)
	$(H3TRT) perf --profile "$$H3_PROFILE" --client "$$H3_CLIENT"

doctor: setup ## check this machine, and say what mends what is missing
	$(H3TRT) doctor

PEERS := vllm-omni==0.30.0 torchvision==0.28.0

peers: setup ## what some tests compare with and nothing here needs; without it they are skipped
	$(VENV)/bin/python -m pip download --progress-bar off --no-deps -d build/peers $(PEERS)

browser: ## Chromium, for the test of the web page; without it that test is skipped
	@command -v chromium || command -v google-chrome || \
	  { apt-get update && apt-get install -y --no-install-recommends chromium; } || \
	  { echo "no Chromium here, and no way to install it: as root, apt-get install chromium" >&2; exit 2; }

analyzer: setup ## perf_analyzer, for make perf and its test; without it that test is skipped
	$(H3TRT) perf --fetch

lint: setup ## style
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: setup ## static types
	$(VENV)/bin/mypy plugins export engines runtime triton_repo gateway h3trt bench

clean: ## remove the environment and everything that was built
	rm -rf $(VENV) build out
