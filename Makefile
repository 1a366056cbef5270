# Every target sets up .venv first (scripts/setup_venv.sh does nothing when it is up to date).
PY := .venv/bin/python

.PHONY: setup train test lint bench bench-planner reproduce scale clean

setup:
	@scripts/setup_venv.sh

train: setup
	@$(PY) scripts/train_demo.py

test: setup lint
	@$(PY) -m pytest -q

lint: setup
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/mypy megatron_fssdp pretrain_gpt.py
	@.venv/bin/mypy scripts
	@.venv/bin/mypy benchmarks

bench: setup
	@$(PY) benchmarks/layer.py
	@$(PY) benchmarks/copies.py
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
