# One environment, built once: `make demo`, `make test` and friends start from a fresh clone.
#
#   make demo        corpus, tokenizer, preprocessing, training on 2 CPU processes, loss curve
#   make test        the test suite
#   make faults      the fault suite: what runs survive, as a table
#   make parity      every layout against one document at a time; docs/parity.md
#   make mutants     faults put into the product, and the tests that notice; docs/mutants.md
#   make functional  whole runs against golden values, through torchrun
#   make lint        ruff and mypy
#   make docs        docs/flags.md, from the flags' declarations
#   make bench-step  training steps side by side; bench-memory, bench-packing likewise
#   make PYTHON=...  another interpreter (default python3.11); with VENV=... beside the first one
#
# EXTRAS and PIP_ARGS reach pip, for example EXTRAS=test,bench or PIP_ARGS="--no-index ...".

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
EXTRAS ?= test
PIP_ARGS ?=
DEMO ?= demo

comma := ,
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed-$(subst $(comma),-,$(EXTRAS))
SOURCES := setup.py pyproject.toml $(wildcard csrc/* csrc/*/*)

# An environment of another Python would be used in silence.
ifeq ($(origin PYTHON),command line)
ifneq ($(wildcard $(BIN)/python),)
VERSION := -c 'import sys; print(*sys.version_info[:2])'
ifneq ($(shell $(PYTHON) $(VERSION)),$(shell $(BIN)/python $(VERSION)))
$(error $(VENV) holds another Python than $(PYTHON); add, say, VENV=.venv-$(notdir $(PYTHON)))
endif
endif
endif

.DELETE_ON_ERROR:
.PHONY: demo test test-full faults parity mutants functional lint docs bench-step bench-memory bench-packing bench-loss asan clean

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

# Build tools are installed first and isolation is off, so that nothing is downloaded twice.
$(INSTALLED): $(SOURCES) | $(BIN)/python
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) "setuptools>=69" wheel "pybind11>=2.12" numpy
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) --no-build-isolation --editable ".[$(EXTRAS)]"
	@touch $@

# ---- demo -------------------------------------------------------------------------------------

$(DEMO)/corpus.jsonl: | $(INSTALLED)
	$(BIN)/python tools/make_corpus.py --output $@

$(DEMO)/tokenizer/tokenizer.json: $(DEMO)/corpus.jsonl
	$(BIN)/python tools/train_tokenizer.py --input $< --output $(DEMO)/tokenizer \
	    --vocab-size 8192 --limit-bytes 8000000

$(DEMO)/corpus_text_document.idx: $(DEMO)/corpus.jsonl $(DEMO)/tokenizer/tokenizer.json
	$(BIN)/python tools/preprocess_data.py --input $< --output-prefix $(DEMO)/corpus \
	    --tokenizer-type HuggingFaceTokenizer --tokenizer-model $(DEMO)/tokenizer \
	    --append-eod --workers 2

$(DEMO)/loss.png: $(DEMO)/corpus_text_document.idx
	PATH="$(abspath $(BIN)):$$PATH" DEMO="$(DEMO)" bash examples/train_demo_cpu.sh
	$(BIN)/python tools/plot_loss.py --tensorboard-dir $(DEMO)/tensorboard --output $@

demo: $(DEMO)/loss.png
	@echo "loss curve: $(DEMO)/loss.png    TensorBoard: $(BIN)/tensorboard --logdir $(DEMO)/tensorboard"

# ---- checks -----------------------------------------------------------------------------------

test: $(INSTALLED)
	$(BIN)/python -m pytest -m "not slow"

test-full: $(INSTALLED)
	$(BIN)/python -m pytest

# Kills, signals, damaged files, full disks, bad values; prints a table of what was survived.
faults: $(INSTALLED)
	$(BIN)/python -m pytest tests/faults

parity: $(INSTALLED)
	$(BIN)/python -m tests.functional.parity

mutants: $(INSTALLED)
	$(BIN)/python -m tests.functional.mutant_checks

functional: $(INSTALLED)
	$(BIN)/python -m tests.functional.run --jobs 2

lint: $(INSTALLED)
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) ruff mypy types-PyYAML
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy megatron/packed pretrain_gpt.py

docs: $(INSTALLED)
	$(BIN)/python tools/document_flags.py

# ---- benchmarks -------------------------------------------------------------------------------

bench-step bench-memory bench-packing: $(DEMO)/corpus_text_document.idx
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) "transformers>=4.45"
	$(BIN)/python benchmarks/$(@:bench-%=%).py $(if $(filter bench-step,$@),--data $(DEMO))

bench-loss:
	$(BIN)/python benchmarks/loss.py

# The extensions under AddressSanitizer and UndefinedBehaviorSanitizer, in a build of its own.
asan: $(INSTALLED)
	MEGATRON_PACKED_SANITIZE=1 $(BIN)/python setup.py --quiet build_ext \
	    --build-lib build/asan --build-temp build/asan-temp --force
	ASAN_OPTIONS=detect_leaks=0 LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libstdc++.so)" \
	    MEGATRON_PACKED_EXTENSION_DIR=build/asan $(BIN)/python -m pytest tests/unit/packing \
	    tests/unit/attention/test_tiles.py tests/unit/attention/test_kernels.py

clean:
	rm -rf $(VENV) $(DEMO) build *.egg-info megatron/packed/*.so .pytest_cache .hypothesis
