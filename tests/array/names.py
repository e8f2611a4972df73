"""Every name of the namespace, how it is called and what it must answer: one row a name.

`CASES[name](m, a, b, i)` calls the function in a module `m`, NumPy's or ours, on two arrays of numbers and one of small whole
numbers. A name that is not in NumPy, or that has another name or other manners there, has its reference in `REFERENCE`. Names
that are no functions of arrays are in `OTHERS`, with the reason. `docs/support.md` is made from the same list.
"""

# ruff: noqa: E501

import numpy as np

import outsize.array as xp

SPACES = {"": xp, "linalg": xp.linalg, "fft": xp.fft}
RENAMED = {
    "acos": "arccos", "acosh": "arccosh", "asin": "arcsin", "asinh": "arcsinh", "atan": "arctan", "atan2": "arctan2",
    "atanh": "arctanh", "bitwise_invert": "invert", "bitwise_left_shift": "left_shift", "bitwise_right_shift": "right_shift",
    "concat": "concatenate", "permute_dims": "transpose", "pow": "power",
}  # fmt: skip
"""Names of the standard that NumPy has had under others."""

OTHERS = {
    "Array": "the class", "open": "opens files", "fft": "a namespace", "linalg": "a namespace", "random": "a namespace",
    "e": "a number", "pi": "a number", "inf": "a number", "nan": "a number", "newaxis": "None",
    "finfo": "about dtypes", "iinfo": "about dtypes", "isdtype": "about dtypes", "can_cast": "about dtypes",
    "result_type": "about dtypes", "from_dlpack": "opens memory", "empty": "any values", "empty_like": "any values",
    "map_blocks": "calls the user's function", "map_overlap": "calls the user's function",
} | dict.fromkeys(("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64", "complex64", "complex128"), "a dtype")  # fmt: skip


def one(name):
    return lambda m, a, b, i: getattr(m, name)(a)


def two(name):
    return lambda m, a, b, i: getattr(m, name)(a, b)


def whole(name):
    return lambda m, a, b, i: getattr(m, name)(i, i % 3)


def lanes(name, **options):
    """Of all elements, and along the last axis."""
    return lambda m, a, b, i: (getattr(m, name)(a, **options), getattr(m, name)(a, axis=-1, keepdims=True, **options))


UFUNCS_OF_ONE = [
    "abs",
    "absolute",
    "acos",
    "acosh",
    "asin",
    "asinh",
    "atan",
    "atanh",
    "ceil",
    "conj",
    "cos",
    "cosh",
    "exp",
    "exp2",
    "expm1",
    "floor",
    "isfinite",
    "isinf",
    "isnan",
    "log",
    "log10",
    "log1p",
    "log2",
    "logical_not",
    "negative",
    "positive",
    "reciprocal",
    "rint",
    "sign",
    "signbit",
    "sin",
    "sinh",
    "sqrt",
    "square",
    "tan",
    "tanh",
    "trunc",
]
UFUNCS_OF_TWO = [
    "add",
    "atan2",
    "copysign",
    "divide",
    "equal",
    "floor_divide",
    "greater",
    "greater_equal",
    "hypot",
    "less",
    "less_equal",
    "logaddexp",
    "logical_and",
    "logical_or",
    "logical_xor",
    "maximum",
    "minimum",
    "multiply",
    "nextafter",
    "not_equal",
    "remainder",
    "subtract",
]
WHOLE = ["bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_left_shift", "bitwise_right_shift"]

MAIN = {
    **{name: one(name) for name in UFUNCS_OF_ONE},
    **{name: two(name) for name in UFUNCS_OF_TWO},
    **{name: whole(name) for name in WHOLE},
    **{name: lanes(name) for name in ["all", "any", "max", "min", "amax", "amin", "mean", "prod", "std", "sum", "var", "ptp", "median"]},
    **{name: lanes(name) for name in ["nansum", "nanprod", "nanmean", "nanstd", "nanvar", "nanmin", "nanmax", "nanmedian"]},
    **{name: lanes(name) for name in ["argmax", "argmin", "count_nonzero"]},
    **{name: one(name) for name in ["angle", "atleast_1d", "atleast_2d", "atleast_3d", "copy", "fliplr", "flipud", "imag", "real", "ravel", "iscomplexobj", "isrealobj", "nan_to_num", "ediff1d", "unwrap", "rot90", "transpose", "trapezoid", "zeros_like", "ones_like", "squeeze", "matrix_transpose"]},
    **{name: two(name) for name in ["allclose", "array_equal", "isclose", "kron", "vdot", "append"]},
    **{name: lambda m, a, b, i, name=name: getattr(m, name)([a, b]) for name in
       ["stack", "concat", "concatenate", "vstack", "hstack", "dstack", "column_stack"]},
    **{name: lambda m, a, b, i, name=name: getattr(m, name)(a, axis=-1) for name in
       ["cumsum", "cumprod", "nancumsum", "nancumprod", "sort", "diff", "gradient", "cumulative_sum", "cumulative_prod"]},
    **{name: lambda m, a, b, i, name=name: getattr(m, name)(a, axis=-1) for name in ("nanargmax", "nanargmin", "flip")},
    **{name: lambda m, a, b, i, name=name: getattr(m, name)(a, 0.3, axis=-1) for name in ("quantile", "nanquantile")},
    **{name: lambda m, a, b, i, name=name: getattr(m, name)(a, [30, 75]) for name in ("percentile", "nanpercentile")},
    **{name: lambda m, a, b, i, name=name: getattr(m, name)(a, 2) for name in ("array_split", "hsplit", "split", "vsplit")},
    **{name: lambda m, a, b, i, name=name: getattr(m, name)(a[..., :3], b[..., :3]) for name in ("cross", "inner", "dot", "outer")},
    **{name: lambda m, a, b, i, name=name: getattr(m, name)(a, b) for name in ("matmul", "vecdot")},
    **{name: one(name) for name in ("unique", "unique_values", "unique_counts", "unique_inverse", "unique_all", "cov", "corrcoef")},
    **{name: lambda m, a, b, i, name=name: getattr(m, name)(i) for name in ("nonzero", "argwhere")},
    **{name: lambda m, a, b, i, name=name: getattr(m, name)(a, k=1) for name in ("tril", "triu")},
    "arange": lambda m, a, b, i: m.arange(-3, 9.5, 0.7),
    "argsort": lambda m, a, b, i: m.argsort(a, axis=-1, stable=True),
    "asarray": lambda m, a, b, i: m.asarray(a, dtype="complex128"),
    "astype": lambda m, a, b, i: m.astype(a, np.complex64),
    "average": lambda m, a, b, i: m.average(a, weights=i + 1),
    "bincount": lambda m, a, b, i: m.bincount(m.ravel(i), m.ravel(b), 9),
    "broadcast_arrays": lambda m, a, b, i: m.broadcast_arrays(a, b),
    "broadcast_shapes": lambda m, a, b, i: m.broadcast_shapes(a.shape, (3, *[1] * a.ndim)),
    "broadcast_to": lambda m, a, b, i: m.broadcast_to(a, (2, *a.shape)),
    "bitwise_invert": lambda m, a, b, i: m.bitwise_invert(i),
    "clip": lambda m, a, b, i: m.clip(a, -1, 2),
    "diagonal": lambda m, a, b, i: m.diagonal(a, offset=1),
    "digitize": lambda m, a, b, i: m.digitize(a, [-1.0, 0.0, 2.0]),
    "dsplit": lambda m, a, b, i: m.dsplit(a[None, None], [1]),
    "einsum": lambda m, a, b, i: m.einsum("...j,...j->...", a, b),
    "expand_dims": lambda m, a, b, i: m.expand_dims(a, axis=-1),
    "eye": lambda m, a, b, i: m.eye(3, 4, k=-1),
    "full": lambda m, a, b, i: m.full((2, 3), 1.5),
    "full_like": lambda m, a, b, i: m.full_like(a, 2),
    "histogram": lambda m, a, b, i: m.histogram(a, 5, (-2.0, 3.0)),
    "histogram_bin_edges": lambda m, a, b, i: m.histogram_bin_edges(i, 4),
    "interp": lambda m, a, b, i: m.interp(a, [-1.0, 0.0, 2.0], [3.0, 1.0, 5.0]),
    "isin": lambda m, a, b, i: m.isin(a, b),
    "linspace": lambda m, a, b, i: m.linspace(-2, 7, 5, endpoint=False),
    "meshgrid": lambda m, a, b, i: m.meshgrid(m.ravel(a), m.ravel(i)),
    "moveaxis": lambda m, a, b, i: m.moveaxis(a, 0, -1),
    "norm": lambda m, a, b, i: m.norm(a),
    "ones": lambda m, a, b, i: m.ones((2, 0)),
    "pad": lambda m, a, b, i: m.pad(a, 2, mode="edge"),
    "permute_dims": lambda m, a, b, i: m.permute_dims(a, tuple(reversed(range(a.ndim)))),
    "pow": lambda m, a, b, i: m.pow(a, i),
    "repeat": lambda m, a, b, i: m.repeat(a, 3, axis=-1),
    "reshape": lambda m, a, b, i: m.reshape(a, (-1, 1)),
    "roll": lambda m, a, b, i: m.roll(a, 2, axis=-1),
    "round": lambda m, a, b, i: m.round(a, decimals=1),
    "searchsorted": lambda m, a, b, i: m.searchsorted(m.sort(m.ravel(a)), b, side="right"),
    "select": lambda m, a, b, i: m.select([i > 3, i > 1], [a, b], 7),
    "swapaxes": lambda m, a, b, i: m.swapaxes(a, 0, -1),
    "take": lambda m, a, b, i: m.take(a, np.array([0, 0, -1]), axis=-1),
    "take_along_axis": lambda m, a, b, i: m.take_along_axis(a, i % max(1, a.shape[-1]), axis=-1),
    "tensordot": lambda m, a, b, i: m.tensordot(a, b, axes=((-1,), (-1,))),
    "tile": lambda m, a, b, i: m.tile(a, (2, 2)),
    "topk": lambda m, a, b, i: m.topk(a, min(2, a.shape[-1])),
    "trace": lambda m, a, b, i: m.trace(a),
    "unstack": lambda m, a, b, i: m.unstack(a, axis=-1),
    "vector_norm": lambda m, a, b, i: m.vector_norm(a, ord=1),
    "where": lambda m, a, b, i: m.where(i > 1, a, b),
    "zeros": lambda m, a, b, i: m.zeros((3, 2)),
}  # fmt: skip


def square(call):
    """With a well-conditioned matrix made of small whole numbers; LAPACK does not take what is not finite."""

    def case(m, a, b, i):
        matrix = np.arange(9.0).reshape(3, 3) % 4 + 5 * np.eye(3)
        given = matrix + matrix.T
        return call(m, given if m is np.linalg else xp.asarray(given))

    return case


LINALG = {
    **{name: square(lambda m, x, name=name: getattr(m, name)(x)) for name in
       ["cholesky", "det", "eig", "eigh", "eigvals", "eigvalsh", "inv", "matrix_norm", "matrix_rank", "matrix_transpose", "norm", "pinv", "qr", "slogdet", "svd", "svdvals"]},
    "cross": lambda m, a, b, i: m.cross(a[..., :3], b[..., :3]),
    "diagonal": one("diagonal"), "trace": one("trace"), "vector_norm": one("vector_norm"),
    "svd_lowrank": square(lambda m, x: m.svd_lowrank(x, 2)[1]),
    "lstsq": square(lambda m, x: m.lstsq(x, x[:, 0])[0]),
    "matmul": two("matmul"), "tensordot": MAIN["tensordot"], "vecdot": two("vecdot"),
    "matrix_power": square(lambda m, x: m.matrix_power(x, -3)),
    "outer": lambda m, a, b, i: m.outer(a.reshape(-1), b.reshape(-1)),
    "solve": square(lambda m, x: m.solve(x, x[:, :2])),
}  # fmt: skip
FFT = {
    **{name: one(name) for name in ["fft", "ifft", "rfft", "irfft", "hfft", "ihfft", "fftn", "ifftn", "rfftn", "irfftn", "fftshift", "ifftshift"]},
    "fftfreq": lambda m, a, b, i: m.fftfreq(7, d=0.5), "rfftfreq": lambda m, a, b, i: m.rfftfreq(8),
}  # fmt: skip
CASES = {"": MAIN, "linalg": LINALG, "fft": FFT}

LOOSE = {"": {"cov", "corrcoef", "std", "var", "nanstd", "nanvar", "prod", "nanprod", "cumprod", "nancumprod", "cumulative_prod", "vecdot", "matmul", "tensordot", "einsum", "inner", "dot", "vdot", "norm", "vector_norm", "mean", "sum", "nansum", "nanmean", "cumsum", "nancumsum", "cumulative_sum", "average", "trapezoid", "trace", "quantile", "percentile", "nanquantile", "nanpercentile", "unwrap", "linspace", "arange", "gradient", "interp", "logaddexp", "hypot", "pow", "exp", "exp2", "expm1", "log", "log10", "log1p", "log2", "sin", "cos", "tan", "sinh", "cosh", "tanh", "asin", "acos", "atan", "asinh", "acosh", "atanh", "atan2", "angle", "histogram"}}  # fmt: skip
"""Names whose last digits depend on the order of a sum or on the length of a vector; the others are equal."""

REFERENCE = {
    "cross": lambda m, a, b, i: np.linalg.cross(a[..., :3], b[..., :3]),
    "linalg.svd_lowrank": lambda m, *given: LINALG["svdvals"](m, *given)[:2],
    "unique_values": lambda m, a, b, i: np.unique(a, equal_nan=False),
    "unique_inverse": lambda m, a, b, i: _inverse(a),
    "linalg.eig": square(lambda m, x: np.linalg.eig(x.astype(complex))),
    "linalg.eigvals": square(lambda m, x: np.linalg.eigvals(x.astype(complex))),
    "topk": lambda m, a, b, i: _topk(a, min(2, a.shape[-1])),
    "norm": lambda m, a, b, i: np.linalg.norm(a),
    "vector_norm": lambda m, a, b, i: np.linalg.vector_norm(a, ord=1),
    "tile": lambda m, a, b, i: np.tile(a, (2, 2)),
    "asarray": lambda m, a, b, i: np.asarray(a, "complex128"),
    "diagonal": lambda m, a, b, i: np.linalg.diagonal(a, offset=1),
    "trace": lambda m, a, b, i: np.linalg.trace(a),
}  # fmt: skip
"""What a name of ours means, where NumPy has it not or means another."""


def _inverse(a):
    """Each NaN is a value of its own, in order: NumPy leaves that order to its sort, which is stable only with the indices."""
    values, _, inverse = np.unique(a, return_index=True, return_inverse=True, equal_nan=False)
    return values, inverse.reshape(np.shape(a))


def _topk(a, k):
    order = np.argsort(_negative(a), axis=-1, kind="stable")[..., :k]
    return np.take_along_axis(a, order, -1), order


def _negative(a):
    """Keys that sort from the largest on, NaN first."""
    wide = a.astype(np.float64)
    return np.where(np.isnan(wide), -np.inf, -wide) if a.dtype.kind == "f" else -wide


NOTES = {
    "allclose": "computed at the call", "array_equal": "computed at the call", "argwhere": "counted at the call",
    "bincount": "the largest element is found at the call", "histogram": "without `range=`, the ends are found at the call",
    "histogram_bin_edges": "without `range=`, the ends are found at the call", "nonzero": "counted at the call",
    "isin": "the second array is sorted at the call", "unique": "of all elements; sorted and counted at the call",
    "nanargmax": "whether there is one is looked up at the call", "nanargmin": "whether there is one is looked up at the call",
    "interp": "the samples are held in memory", "searchsorted": "both arrays may be larger than the budget",
    "quantile": "the method 'linear'", "percentile": "the method 'linear'", "nanquantile": "the method 'linear'; lanes are sorted",
    "nanpercentile": "the method 'linear'; lanes are sorted", "nanmedian": "lanes are sorted", "repeat": "numbers for each element are held",
    "empty": "zeros: nothing is stored", "empty_like": "zeros: nothing is stored", "take": "indices of any number",
    "pad": "without `linear_ramp` and `stat_length`", "map_blocks": "declares its memory", "map_overlap": "declares its memory",
}  # fmt: skip
"""What a user should know of a name, for the page."""


HEAD = """Every name of `outsize.array`. This page is made by `python tests/array/names.py`, from the list by which each name is tested
against NumPy with tiles of a few elements; a name that is not in that list fails the tests. dask is `dask.array` 2026."""


def public(space):
    """The names of a namespace that are functions of arrays."""
    return [name for name in SPACES[space].__all__ if space or name not in OTHERS]


def page():
    """The page of all names, as text."""
    lines = ["# What there is", "", HEAD, ""]
    for space, module in SPACES.items():
        lines += [
            f"## `outsize.array{'.' + space if space else ''}`",
            "",
            "| name | in NumPy | in dask | |",
            "|---|---|---|---|",
        ]
        theirs = {"": np, "linalg": np.linalg, "fft": np.fft}[space]
        for name in sorted(module.__all__, key=str.lower):
            if not space and OTHERS.get(name) in ("a dtype", "a number", "None", "the class", "a namespace"):
                continue
            called = name if hasattr(theirs, name) else RENAMED.get(name, "")
            note = NOTES.get(name, "") if not space else ""
            lines.append(
                f"| `{name}` | {'yes' if called == name else f'`{called}`' if called else ''} | {in_dask(space, name)} | {note} |"
            )
        lines.append("")
    return "\n".join(lines)


def in_dask(space, name):
    """'yes' where dask has the name; on the page as it was when it was written, since dask need not be installed."""
    try:
        import dask.array as da
    except ImportError:
        return written().get((space, name), "")
    where = getattr(da, space) if space else da
    return "yes" if hasattr(where, name) or hasattr(where, RENAMED.get(name, name)) else ""


def written():
    """dask's column of the page."""
    import pathlib

    found, space = {}, ""
    for line in (pathlib.Path(__file__).parents[2] / "docs" / "support.md").read_text().splitlines():
        if line.startswith("## "):
            space = line.strip("#` ").removeprefix("outsize.array").removeprefix(".")
        elif line.startswith("| `"):
            cells = [cell.strip() for cell in line.split("|")]
            found[space, cells[1].strip("`")] = cells[3]
    return found


if __name__ == "__main__":
    import pathlib

    (pathlib.Path(__file__).parents[2] / "docs" / "support.md").write_text(page())
    print(sum(len(public(space)) for space in SPACES), "functions")
