"""Why a training collapses: the geometry of embeddings, diagrams of triplets, a monitor for live training.

Equation numbers up to 17 are those of "Mathematical Justification of Hard Negative Mining via Isometric
Approximation Theorem"; the scatter diagram and its vector field are those of "Extreme Triplet Learning".
Everything is exact for hundreds of thousands of rows, without an N×N matrix, except `to_separated`, which is
a search for small sets.

>>> T.diagnostics.summary(emb, labels)                    # one dict of all that is cheap
>>> T.diagnostics.CollapseMonitor().watch(criterion)      # a loss that is watched while it trains
>>> T.diagnostics.scatter(emb, labels).figure().savefig("triplets.png")

matplotlib is imported when something is drawn.
"""

from tripletops.diagnostics.compare import (
    Hausdorff,
    IsometricError,
    PointwiseDistance,
    hausdorff,
    isometric_error,
    pointwise_distance,
)
from tripletops.diagnostics.geometry import (
    ClassDiameters,
    Diameter,
    Separation,
    class_diameters,
    collapse_bound,
    diameter,
    separation,
)
from tripletops.diagnostics.monitor import BatchWarning, CollapseMonitor, CollapseWarning
from tripletops.diagnostics.overview import summary
from tripletops.diagnostics.quantiles import Quantiles, distance_quantiles
from tripletops.diagnostics.scatter_diagram import Scatter, scatter
from tripletops.diagnostics.separated import Separated, to_separated
from tripletops.diagnostics.spectrum import Thickness, effective_rank, thickness
from tripletops.diagnostics.vector_field import LOSSES, QUARTER_COLOURS, QUARTERS, Field, field, quarter_of

__all__ = [
    "LOSSES",
    "QUARTERS",
    "QUARTER_COLOURS",
    "BatchWarning",
    "ClassDiameters",
    "CollapseMonitor",
    "CollapseWarning",
    "Diameter",
    "Field",
    "Hausdorff",
    "IsometricError",
    "PointwiseDistance",
    "Quantiles",
    "Scatter",
    "Separated",
    "Separation",
    "Thickness",
    "class_diameters",
    "collapse_bound",
    "diameter",
    "distance_quantiles",
    "effective_rank",
    "field",
    "hausdorff",
    "isometric_error",
    "pointwise_distance",
    "quarter_of",
    "scatter",
    "separation",
    "summary",
    "thickness",
    "to_separated",
]
