"""Look at loads and planners without a cluster. Imports `planning` only."""
