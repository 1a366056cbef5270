# SPDX-License-Identifier: Apache-2.0

"""Look at loads and planners without a cluster. Imports `planning` only."""
