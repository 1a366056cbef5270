from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from scripts.make_corpus import (
    DOMAINS,
    END_OF_DOCUMENT,
    MAX_DOCUMENT_BYTES,
    write_corpus,
    write_domain,
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_corpus(tmp_path_factory.mktemp("corpus"), max_bytes_per_domain=60_000)


def test_documents_are_text_that_ends_once(corpus: dict[str, Path]) -> None:
    assert set(corpus) == set(DOMAINS)
    for prefix in corpus.values():
        dataset = IndexedDataset(str(prefix))
        assert len(dataset) == len(dataset.document_indices) - 1 >= 8
        assert 60_000 <= sum(dataset.sequence_lengths) <= 60_001
        for document in dataset[0 : len(dataset)]:
            assert document.dtype == np.uint16
            assert 1 < len(document) <= MAX_DOCUMENT_BYTES + 1
            assert document[-1] == END_OF_DOCUMENT
            assert document[:-1].max() < 256


def test_domains_differ(corpus: dict[str, Path]) -> None:
    """Half the total variation distance of byte frequencies; one text cut in two has 0.05."""
    frequencies = {}
    for name, prefix in corpus.items():
        tokens = np.fromfile(f"{prefix}.bin", dtype=np.uint16)
        frequencies[name] = np.bincount(tokens, minlength=257) / len(tokens)
    for name, frequency in frequencies.items():
        for other, other_frequency in frequencies.items():
            if name < other:
                assert np.abs(frequency - other_frequency).sum() / 2 > 0.08, (name, other)


def test_same_bytes_every_time(corpus: dict[str, Path], tmp_path: Path) -> None:
    again = write_corpus(tmp_path, max_bytes_per_domain=60_000)
    for name, prefix in corpus.items():
        for suffix in (".bin", ".idx"):
            first, second = Path(f"{prefix}{suffix}"), Path(f"{again[name]}{suffix}")
            assert first.read_bytes() == second.read_bytes()


def test_an_empty_domain_is_refused_and_leaves_no_dataset(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no text for the domain 'none'"):
        write_domain(iter([]), tmp_path / "none", 1000)
    assert not list(tmp_path.glob("none.*"))
