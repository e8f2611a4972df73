"""The methods of arrays that are functions of the namespace, and what makes an array stand in for a number in Python."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outsize.array.api.lazy import Array


class Methods:
    """What NumPy's arrays have as methods; each calls the function of the same name."""

    __slots__ = ()

    def _call(self, name: str, *args: Any, **options: Any) -> Any:
        import outsize.array

        return getattr(outsize.array, name)(self, *args, **options)

    def ravel(self, order: str = "C") -> Array:
        """All elements in one axis."""
        return self._call("ravel", order)  # type: ignore[no-any-return]

    flatten = ravel

    def copy(self, order: str = "C") -> Array:
        """The array: nothing that is done to one changes another."""
        return self._call("copy")  # type: ignore[no-any-return]

    def clip(self, min: Any = None, max: Any = None) -> Array:
        """Limited to [min, max]."""
        return self._call("clip", min, max)  # type: ignore[no-any-return]

    def round(self, decimals: int = 0) -> Array:
        """Nearest value with this many decimals."""
        return self._call("round", decimals)  # type: ignore[no-any-return]

    @property
    def real(self) -> Array:
        """Real part."""
        return self._call("real")  # type: ignore[no-any-return]

    @property
    def imag(self) -> Array:
        """Imaginary part."""
        return self._call("imag")  # type: ignore[no-any-return]

    def squeeze(self, axis: Any = None) -> Array:
        """Without axes of length 1."""
        return self._call("squeeze", axis)  # type: ignore[no-any-return]

    def conj(self) -> Array:
        """Complex conjugate."""
        return self._call("conj")  # type: ignore[no-any-return]

    conjugate = conj

    def swapaxes(self, axis1: int, axis2: int) -> Array:
        """Two axes swapped."""
        return self._call("swapaxes", axis1, axis2)  # type: ignore[no-any-return]

    def repeat(self, repeats: Any, axis: int | None = None) -> Array:
        """Each element several times."""
        return self._call("repeat", repeats, axis=axis)  # type: ignore[no-any-return]

    def take(self, indices: Any, axis: int | None = None) -> Array:
        """Chosen indices along an axis."""
        return self._call("take", indices, axis=axis)  # type: ignore[no-any-return]

    def argsort(self, axis: int = -1, *, descending: bool = False, stable: bool = True) -> Array:
        """Indices that sort along an axis."""
        return self._call("argsort", axis=axis, descending=descending, stable=stable)  # type: ignore[no-any-return]

    def nonzero(self) -> tuple[Array, ...]:
        """The indices of all elements that are not zero."""
        return self._call("nonzero")  # type: ignore[no-any-return]

    def searchsorted(self, v: Any, side: str = "left", sorter: Any = None) -> Array:
        """Where elements belong in this sorted array."""
        return self._call("searchsorted", v, side=side, sorter=sorter)  # type: ignore[no-any-return]

    def cumprod(self, axis: int | None = None) -> Array:
        """Running product."""
        return self._call("cumprod", axis)  # type: ignore[no-any-return]

    def dot(self, other: Any) -> Array:
        """NumPy's dot."""
        return self._call("dot", other)  # type: ignore[no-any-return]

    def trace(self, offset: int = 0) -> Array:
        """The sum of the diagonal of the last two axes."""
        return self._call("trace", offset=offset)  # type: ignore[no-any-return]

    def diagonal(self, offset: int = 0) -> Array:
        """The diagonal of the last two axes."""
        return self._call("diagonal", offset=offset)  # type: ignore[no-any-return]

    def __divmod__(self, other: Any) -> tuple[Any, Any]:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> tuple[Any, Any]:
        return other // self, other % self

    def __contains__(self, value: Any) -> bool:
        return bool((self == value).any())

    def __arrow_array__(self, type: Any = None) -> Any:
        """The elements as an array of Arrow's."""
        import pyarrow

        return pyarrow.array(self.compute(), type)  # type: ignore[attr-defined]

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        """One column, or a table whose columns are called by their numbers: the way into polars, DuckDB and Arrow."""
        import pyarrow

        values = self.compute()  # type: ignore[attr-defined]
        if values.ndim == 1:
            return pyarrow.chunked_array([pyarrow.array(values)]).__arrow_c_stream__(requested_schema)
        if values.ndim != 2:
            raise TypeError(f"a table has rows and columns, and this array {values.ndim} dimensions")
        table = pyarrow.table({str(number): values[:, number] for number in range(values.shape[1])})
        return table.__arrow_c_stream__(requested_schema)
