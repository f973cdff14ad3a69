"""Size and density of Python code, counted in tokens without comments and docstrings."""

import ast
import io
import tokenize
from collections import Counter
from dataclasses import dataclass

NO_CODE = "COMMENT NL NEWLINE INDENT DEDENT ENDMARKER".split()
HAS_DOCSTRING = ast.FunctionDef | ast.ClassDef | ast.Module
BLOCK = ast.FunctionDef | ast.ClassDef | ast.If | ast.For | ast.While | ast.With | ast.Try


@dataclass
class Density:
    tokens: int
    mean: float  # tokens per line that has code
    p90: int  # that nine of ten lines do not exceed
    longest: int  # tokens of the longest line
    long_statements: float  # share of statements with more than 25 tokens


def code_tokens(source: str) -> list[tokenize.TokenInfo]:
    """All tokens but comments, docstrings, line ends and indents. An f-string is one token, as it
    is before Python 3.12."""
    docstrings = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, HAS_DOCSTRING) and ast.get_docstring(node):
            docstring = node.body[0]
            docstrings.update(range(docstring.lineno, docstring.end_lineno + 1))
    found = []
    depth = 0  # in f-strings
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        name = tokenize.tok_name[token.type]
        if name == "FSTRING_END":
            depth -= 1
        is_code = name not in NO_CODE and token.start[0] not in docstrings
        if is_code and depth == 0 and name != "FSTRING_END":
            found.append(token)
        if name == "FSTRING_START":
            depth += 1
    return found


def measure(source: str) -> Density:
    tokens = code_tokens(source)
    counts = sorted(Counter(token.start[0] for token in tokens).values())
    sizes = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt) and not isinstance(node, BLOCK):
            begin = (node.lineno, node.col_offset)
            end = (node.end_lineno, node.end_col_offset)
            sizes.append(sum(begin <= token.start < end for token in tokens))
    return Density(
        tokens=len(tokens),
        mean=len(tokens) / len(counts),
        p90=counts[int(0.9 * len(counts))],
        longest=counts[-1],
        long_statements=sum(size > 25 for size in sizes) / len(sizes),
    )
