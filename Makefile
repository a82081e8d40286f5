# Another Python: make PYTHON=python3.12 test
PYTHON ?= python3
WORKERS ?= 2
# How many processes share the GPU tests, and what to tell them, as in GPU_OPTIONS="--on cpu".
SHARES ?= 6
GPU_OPTIONS ?=

BIN := .venv/bin
# Two stamps: .venv with what the demo needs, and with what the tests need. Both carry the name of
# the requested Python, so that another one rebuilds .venv.
READY := .venv/ready-$(notdir $(PYTHON))
COMPLETE := .venv/complete-$(notdir $(PYTHON))
# Python compiles what is imported, once; pip would compile all there is, for minutes.
INSTALL := $(BIN)/python -m pip install --no-compile --progress-bar off --constraint constraints.txt
unexport PYTHONDONTWRITEBYTECODE
# torch without CUDA, a tenth of the size; the package index has it for some machines only.
CPU_TORCH := https://download.pytorch.org/whl/cpu

# What takes longest to compile of all that the tests import.
PEERS := import torch._dynamo, torch._inductor.compile_fx, torch.distributed.checkpoint, transformers, \
	sentence_transformers, peft, lancedb, sklearn.linear_model, matplotlib.figure, onnxruntime, ray.data

SENTENCE := Всем привет! Я увлекаюсь искусственным интеллектом

.DEFAULT_GOAL := help
.PHONY: help demo explain quick test fuzz studies bench gpu-test docs format clean check-python

help: ## list what can be made
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' Makefile | expand -t 16

demo: $(READY) ## look at the heads of the small model: a table, pictures and a report in runs/demo
	@mkdir -p runs/demo
	@$(BIN)/manyheads report house-gpt --file docs/demo.txt -o runs/demo/report.html --pictures runs/demo
	@echo
	@echo "Open runs/demo/report.html in a browser. Then type a text of your own and switch heads off:"
	@echo
	@echo "    $(BIN)/manyheads studio house-gpt"

explain: $(READY) ## walk a sentence through one layer, write multi_head_attention_map.png
	$(BIN)/manyheads explain "$(SENTENCE)" --language ru --picture multi_head_attention_map.png

quick: $(COMPLETE) ## check format, lint and types, run the tests nearest to what changed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python -m tests.lanes --changed --lanes $(WORKERS)

test: $(COMPLETE) ## check format, lint and types, run tests and doctests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python -m tests.lanes --lanes $(WORKERS)

# COUNT and SEED choose the cases: make fuzz COUNT=500 SEED=7
COUNT ?= 10000
SEED ?= 0
fuzz: $(COMPLETE) ## attack files, arguments, kernels, statistics and training; count how it ends
	PYTHONPATH=src:. $(BIN)/python -m tests.fuzz --count $(COUNT) --seed $(SEED) --workers $(WORKERS)

studies: $(READY) ## run the quick version of every study, into runs/studies
	PYTHONPATH=src:. $(BIN)/python -m studies.run all --quick --workers $(WORKERS) --out runs/studies

bench: $(READY) ## run every row of docs/comparison.md that this machine can
	@$(INSTALL) --editable '.[bench]'
	@$(INSTALL) --no-deps tracr-pypi
	$(BIN)/python bench/readme_table.py

# No .venv and no network: a machine with an accelerator brings its own torch and pytest, often of
# other versions than ours, so that their warnings are shown and do not fail the run. Compiling takes
# most of the time, so the tests run in shares side by side, each on two threads; each leaves its log
# in build/gpu.
gpu-test: ## run tests/gpu with the torch and pytest that PYTHON has
	@mkdir -p build/gpu && rm -f build/gpu/*; failed=0; running=""; \
	for share in $$(seq $(SHARES)); do \
	  OMP_NUM_THREADS=2 PYTHONPATH=src $(PYTHON) -m pytest tests/gpu -q -p no:cacheprovider -o filterwarnings=default \
	    --show-capture=no --tb=short --share $$share/$(SHARES) $(GPU_OPTIONS) \
	    --ledger build/gpu/$$share.json > build/gpu/$$share.log 2>&1 & running="$$running $$!"; \
	done; \
	for process in $$running; do wait $$process || failed=1; done; \
	grep -hE '^(E  |FAILED|ERROR)|(passed|failed|error).* in |^Exit:' build/gpu/*.log | cut -c1-300 | uniq; \
	test -n "$$(ls build/gpu/*.json 2>/dev/null)" && $(PYTHON) tests/gpu/ledger.py build/gpu/*.json; \
	exit $$failed

docs: $(READY) ## build the docs in build/site
	@$(INSTALL) --editable '.[docs]'
	$(BIN)/mkdocs build

format: $(COMPLETE) ## put every file into the house format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## remove .venv, caches and what the demo wrote
	rm -rf .venv build dist src/*.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	rm -f multi_head_attention_map.png
	rm -rf runs/demo
	find src tests bench -name __pycache__ -prune -exec rm -rf {} +

# A stamp is written last, so that the next make resumes an interrupted installation.
# torch goes first, so that nothing else decides which torch it is.
$(READY): pyproject.toml constraints.txt
	@$(MAKE) --no-print-directory check-python
	@rm -f .venv/ready-* .venv/complete-*
	@test "$$($(BIN)/python --version 2>&1)" = "$$($(PYTHON) --version 2>&1)" || rm -rf .venv
	@echo "[1/3] creating .venv; two more steps download torch and 0.2 GB of other packages"
	@$(PYTHON) -m venv .venv
	@index=""; size="0.2 GB"; \
	if [ "$$(uname -s)" = Linux ]; then \
	  if command -v nvidia-smi >/dev/null || [ -e /dev/nvidia0 ]; then size="with CUDA, 3 GB"; \
	  elif $(BIN)/python -c 'import urllib.request as web; web.urlopen("$(CPU_TORCH)/torch/", timeout=5)' 2>/dev/null; \
	  then index="--extra-index-url $(CPU_TORCH)"; size="the build without CUDA, as there is no GPU, 0.2 GB"; \
	  else size="0.2 GB, or 3 GB with CUDA if your package index has no other: $(CPU_TORCH) cannot be reached"; fi; fi; \
	echo "[2/3] installing torch ($$size)"; \
	$(INSTALL) $$index torch
	@echo "[3/3] installing manyheads and its studio"
	@$(INSTALL) --editable '.[studio]'
	@touch $@

$(COMPLETE): $(READY)
	@echo "installing what the tests need"
	@$(INSTALL) --editable '.[test]'
	@$(INSTALL) --no-deps tracr-pypi
	@echo "compiling what the tests import"
	@$(BIN)/python -W ignore -c "$(PEERS)" || true
	@touch $@

check-python:
	@command -v $(PYTHON) >/dev/null || { \
	  echo "PYTHON=$(PYTHON) is not a command here, and manyheads needs Python 3.11 or newer:" \
	       "install it, or name the one you have, as in 'make PYTHON=python3.12 test'." >&2; \
	  exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "$(PYTHON) is $$($(PYTHON) --version 2>&1), and manyheads needs Python 3.11 or newer:" \
	       "name a newer one, as in 'make PYTHON=python3.12 test'." >&2; \
	  exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "$(PYTHON) has no venv or ensurepip module, and .venv cannot be built without them:" \
	       "install them (Debian and Ubuntu: apt install python3-venv)." >&2; \
	  exit 1; }
