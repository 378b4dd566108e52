"""JAX's own settings, made once before the first computation."""

from __future__ import annotations

from pathlib import Path

import jax


def set_up(compile_cache: Path | None) -> None:
    """Keep compiled programs in `compile_cache`, all of them, where one is given."""
    if compile_cache is None:
        return
    compile_cache.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(compile_cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
