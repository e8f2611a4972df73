"""The formats in which a tensor is kept in fewer bytes: one file each."""

from outsize.factor.formats.canonical import Canonical as Canonical
from outsize.factor.formats.coded import Coded as Coded
from outsize.factor.formats.form import Cut as Cut
from outsize.factor.formats.form import Factors as Factors
from outsize.factor.formats.form import Form as Form
from outsize.factor.formats.form import Resident as Resident
from outsize.factor.formats.narrow import Narrow as Narrow
from outsize.factor.formats.svd import Svd as Svd
from outsize.factor.formats.train import Train as Train
from outsize.factor.formats.tucker import Tucker as Tucker

KINDS: dict[str, type[Resident]] = {form.method: form for form in (Tucker, Train, Canonical, Svd, Coded)}
"""Formats that lie in memory and in files, by method."""
