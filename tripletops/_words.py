"""Every word that a user says, with its meaning: the one place where each is written down.

Rules, distances, losses, reductions and objectives are words with codes; the numbers that go with them have
defaults and ranges. Checks, error messages, signatures, docstrings, modules, the C++ enums, Triton's
constants, the README's tables and the tests' parameters all come from here.

A leaf: it imports the standard library alone, so that setup.py can read it without torch.
"""

from __future__ import annotations

from collections import namedtuple
from math import inf
from typing import Any, NamedTuple


class Range(NamedTuple):
    """Which numbers a number may be."""

    text: str
    least: float
    strict: bool = False  # `least` itself is outside
    infinite: bool = False  # infinity is inside

    def holds(self, value: float) -> bool:
        """False for NaN."""
        above = value > self.least if self.strict else value >= self.least
        return above and (value < inf or self.infinite)


FROM_ZERO = Range("a finite number, 0 or greater", 0.0)
ABOVE_ZERO = Range("a finite number greater than 0", 0.0, strict=True)
FINITE = Range("a finite number", -inf, strict=True)
LIMIT = Range("a number greater than 0, or None for no limit", 0.0, strict=True, infinite=True)


class Number(NamedTuple):
    """A number that an option takes."""

    name: str
    default: float | None
    range: Range
    unit: str  # "distance", "a similarity", or what it is a factor of
    doc: str
    none: float | None = None  # the number that None stands for; None: None is refused


class Word(NamedTuple):
    """One of the words of an option. Its code is its place in the table."""

    name: str
    doc: str
    paper: str = ""  # the papers' name, or where it comes from
    numbers: tuple[Number, ...] = ()  # what else it needs to know
    draws: bool = False  # it needs a random seed
    cosine: bool = False  # it is defined on the cosine similarity alone
    needs_positive: bool = False  # it is defined by the positive that was picked
    rule: str = ""  # the rule that backends pick by, if it has another name


class Table(dict[str, Word]):
    """The words of one option, in the order of their codes."""

    def __init__(self, option: str, *words: Word) -> None:
        super().__init__((word.name, word) for word in words)
        self.option = option
        self.names = tuple(self)  # what callers may say
        self.coded = self.names  # by code: what backends know
        self.code = {name: code for code, name in enumerate(self.coded)}


MARGIN = Number(
    "margin", 0.2, FROM_ZERO, "a distance", "how much farther than the positive a negative has to be"
)
TEMPERATURE = Number("temperature", 1.0, ABOVE_ZERO, "a similarity", "τ, which similarities are divided by")
CUTOFF = Number(
    "cutoff", 0.5, ABOVE_ZERO, "a distance of unit rows", "a smaller distance d counts as this one"
)
NONZERO_LOSS_CUTOFF = Number(
    "nonzero_loss_cutoff",
    1.4,
    LIMIT,
    "a distance of unit rows",
    "a negative at this distance d or beyond has weight 0; None: there is no such limit",
    none=inf,
)

OFFSET = Number(
    "offset",
    0.0,
    FINITE,
    "a distance",
    "how much farther than the picked positive a negative has to be to be picked; below 0 it may be nearer",
)

SCT_WEIGHT = Number("sct_weight", 1.0, FROM_ZERO, "a factor", "what S_an is multiplied by where S_an > S_ap")

POSITIVE = Table(
    "positive",
    Word("hard", "the farthest positive", "HP"),
    Word("easy", "the nearest positive", "EP, EPS"),
    Word("random", "a uniform positive", draws=True),
    Word(
        "softhard",
        "a uniform one of the positives farther than the nearest negative, whichever is picked; none such: "
        "a uniform positive",
        "semi-hard positives",
        draws=True,
    ),
    Word("all", "every positive"),
)
NEGATIVE = Table(
    "negative",
    Word("hard", "the nearest negative", "HN"),
    Word(
        "semihard",
        "the nearest negative strictly farther than the picked positive, if there is one",
        "SHN",
        needs_positive=True,
        rule="beyond",  # whose offset is 0 then
    ),
    Word(
        "beyond",
        "the nearest negative strictly farther than d_ap + offset, if there is one: below 0 likely "
        "mislabelled negatives are spared, above 0 near-ties are left out",
        "false-negative guards",
        (OFFSET,),
        needs_positive=True,
    ),
    Word(
        "softhard",
        "a uniform one of the negatives nearer than the farthest positive, whichever is picked; none such: "
        "a uniform negative",
        draws=True,
    ),
    Word("easy", "the farthest negative", "EN"),
    Word("random", "a uniform negative", draws=True),
    Word(
        "distance",
        "a negative drawn by inverse distance density on the sphere: by the weight "
        "d^(2−D)·(1−d²/4)^((3−D)/2) with d = √(2−2S); where all weights are 0, a uniform one",
        "Sampling Matters in Deep Embedding Learning",
        (CUTOFF, NONZERO_LOSS_CUTOFF),
        draws=True,
    ),
    Word("all", "every negative"),
)
DISTANCE = Table(
    "distance",
    Word("euclidean", "‖x−y‖"),
    Word("sqeuclidean", "‖x−y‖²"),
    Word("cosine", "1−S, S being the cosine similarity"),
)
LOSS = Table(
    "loss",
    Word("margin", "[d_ap − d_an + margin]₊", "FaceNet; In Defense of the Triplet Loss", numbers=(MARGIN,)),
    Word("soft_margin", "softplus(d_ap − d_an)", "In Defense of the Triplet Loss"),
    Word(
        "first_order",
        "softplus((S_an − S_ap)/τ)",
        "NCA on one triplet; L1st of Extreme Triplet Learning",
        (TEMPERATURE,),
        cosine=True,
    ),
    Word(
        "second_order",
        "softplus((½S_an² − S_ap + ½S_ap²)/τ)",
        "L2nd of Extreme Triplet Learning",
        (TEMPERATURE,),
        cosine=True,
    ),
    Word(
        "sct",
        "`first_order` where S_an ≤ S_ap, else sct_weight·S_an: the contrast alone",
        "Hard Negative Examples are Hard, but Useful",
        (TEMPERATURE, SCT_WEIGHT),
        cosine=True,
    ),
)
REDUCTION = Table(
    "reduction",
    Word("mean", "the mean over all terms"),
    Word("mean_nonzero", "the mean over the terms above 0, and 0 if there are none"),
    Word("sum", "the sum of all terms"),
    Word("none", "(N,), the sum of each anchor's terms"),
)


class Choice(NamedTuple):
    """An option whose value is one of some words."""

    table: Table
    words: tuple[str, ...]
    default: str | None = None
    required: bool = False
    doc: str = ""  # replaces the words' own

    @property
    def name(self) -> str:
        return self.table.option


class Learned(NamedTuple):
    """A tensor of numbers that the objective itself learns, a number for all anchors or one for each
    class."""

    name: str
    start: float
    doc: str


class Flag(NamedTuple):
    """An option that is on or off, and off by default."""

    name: str
    doc: str


class Function(NamedTuple):
    """A public function: an objective with its options."""

    name: str
    objective: str
    module: str  # the name of the class in `nn`; empty: there is none
    doc: str  # the first line of its documentation
    text: str  # the rest of it
    choices: tuple[Choice, ...]
    numbers: tuple[Number, ...] = ()  # beside those of the words
    fixed: tuple[tuple[Table, str], ...] = ()  # words that are not for the caller to choose
    paper: str = ""
    flag: Flag | None = None

    def options(self) -> tuple[Choice | Number, ...]:
        """In the order of the signature: every choice is followed by the numbers of its words."""
        found: dict[str, Choice | Number] = {number.name: number for number in self.numbers}
        for choice in self.choices:
            found[choice.name] = choice
            for word in choice.words:
                for number in choice.table[word].numbers:
                    found.setdefault(number.name, number)
        return tuple(found.values())

    @property
    def draws(self) -> bool:
        """Whether some choice of words needs a random seed."""
        return any(choice.table[word].draws for choice in self.choices for word in choice.words)


class Objective(NamedTuple):
    """What is minimised. Its code is its place in OBJECTIVE."""

    name: str
    saved: tuple[str, ...] = ()  # what forward keeps for backward, a number each for every anchor
    learned: Learned | None = None
    cosine: bool = False  # it is defined on the cosine similarity alone


_ONE_POSITIVE = tuple(word for word in POSITIVE if word != "all")
_ONE_NEGATIVE = tuple(word for word in NEGATIVE if word != "all")
_DISTANCE = Choice(DISTANCE, DISTANCE.names)


def _reduction(terms: str, above_zero: str, anchor: str) -> Choice:
    return Choice(
        REDUCTION,
        REDUCTION.names,
        "mean",
        doc=f'``"mean"`` over {terms}, ``"mean_nonzero"`` over {above_zero} (none: 0), ``"sum"``, or '
        f'``"none"``: (N,), {anchor}',
    )


_OF_ANCHORS = _reduction("valid anchors", "those with a loss above 0", "with 0 for invalid anchors")
_OF_PAIRS = "the sum of the terms of each anchor"

OBJECTIVE: dict[str, Objective] = {
    objective.name: objective
    for objective in (
        Objective("triplet", saved=("d_ap", "d_an", "slope_ap", "slope_an")),
        Objective("batch_all"),
        Objective("semi_hard", saved=tuple(f"negative_{place}" for place in range(8))),
        Objective(
            "multi_similarity",
            saved=("nearest", "log_sum", "farthest", "positive_log_sum"),
            cosine=True,
        ),
        Objective("supcon", saved=("nearest", "log_sum"), cosine=True),
        Objective("info_nce", saved=("nearest", "log_sum", "slope_sum"), cosine=True),
        Objective("contrastive", saved=("d_ap", "d_an", "positive_terms", "negative_terms")),
        Objective(
            "beta_margin",
            saved=("d_ap", "d_an", "positive_terms", "negative_terms"),
            learned=Learned(
                "beta",
                1.2,
                "β, a number, a tensor () or a tensor (C,) with a number for each class, of which an anchor "
                "has its own class's: the labels of rows that are not ignored must then be in [0, C). A "
                "tensor of any of the float types receives a gradient in its own type.",
            ),
        ),
    )
}

_TRIPLET_TEXT = """\
A positive of an anchor is another row with its label (other by position: an exact duplicate is a
positive), a negative is a row with another label. An anchor without the one or the other is invalid: it
has no loss and no gradient and is not counted. With no valid anchor at all (N of 0 or 1, one class only,
M = 0, …) the loss is exactly 0, connected to the graph. A tie goes to the candidate that comes first.

The rules by the papers' names: hard+hard is batch-hard, HPHN (Hermans et al., "In Defense of the Triplet
Loss for Person Re-Identification"); easy+hard EPHN, easy+semihard EPSHN, easy+easy EPEN (Xuan et al.,
"Improved Embeddings with Easy Positive Triplet Mining"); an easy positive alone EPS ("Reducing Class
Collapse in Metric Learning with Easy Positive Sampling"); semihard is FaceNet's (Schroff et al.)."""

_BATCH_HARD_TEXT = """\
"In Defense of the Triplet Loss for Person Re-Identification", Hermans et al., equation 5:
``loss="margin"``, and its soft-margin form: ``loss="soft_margin"``. (The paper sums over the batch; here
that is ``reduction="sum"``.)"""

_EASY_POSITIVE_TEXT = """\
``negative="hard"`` is EPHN, ``negative="semihard"`` EPSHN, ``negative="easy"`` EPEN.
The default loss is equation 16 of "Extreme Triplet Learning: Effectively Optimizing Easy Positives and
Hard Negatives", on the cosine similarity; ``"first_order"`` is its equation 1, the loss of "Improved
Embeddings with Easy Positive Triplet Mining" (Xuan et al.). An easy positive leaves a class its
sub-clusters ("Reducing Class Collapse in Metric Learning with Easy Positive Sampling")."""

_BATCH_ALL_TEXT = """\
"In Defense of the Triplet Loss for Person Re-Identification", Hermans et al., equation 6. Its "batch all
(≠ 0)" is ``reduction="mean_nonzero"``."""

_SEMI_HARD_TEXT = """\
That is the nearest negative strictly farther than this positive or, where there is none, the farthest
negative: the rule of "FaceNet" (Schroff et al.) as TensorFlow's triplet_semihard_loss states it. The loss
of a pair is [d_ap − d_an + margin]₊. For one triplet per anchor, without a fallback, use `triplet_loss`
with ``negative="semihard"``."""

_MULTI_SIMILARITY_TEXT = """\
"Multi-Similarity Loss with General Pair Weighting for Deep Metric Learning", Wang et al., on the cosine
similarity S. The loss of an anchor is (1/α)·ln(1 + Σ_P e^(−α(S−λ))) + (1/β)·ln(1 + Σ_N e^(β(S−λ))), P and
N being what mining leaves of its positives and negatives: N the negatives with S above the smallest S of
a positive less ε, P the positives with S below the largest S of a negative plus ε. An empty sum is 0. An
anchor without a positive or without a negative has no loss."""

_SUPCON_TEXT = """\
"Supervised Contrastive Learning", Khosla et al., on the cosine similarity S. The loss of an anchor with
positives P is −(1/#P)·Σ_P [S_ap/τ − ln Σ_A e^(S/τ)], A being all candidates other than itself. An anchor
without a positive has no loss. A batch without any positive pair, or without any negative pair, has the
loss 0."""

_INFO_NCE_TEXT = """\
Also known as NT-Xent ("A Simple Framework for Contrastive Learning of Visual Representations", Chen et al.)
and N-pairs. On the cosine similarity S, the loss of a positive pair is
−ln(e^(S_ap/τ) / (e^(S_ap/τ) + Σ_N e^(S_an/τ))), N being all negatives of its anchor. A batch without any
positive pair, or without any negative pair, has the loss 0."""

_CONTRASTIVE_TEXT = """\
[d_ap − pos_margin]₊ of positive pairs and [neg_margin − d_an]₊ of negative pairs. "Dimensionality
Reduction by Learning an Invariant Mapping", Hadsell et al., squares both and adds them up; here each kind
has its own mean. Pairs stand alone: an anchor without a negative still has its positive pairs, and the
other way round. But a batch without any positive pair, or without any negative pair, has the loss 0."""

_BETA_MARGIN_TEXT = """\
"Sampling Matters in Deep Embedding Learning", Wu et al.: [d_ap − β + α]₊ of positive pairs
and [β − d_an + α]₊ of negative pairs, the negatives drawn by the inverse of the density that distances
have (``negative="distance"``). Pairs stand alone, as in `contrastive_loss`. The loss is NaN where a row
that is not ignored is not finite, or its β."""

FUNCTION: dict[str, Function] = {
    function.name: function
    for function in (
        Function(
            "triplet_loss",
            "triplet",
            "TripletLoss",
            "The loss of one triplet per anchor, its positive and its negative picked by rule.",
            _TRIPLET_TEXT,
            (
                Choice(POSITIVE, _ONE_POSITIVE, "hard"),
                Choice(NEGATIVE, _ONE_NEGATIVE, "hard"),
                Choice(LOSS, LOSS.names, "margin"),
                _DISTANCE,
                _OF_ANCHORS,
            ),
        ),
        Function(
            "batch_hard_loss",
            "triplet",
            "BatchHardLoss",
            "The batch-hard loss: every anchor with its farthest positive and its nearest negative (HPHN).",
            _BATCH_HARD_TEXT,
            (Choice(LOSS, LOSS.names, "margin"), _DISTANCE, _OF_ANCHORS),
            fixed=((POSITIVE, "hard"), (NEGATIVE, "hard")),
        ),
        Function(
            "easy_positive_loss",
            "triplet",
            "EasyPositiveLoss",
            "The easy-positive loss: every anchor with its nearest positive and, by default, its nearest "
            "negative.",
            _EASY_POSITIVE_TEXT,
            (
                Choice(NEGATIVE, _ONE_NEGATIVE, "hard"),
                Choice(LOSS, LOSS.names, "second_order"),
                _DISTANCE,
                _OF_ANCHORS,
            ),
            fixed=((POSITIVE, "easy"),),
        ),
        Function(
            "batch_all_loss",
            "batch_all",
            "BatchAllLoss",
            "The batch-all loss: every triplet of an anchor, a positive of it and a negative of it.",
            _BATCH_ALL_TEXT,
            (
                Choice(LOSS, ("margin", "soft_margin"), "margin"),
                _DISTANCE,
                _reduction(
                    "all triplets",
                    "the active ones, those with a loss above 0",
                    "the sum over the triplets of each anchor",
                ),
            ),
            paper="In Defense of the Triplet Loss",
            flag=Flag("return_active", "also return how many terms are active, which means above 0"),
        ),
        Function(
            "semi_hard_loss",
            "semi_hard",
            "SemiHardLoss",
            "The semi-hard loss: every pair of an anchor and a positive of it, with a negative picked for "
            "the pair.",
            _SEMI_HARD_TEXT,
            (
                _DISTANCE,
                _reduction(
                    "all pairs whose anchor has a negative",
                    "those with a loss above 0",
                    "the sum over the pairs of each anchor",
                ),
            ),
            (MARGIN,),
            paper="FaceNet, as TensorFlow states it",
        ),
        Function(
            "multi_similarity_loss",
            "multi_similarity",
            "MultiSimilarityLoss",
            "The multi-similarity loss: all pairs of an anchor, weighed against each other.",
            _MULTI_SIMILARITY_TEXT,
            (
                Choice(
                    POSITIVE,
                    ("all", "easy"),
                    "all",
                    doc='``"all"``, or ``"easy"``: P is the nearest positive alone, whatever ε is ("Reducing '
                    'Class Collapse in Metric Learning with Easy Positive Sampling"); N stays as it was',
                ),
                _reduction(
                    "the anchors that have a positive and a negative",
                    "those with a loss above 0",
                    "with 0 for the others",
                ),
            ),
            (
                Number(
                    "alpha",
                    2.0,
                    ABOVE_ZERO,
                    "one over a similarity",
                    "α, the scale of the positives' exponents",
                ),
                Number(
                    "beta",
                    50.0,
                    ABOVE_ZERO,
                    "one over a similarity",
                    "β, the scale of the negatives' exponents",
                ),
                Number("base", 1.0, FINITE, "a similarity", "λ, which every similarity is compared with"),
                Number(
                    "epsilon",
                    0.1,
                    FROM_ZERO,
                    "a similarity",
                    "ε, how far mining reaches beyond the hardest pair of the other kind; None: nothing is "
                    "mined, P and N are all positives and all negatives",
                    none=inf,
                ),
            ),
            paper="Multi-Similarity Loss",
        ),
        Function(
            "supcon_loss",
            "supcon",
            "SupConLoss",
            "The supervised contrastive loss: all positives of an anchor against all its candidates.",
            _SUPCON_TEXT,
            (
                _reduction(
                    "the anchors that have a positive", "those with a loss above 0", "with 0 for the others"
                ),
            ),
            (TEMPERATURE._replace(default=0.1),),
            paper="Supervised Contrastive Learning",
        ),
        Function(
            "info_nce_loss",
            "info_nce",
            "InfoNCELoss",
            "The InfoNCE loss: every positive pair against all negatives of its anchor.",
            _INFO_NCE_TEXT,
            (
                Choice(
                    POSITIVE,
                    ("all", "easy"),
                    "all",
                    doc='``"all"``, or ``"easy"``: of every anchor the nearest positive alone',
                ),
                _reduction(
                    "all positive pairs", "those with a loss above 0", "the sum over the pairs of each anchor"
                ),
            ),
            (TEMPERATURE._replace(default=0.07),),
            paper="Representation Learning with Contrastive Predictive Coding; SimCLR",
        ),
        Function(
            "contrastive_loss",
            "contrastive",
            "ContrastiveLoss",
            "The contrastive loss: positives pulled to within one margin, negatives pushed beyond another.",
            _CONTRASTIVE_TEXT,
            (
                Choice(POSITIVE, POSITIVE.names, "all"),
                Choice(NEGATIVE, NEGATIVE.names, "all"),
                _DISTANCE,
                Choice(
                    REDUCTION,
                    REDUCTION.names,
                    "mean",
                    doc='``"mean"``: the mean of the positive terms above 0 plus the mean of the negative '
                    'terms above 0; ``"mean_nonzero"``: the same; ``"sum"`` of all terms; ``"none"``: (N,), '
                    + _OF_PAIRS,
                ),
            ),
            (
                Number("pos_margin", 0.0, FROM_ZERO, "a distance", "a nearer positive has no loss"),
                Number("neg_margin", 1.0, FROM_ZERO, "a distance", "a negative at least as far has no loss"),
            ),
            paper="Hadsell et al.",
        ),
        Function(
            "beta_margin_loss",
            "beta_margin",
            "BetaMarginLoss",
            "The margin loss with a boundary β that is learned: positives within it, negatives beyond it, "
            "by α.",
            _BETA_MARGIN_TEXT,
            (
                Choice(POSITIVE, POSITIVE.names, "random"),
                Choice(NEGATIVE, NEGATIVE.names, "distance"),
                _DISTANCE,
                Choice(
                    REDUCTION,
                    REDUCTION.names,
                    "mean",
                    doc='``"mean"``: the sum of all terms by the number of those above 0 (none: 0); '
                    f'``"mean_nonzero"``: the same; ``"sum"``; ``"none"``: (N,), {_OF_PAIRS}',
                ),
            ),
            (
                Number(
                    "alpha",
                    0.2,
                    FROM_ZERO,
                    "a distance",
                    "α, how far on its own side of β the distance of a pair has to be",
                ),
            ),
            paper="Sampling Matters in Deep Embedding Learning",
        ),
        Function(
            "mine",
            "triplet",
            "",
            "Pick one positive and one negative for every anchor; no gradient flows through the result.",
            "To hand the triplets to a loss of another library, take `Triplets.indices`.",
            (
                Choice(POSITIVE, _ONE_POSITIVE, required=True),
                Choice(NEGATIVE, _ONE_NEGATIVE, required=True),
                _DISTANCE,
            ),
            flag=Flag(
                "exclusive",
                "keep a triplet only if none of its rows is in a triplet of an earlier anchor that was kept, "
                "so that each row is in one triplet at most; the anchors of the others have −1 and NaN",
            ),
        ),
    )
}


class Codes(NamedTuple):
    """The words of a call as the backends take them."""

    objective: int
    positive: int = POSITIVE.code["all"]
    negative: int = NEGATIVE.code["all"]
    distance: int = DISTANCE.code["euclidean"]
    loss: int = LOSS.code["margin"]
    reduction: int = REDUCTION.code["mean"]


TABLES = (POSITIVE, NEGATIVE, DISTANCE, LOSS, REDUCTION)
OBJECTIVE_CODE = {name: code for code, name in enumerate(OBJECTIVE)}
OBJECTIVES = tuple(OBJECTIVE.values())  # by code

# Every number there is. Two objectives may give one name different meanings; a call has one objective.
NUMBERS: tuple[str, ...] = tuple(
    dict.fromkeys(
        option.name
        for function in FUNCTION.values()
        for option in function.options()
        if isinstance(option, Number)
    )
)


def _named(fields: tuple[str, ...]) -> Any:
    return namedtuple("Numbers", fields, defaults=[0.0] * len(fields))


# The numbers of a call as the backends take them, by name; 0 where the call has no such number.
Numbers = _named(NUMBERS)


def fingerprint() -> str:
    """All words and numbers in the order of their codes: a library with others was built from other
    sources."""
    tables = [*((table.option, *table) for table in TABLES), ("objective", *OBJECTIVE), ("numbers", *NUMBERS)]
    return ";".join(" ".join(words) for words in tables)
