"""Models of allocators: what they take from the system for the blocks a program asks for."""

from __future__ import annotations

from outsize.allocator.replay import MODELS, replay
from outsize.allocator.settings import CudaSettings, parse_settings, settings_from_environment

__all__ = ["MODELS", "CudaSettings", "parse_settings", "replay", "settings_from_environment"]
