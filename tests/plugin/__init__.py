"""pytest's option --golden, known so early that a folder elsewhere is not taken for one of tests."""

from typing import Any


def pytest_addoption(parser: Any) -> None:
    """Register --golden DIR; conftest.py uses it."""
    parser.addoption("--golden", help="folder with recorded arrays to replay")
