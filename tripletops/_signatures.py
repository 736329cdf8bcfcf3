"""The signatures and docstrings of public functions and modules, made of `_words`.

`functional` and `nn` give them to what they make, so that `help()` and editors show every option with its
default and its meaning; the type stub `__init__.pyi` is written from them too.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator
from typing import NamedTuple

from tripletops._words import DISTANCE, FUNCTION, LOSS, OBJECTIVE, Choice, Function, Number

WIDTH = 110


class Argument(NamedTuple):
    """An argument of a function or of a module."""

    name: str
    type: str  # as a stub has it
    doc: str
    default: object = inspect.Parameter.empty
    positional: bool = False

    def parameter(self) -> inspect.Parameter:
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD if self.positional else inspect.Parameter.KEYWORD_ONLY
        return inspect.Parameter(self.name, kind, default=self.default, annotation=self.type)


_BATCH = (
    Argument(
        "emb",
        "Tensor",
        "(N, D) embeddings, one row an anchor; float16, bfloat16, float32 or float64, any strides. Half "
        "precision is computed in float32, and the gradient comes in the type of ``emb``. Rows are not "
        "normalised, but for the cosine.",
        positional=True,
    ),
    Argument("labels", "Tensor", "(N,) class ids of any integer dtype, any values.", positional=True),
)
_DRAWS = (
    Argument(
        "generator",
        "Generator | None",
        "where the seed of the random rules is drawn from, one draw a call; None: torch's global generator. "
        "Eager mode only.",
        None,
    ),
    Argument(
        "seed",
        "int | Tensor | None",
        "the seed itself, an int or an int64 tensor with one element, instead of ``generator``. The same "
        "seed gives the same picks on every backend. It is not used where no rule is random.",
        None,
    ),
)
_ROWS = (
    Argument(
        "ref_emb",
        "Tensor | None",
        "(M, D) rows to pick positives and negatives from, which receive gradients too; None: from ``emb``, "
        "where a row is never its own positive. If the float types differ, both are promoted.",
        None,
    ),
    Argument("ref_labels", "Tensor | None", "(M,) the class ids of ``ref_emb``.", None),
    Argument(
        "self_index",
        "Tensor | None",
        "(N,) integers, the position of each anchor inside ``ref_emb``, which is then neither its positive "
        "nor its negative; −1: not in there.",
        None,
    ),
)
_IGNORE_LABEL = Argument(
    "ignore_label",
    "int | None",
    "rows with this label are nobody's anchor, positive or negative, whatever they hold. (uint64 labels, "
    "and it with them, are read as int64 of the same 64 bits.)",
    None,
)
_BACKEND = Argument(
    "backend",
    "str | None",
    '``"cpu"``, ``"triton"`` or ``"reference"``; None: what the environment variable TRIPLETOPS_BACKEND '
    "said at import, else the one made for the device. See `tripletops.backends`.",
    None,
)
_CLASSES = Argument(
    "classes",
    "int | None",
    "how many classes have a number of their own, for labels from 0 to classes − 1; None: one for all.",
    None,
    positional=True,
)

_LOSS_RETURNS = """\
A scalar, or (N,) for ``reduction="none"``; float32, or float64 for float64 embeddings. Differentiable
once, in ``emb`` and ``ref_emb``, by autograd; forward mode, the transforms of torch.func and
torch.jit.trace are refused. (``backend="reference"`` has derivatives of any order, by forward mode
and torch.func too.) NaN, and so is every gradient, where a row that is not ignored is not finite."""
_MINE_RETURNS = """\
`Triplets`, −1 and NaN standing for none: everywhere, if a row that is not ignored is not finite."""


def row_arguments(function: Function) -> tuple[Argument, ...]:
    """What a module is called with, beside the batch."""
    return (*_ROWS, *_DRAWS) if function.draws else _ROWS


def call_arguments(function: Function) -> tuple[Argument, ...]:
    """What a module is called with."""
    return (*_BATCH, *row_arguments(function))


def options(function: Function) -> tuple[Argument, ...]:
    """What a module is made with."""
    flag = function.flag
    return (
        *(_option(function, option) for option in function.options()),
        *(() if flag is None else (Argument(flag.name, "bool", f"{flag.doc}.", False),)),
        _IGNORE_LABEL,
        _BACKEND,
    )


def arguments(function: Function) -> tuple[Argument, ...]:
    """All arguments of a function."""
    learned = OBJECTIVE[function.objective].learned
    tensors = (
        () if learned is None else (Argument(learned.name, "float | Tensor", learned.doc, positional=True),)
    )
    return (*_BATCH, *tensors, *options(function), *row_arguments(function))


def module_arguments(function: Function) -> tuple[Argument, ...]:
    """All arguments of a module's constructor."""
    learned = OBJECTIVE[function.objective].learned
    if learned is None:
        return options(function)
    start = Argument(learned.name, "float", f"where {learned.name} starts.", learned.start, positional=True)
    return (start, _CLASSES, *options(function))


def signature(given: tuple[Argument, ...]) -> inspect.Signature:
    return inspect.Signature([argument.parameter() for argument in given])


def unexpected(function: Function, called: str, name: str, known: tuple[Argument, ...]) -> str:
    """What to say of a keyword argument that a function, or a module, does not take."""
    if name == DISTANCE.option and OBJECTIVE[function.objective].cosine:
        return f"{called} takes no {name}: it is defined on the cosine similarity"
    names = ", ".join(argument.name for argument in known)
    return f"{called} got an unexpected keyword argument {name!r}; its arguments are {names}"


def returns_count(function: Function) -> bool:
    """Whether the function can return how many terms are active, beside the loss."""
    return function.flag is not None and function.flag.name == "return_active"


def given_twice(called: str, name: str) -> str:
    return f"{called} got {name} twice, by position and by keyword"


def docstring(function: Function) -> str:
    returns = _MINE_RETURNS if function.name == "mine" else _LOSS_RETURNS
    if returns_count(function):
        returns += "\nWith ``return_active=True``, a pair of that and the count, an int64 scalar."
    parts = [
        function.doc,
        function.text,
        f"Args:\n{_listed(arguments(function))}",
        f"Returns:\n{_indented(returns)}",
    ]
    return "\n\n".join(parts) + "\n"


def module_docstring(function: Function) -> str:
    parts = [
        f"`tripletops.{function.name}` as a module: options are attributes, a batch goes to the call.",
        function.doc,
        function.text,
        f"Args:\n{_listed(module_arguments(function))}",
    ]
    return "\n\n".join(parts) + "\n"


def described(function: Function, option: Choice | Number) -> str:
    """What an option of a function means, in a sentence or two."""
    if isinstance(option, Number):
        allowed = option.range.text.removesuffix(", or None for no limit")
        return f"{option.doc}; {option.unit}, {allowed}."
    if option.doc:
        return f"{option.doc}."
    words = ", ".join(_described_word(option, word) for word in option.words)
    if option.table is DISTANCE:
        words += "; None: euclidean" + (", or cosine for the losses that are defined on S" * _on_s(function))
    return f"{words}."


def _on_s(function: Function) -> bool:
    """Whether some loss that a caller may choose is defined on the cosine similarity alone."""
    losses = (choice for choice in function.choices if choice.table is LOSS)
    return any(LOSS[word].cosine for choice in losses for word in choice.words)


def _described_word(choice: Choice, name: str) -> str:
    word = choice.table[name]
    return f'``"{name}"`` {word.doc}' + (f" ({word.paper})" if word.paper else "")


def _option(function: Function, option: Choice | Number) -> Argument:
    default: object = option.default
    if isinstance(option, Number):
        kind = "float" if option.none is None else "float | None"
    else:
        kind = "str | None" if option.default is None and not option.required else "str"
        if option.required:
            default = inspect.Parameter.empty
    return Argument(option.name, kind, described(function, option), default)


def _listed(given: tuple[Argument, ...]) -> str:
    return "\n".join(
        textwrap.fill(
            f"{argument.name}: {argument.doc}",
            WIDTH,
            initial_indent=" " * 4,
            subsequent_indent=" " * 8,
            break_on_hyphens=False,
        )
        for argument in given
    )


def _indented(text: str) -> str:
    return textwrap.indent(text, " " * 4)


def stub() -> Iterator[str]:
    """The lines that declare the public functions, for `__init__.pyi`."""
    for function in FUNCTION.values():
        if not returns_count(function):
            yield from _declared(function, "Triplets" if function.name == "mine" else "Tensor")
            continue
        for flag, returns in (("Literal[False] = ...", "Tensor"), ("Literal[True]", "tuple[Tensor, Tensor]")):
            yield "@overload"
            yield from _declared(function, returns, {"return_active": flag})


def _declared(function: Function, returns: str, replaced: dict[str, str] | None = None) -> Iterator[str]:
    yield f"def {function.name}("
    given = arguments(function)
    for place, argument in enumerate(given):
        if place and given[place - 1].positional and not argument.positional:
            yield "    *,"
        default = "" if argument.default is inspect.Parameter.empty else f" = {_literal(argument.default)}"
        yield f"    {argument.name}: {(replaced or {}).get(argument.name, argument.type + default)},"
    yield f") -> {returns}: ..."


def _literal(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)
