# SPDX-License-Identifier: Apache-2.0

"""Write a small corpus of real text, found on every Python installation, for Megatron.

Usage: python scripts/make_corpus.py OUTPUT_DIR [--max-bytes-per-domain N]

One Megatron dataset (.bin and .idx) per domain, so that domains can be blended or shifted with
`--data-path`. Tokens are bytes: train with `--tokenizer-type NullTokenizer --vocab-size 257`,
whose last id, 256, ends each document. The text is the standard library of the Python that runs
this, so the same Python writes the same bytes.

    domain      texts
    docs        the language reference's topics (pydoc_data): prose with examples
    docstrings  the docstrings of each module: English about code
    network     asyncio, email, http, urllib, xmlrpc and their like: code that speaks protocols
    markup      html, xml, ctypes, sqlite3, tkinter and their like: code against outside systems
    tables      character maps (encodings) and entity lists: long, regular tables
    tools       argparse, unittest, logging, pdb and their like: code about programs
"""

import argparse
import ast
import importlib
import sysconfig
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

END_OF_DOCUMENT = 256
VOCAB_SIZE = 257
DEFAULT_MAX_BYTES = 600_000
# Long files become several documents: Megatron shuffles whole documents, and loops for ever over
# a validation split that gets none.
MAX_DOCUMENT_BYTES = 8_192

STDLIB = Path(sysconfig.get_paths()["stdlib"])

CODE = {
    "network": (
        "asyncio/*.py email/*.py http/*.py urllib/*.py xmlrpc/*.py wsgiref/*.py ftplib.py"
        " imaplib.py smtplib.py poplib.py socketserver.py ssl.py"
    ),
    "markup": (
        "html/parser.py xml/*/*.py ctypes/**/*.py sqlite3/*.py tkinter/*.py plistlib.py csv.py"
        " configparser.py zipfile/*.py tarfile.py gzip.py"
    ),
    "tables": "encodings/*.py html/entities.py stringprep.py token.py opcode.py mimetypes.py",
    "tools": (
        "argparse.py optparse.py unittest/*.py doctest.py logging/*.py pdb.py bdb.py dis.py"
        " inspect.py ast.py typing.py dataclasses.py functools.py turtle.py"
    ),
}


def documents_of_topics() -> Iterator[str]:
    """Yield the language reference, one topic a document."""
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    for name in sorted(topics):
        yield topics[name]


def documents_of_docstrings() -> Iterator[str]:
    """Yield every module's docstrings, joined, one module a document."""
    for path in sorted(STDLIB.glob("*.py")):
        tree = ast.parse(path.read_bytes())
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        nodes = [node for node in ast.walk(tree) if isinstance(node, kinds)]
        texts = [text for node in nodes if (text := ast.get_docstring(node))]
        if texts:
            yield "\n\n".join(texts)


def documents_of_files(patterns: str) -> Iterator[str]:
    """Yield the standard library's files that match any of the patterns."""
    for pattern in patterns.split():
        for path in sorted(STDLIB.glob(pattern)):
            yield path.read_text(encoding="utf-8", errors="replace")


DOMAINS: dict[str, Callable[[], Iterator[str]]] = {
    "docs": documents_of_topics,
    "docstrings": documents_of_docstrings,
    **{name: partial(documents_of_files, patterns) for name, patterns in CODE.items()},
}


def split_documents(texts: Iterator[str]) -> Iterator[bytes]:
    """Yield the texts as bytes, in pieces of at most MAX_DOCUMENT_BYTES."""
    for text in texts:
        data = text.encode()
        for start in range(0, len(data), MAX_DOCUMENT_BYTES):
            yield data[start : start + MAX_DOCUMENT_BYTES]


def write_domain(texts: Iterator[str], prefix: Path, max_bytes: int) -> tuple[int, int]:
    """Write texts as one Megatron dataset, cut off at `max_bytes` tokens.

    Both files get their final names only when they are complete.

    Returns:
        the number of documents and the number of tokens.

    Raises:
        RuntimeError: this Python has no such texts.
    """
    dtype = DType.optimal_dtype(VOCAB_SIZE)
    documents, num_tokens = [], 0
    for document in split_documents(texts):
        text = np.frombuffer(document[: max_bytes - num_tokens], dtype=np.uint8)
        documents.append(np.append(text.astype(dtype), dtype(END_OF_DOCUMENT)))
        num_tokens += len(documents[-1])
        if num_tokens >= max_bytes:
            break
    if not documents:
        raise RuntimeError(
            f"no text for the domain {prefix.name!r} under {STDLIB}; install the full standard "
            "library (on Debian: apt-get install libpython3-stdlib)."
        )
    unfinished = prefix.with_name(prefix.name + ".partial")
    builder = IndexedDatasetBuilder(f"{unfinished}.bin", dtype=dtype)
    for tokens in documents:
        builder.add_document(tokens, [len(tokens)])
    builder.finalize(f"{unfinished}.idx")
    for suffix in (".bin", ".idx"):
        Path(f"{unfinished}{suffix}").replace(f"{prefix}{suffix}")
    return len(documents), num_tokens


def write_corpus(folder: Path, max_bytes_per_domain: int = DEFAULT_MAX_BYTES) -> dict[str, Path]:
    """Write every domain.

    Returns:
        the path prefix of each domain, as `--data-path` takes it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    prefixes = {}
    for name, documents in DOMAINS.items():
        prefixes[name] = folder / name
        counts = write_domain(documents(), prefixes[name], max_bytes_per_domain)
        print(f"corpus: {name:<10} {counts[0]:>4} documents {counts[1]:>8} tokens", flush=True)
    return prefixes


def main() -> None:
    """Read the command line and write the corpus."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="where the datasets go")
    parser.add_argument("--max-bytes-per-domain", type=int, default=DEFAULT_MAX_BYTES)
    args = parser.parse_args()
    write_corpus(args.folder, args.max_bytes_per_domain)


if __name__ == "__main__":
    main()
