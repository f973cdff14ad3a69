"""pytest's options that take a path, known so early that it is not taken for one of tests."""

from typing import Any


def pytest_addoption(parser: Any) -> None:
    """Registers --golden DIR and --script FILE; conftest.py uses them."""
    parser.addoption("--golden", help="folder with recorded arrays to replay")
    text = "a copy of a script: run the tests that hold for it, or those that are named"
    parser.addoption("--script", help=text)
