# Every target sets up .venv first (scripts/setup_venv.sh does nothing when it is up to date).
PY := .venv/bin/python

.PHONY: setup train test test-compat lint mutants bench bench-planner reproduce scale clean

setup:
	@scripts/setup_venv.sh

train: setup
	@$(PY) scripts/train_demo.py

test: setup lint
	@$(PY) -m pytest -q

test-compat: setup
	@scripts/test_compat.sh

lint: setup
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/mypy megatron_fssdp pretrain_gpt.py
	@.venv/bin/mypy scripts
	@.venv/bin/mypy benchmarks

# Faults put in on purpose: each must make a test fail.
mutants: setup
	@$(PY) -m tests.mutants

bench: setup
	@$(PY) benchmarks/layer.py
	@$(PY) benchmarks/nothing_to_gain.py
	@$(PY) benchmarks/copies.py
	@$(PY) benchmarks/etp.py
	@$(PY) benchmarks/resharding.py
	@$(PY) benchmarks/recording.py
	@$(PY) benchmarks/fidelity.py
	@$(PY) benchmarks/simulator_time.py
	@$(PY) benchmarks/recording.py

reproduce: setup
	@$(PY) benchmarks/reproduce.py

scale: setup
	@$(PY) benchmarks/scale.py

bench-planner: setup
	@$(PY) benchmarks/planner.py

clean:
	rm -rf .venv build runs .cache *.egg-info
