#!/usr/bin/env bash
# Run the tests of tests/integration on other releases of megatron-core than .venv's.
# Usage: scripts/test_compat.sh [VERSION ...] [-- ARGUMENTS OF PYTEST]
#   scripts/test_compat.sh                                  # all of `versions`, all tests
#   scripts/test_compat.sh 0.17.1                           # one release
#   scripts/test_compat.sh 0.17.1 0.18.2 -- tests/integration/test_edges.py -k alltoall
set -euo pipefail
cd "$(dirname "$0")/.."

# All releases on PyPI that setup.py allows, but .venv's own (make test).
versions=(0.17.0 0.17.1 0.18.0 0.18.2 0.19.0)

# One environment a release, in .cache/compat. Its own is megatron-core alone, some megabytes; all
# else are links to .venv's packages, of which torch has gigabytes. Links, and not a .pth file that
# names .venv's folder: `megatron` is a namespace package, and what a release lacks would be found
# in .venv's. This package is the checkout itself.
make_environment() { # VERSION FOLDER
    local version=$1 folder=$2 package packages
    echo "test_compat: making $folder" >&2
    .venv/bin/python -m venv --clear --without-pip "$folder"
    .venv/bin/pip --disable-pip-version-check --python "$folder/bin/python" install --quiet \
        --no-deps "megatron-core==$version"
    packages=$(echo "$folder"/lib/python3*/site-packages)
    for package in .venv/lib/python3*/site-packages/*; do
        case ${package##*/} in
            megatron* | __editable__* | __pycache__ | pip | pip-*) ;;
            *) ln -s "$PWD/$package" "$packages" ;;
        esac
    done
    # The Python part of Transformer Engine, for tests/te_stub.
    ln -s "$PWD/.venv/te" "$folder/te"
    echo "$PWD" >"$packages/megatron_fssdp.pth"
}

if [[ ! -f .venv/.requirements.sha256 ]]; then
    echo "test_compat: there is no .venv to take packages from; run make setup first" >&2
    exit 1
fi
chosen=()
while (($# > 0)) && [[ $1 != -- ]]; do
    chosen+=("$1")
    shift
done
((${#chosen[@]} == 0)) || versions=("${chosen[@]}")
tests=("${@:2}")
((${#tests[@]} > 0)) || tests=(tests/integration)

failed=()
for version in "${versions[@]}"; do
    folder=.cache/compat/$version
    # Made anew when .venv was.
    stamp=$(cat .venv/.requirements.sha256 scripts/test_compat.sh | sha256sum)
    if [[ ! -f $folder/stamp || $(<"$folder/stamp") != "$stamp" ]]; then
        make_environment "$version" "$folder"
        echo "$stamp" >"$folder/stamp"
    fi
    echo "== megatron-core $version" >&2
    "$folder/bin/python" -m pytest -q "${tests[@]}" || failed+=("$version")
done
if ((${#failed[@]} > 0)); then
    echo "test_compat: failed with megatron-core ${failed[*]}" >&2
    exit 1
fi
echo "test_compat: passed with megatron-core ${versions[*]}" >&2
