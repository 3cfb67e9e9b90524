"""The settings of a streaming backend in a model's configuration, and the masks that it supports."""

from __future__ import annotations

from dataclasses import dataclass

from .. import hf
from ..kernels.checks import is_count


@dataclass(frozen=True)
class Settings:
    """The numbers of tokens to keep: the attributes streaming_window, streaming_sinks and streaming_clamped of a model's config.

    clamped: positions are learned, and every token beyond the last position gets the last position (an approximation).
    """

    window: int
    sinks: int = 4
    clamped: bool = False

    @classmethod
    def of(cls, config: hf.PreTrainedConfig | None) -> Settings:
        """The checked settings in a config."""
        window = getattr(config, "streaming_window", None)
        if window is None:
            raise ValueError(
                'A streaming backend needs a window: use hf_fastattn.patch(model, "streaming", window=4096, sinks=4).'
            )
        settings = cls(window, getattr(config, "streaming_sinks", cls.sinks), getattr(config, "streaming_clamped", cls.clamped))
        settings.check(getattr(config, "max_position_embeddings", None))
        return settings

    @classmethod
    def asked(
        cls, name: str, streams: bool, window: int | None, sinks: int | None, limit: int | None, clamped: bool = False
    ) -> Settings | None:
        """The settings that a caller requests for backend `name`, checked; None if it does not stream. sinks: None for 4."""
        if not streams:
            if window is not None or sinks is not None or clamped:
                raise ValueError(
                    f'window, sinks and clamp_positions are for "streaming"; {name!r} sees every token that the model does.'
                )
            return None
        if window is None:
            raise ValueError(f"{name!r} needs window=, the number of last tokens to keep, for example 4096.")
        settings = cls(window, cls.sinks if sinks is None else sinks, clamped)
        settings.check(limit)
        return settings

    def check(self, limit: int | None) -> None:
        """Raise ValueError for impossible settings. limit: the number of positions that the model supports."""
        if not is_count(self.window) or self.window < 1:
            raise ValueError(
                f"window counts the last tokens that a query sees, itself included: an integer, at least 1; got {self.window!r}."
            )
        if not is_count(self.sinks) or self.sinks < 0:
            raise ValueError(f"sinks is the number of first tokens to keep, an integer, at least 0; got {self.sinks!r}.")
        if limit is not None and self.sinks + self.window > limit:
            raise ValueError(
                f"{self.sinks} sinks and a window of {self.window} take {self.sinks + self.window} positions, and this model was "
                f"made for {limit} (max_position_embeddings). Ask for fewer."
            )

    def write(self, config: hf.PreTrainedConfig) -> None:
        config.streaming_window, config.streaming_sinks = int(self.window), int(self.sinks)
        config.streaming_clamped = self.clamped


def check_mask(name: str, config: hf.PreTrainedConfig | None, pattern: tuple[bool, int | None] | None, of_ring: bool) -> None:
    """Raise ValueError if a model requests a mask that a streaming backend does not support.

    pattern: (causal, window), or None for any other pattern. of_ring: whether a RollingCache has built the mask.
    """
    if pattern is None:
        raise ValueError(
            f"This model requests a mask that is not plainly causal (an image or a prefix whose tokens see each other, packed "
            f"sequences, chunks), and attn_implementation={name!r} cannot apply its window to that mask. "
            "Use another backend for such inputs."
        )
    causal, window = pattern
    if not causal:
        raise ValueError(f"attn_implementation={name!r} is for causal models; use another backend for this one.")
    settings = Settings.of(config)
    if of_ring and (window is None or settings.sinks + settings.window <= window):
        return
    if of_ring:
        raise ValueError(
            f"This model requests a sliding window of its own, {window} tokens, and {settings.sinks} sinks and a window of "
            f"{settings.window} are more. Ask for fewer, or use another backend."
        )
    if window is not None:
        raise ValueError(
            f"This model has layers with a sliding window of their own ({window} tokens), whose cache drops the first tokens. "
            f"Use hf_fastattn.patch(model, {name!r}, ...), whose cache keeps them."
        )
