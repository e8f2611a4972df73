"""Draws a `Receipt`."""

from __future__ import annotations

from outsize.report.footprint import draw_receipt as draw

__all__ = ["draw"]
