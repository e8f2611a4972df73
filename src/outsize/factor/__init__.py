"""Tensors kept as a few small factors, with a known error: an array in, a `Factored` out, which is an array itself."""

from outsize.factor.exchange import from_factors as from_factors
from outsize.factor.factored import Factored as Factored
from outsize.factor.formats import Canonical as Canonical
from outsize.factor.formats import Svd as Svd
from outsize.factor.formats import Train as Train
from outsize.factor.formats import Tucker as Tucker

__all__ = ["Canonical", "Factored", "Svd", "Train", "Tucker", "from_factors"]
