"""generate_batch() of a patched model: the arguments and results are those of Transformers, the loop is `batch.loop`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ... import hf, registry
from ...batch import job
from ...batch.loop import BUCKETS
from ...caches import forward
from ...caches.paged import PagedStorage
from ..graphs import graphs
from .forwards import Forwards

if TYPE_CHECKING:
    from .methods import Generation

_UNDONE = "The patch was undone during a generate_batch(). Undo it after the call, and patch the model again."


class JobLock:
    """One job of a model runs at a time. held: whether one runs, as a thread finds that holds the lock."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.held = False

    def __enter__(self) -> None:
        self.lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.lock.release()


class NoManager:
    """The instance's method that creates a manager of continuous batching, whose attention no backend serves."""

    def __init__(self, generation: Generation):
        self.__self__ = generation

    def __call__(self, *_: object, **__: object) -> None:
        raise ValueError(
            f"A patched {type(self.__self__.model).__name__} has a generate_batch() of its own, and no manager of continuous "
            "batching. Use generate_batch(), or call hf_fastattn.unpatch() on the model before."
        )


class Batches:
    """The instance's generate_batch(). One call runs at a time, and others wait: each may take the free memory for its pages."""

    def __init__(self, generation: Generation):
        self.__self__ = generation  # which has the lock: a copy of the model copies this object

    def __call__(
        self,
        inputs: list[list[int]],
        generation_config: hf.GenerationConfig | None = None,
        continuous_batching_config: hf.ContinuousBatchingConfig | None = None,
        record_timestamps: bool = False,
        progress_bar: bool = False,
        persistent_manager: bool = False,
        warmup: bool = True,
        **kwargs: Any,
    ) -> dict[str, hf.GenerationOutput]:
        """The continuations of any number of prompts, {id: GenerationOutput}, in their order.

        kwargs: fields of a GenerationConfig; max_new_tokens, a number or one for each prompt; tokenizer, for stop_strings;
        logits_processor. Of continuous_batching_config it reads page_size, num_blocks, max_batch_tokens, max_requests_per_batch,
        max_memory_percent, allow_block_sharing and return_logprobs; others, persistent_manager and warmup have no effect: pages
        and graphs are kept between calls. Raises ValueError or TypeError, with the reason, for arguments and models that it does
        not support, and `batch.BatchError`, with all results, after requests have failed.
        """
        job_lock = self.__self__.job_lock
        with job_lock, torch.no_grad():
            if job_lock.held:
                raise RuntimeError("generate_batch() was called by code that it runs. Call it after the other call has returned.")
            job_lock.held = True
            try:
                given = generation_config, continuous_batching_config, record_timestamps, progress_bar, kwargs
                return self._run(inputs, *given)
            finally:
                job_lock.held = False

    def _run(
        self,
        inputs: Any,
        config: hf.GenerationConfig | None,
        batching: hf.ContinuousBatchingConfig | None,
        stamped: bool,
        progress_bar: bool,
        kwargs: dict[str, Any],
    ) -> dict[str, hf.GenerationOutput]:
        generation = self.__self__
        model = generation.model
        generation.caches.refit(model)
        if reason := self._why_not(model):
            raise ValueError(
                f"generate_batch() cannot run this {type(model).__name__}: {reason}. Use generate(), or call "
                "hf_fastattn.unpatch() on the model for Transformers' generate_batch()."
            )
        text = model.config.get_text_config(decoder=True)
        table = getattr(model.get_input_embeddings(), "weight", None)
        prompts = job.read_prompts(inputs, text.vocab_size if table is None else len(table))
        if not prompts:
            return {}
        pool = generation.caches.pool
        settings = job.settings_of(model, prompts, config, batching, kwargs, held=pool.idle_bytes)
        forward.abandon(model)
        storage = self._storage(model, settings)
        forward.free_for_training(model, pool)
        try:
            loop = job.loop_of(model, storage, settings, *self._forwards(model, storage, settings))
            with hf.progress(len(prompts) * settings.copies, progress_bar) as progress:
                return job.run(loop, prompts, settings, stamped, progress)
        finally:
            storage.reset()
            pool.give(storage, -settings.size)

    def _why_not(self, model: hf.PreTrainedModel) -> str | None:
        generation, name = self.__self__, model.config._attn_implementation
        others = None
        if name not in registry.names() or not registry.get(name).packed or registry.get(name).invariant:
            others = f"attn_implementation={name!r} does not read prompts of several texts as one row, as 'lean' does"
        elif generation.caches.streaming is not None:
            others = f"{name!r} drops tokens, and pages keep them"
        elif generation.caches.kv_dtype is not None:
            others = f"kv_dtype={generation.caches.kv_dtype!r} stores K and V in 8 bits, and pages hold them as they are computed"
        elif generation.ranks.several:
            others = "several ranks share it"
        return job.why_not(model, generation.caches.kinds, others)

    def _storage(self, model: hf.PreTrainedModel, settings: job.Settings) -> PagedStorage:
        """An empty storage for this call: an idle one that is large enough, or a new one."""
        caches = self.__self__.caches

        def fits(storage: Any) -> bool:
            return bool(
                storage.pages.count >= settings.pages
                and storage.most_rows >= settings.rows
                and storage.width >= settings.width
                and storage.tables.device == model.device
                and storage.fits(model.dtype, len(caches.kinds))
            )

        if (found := caches.pool.lend(-settings.size, fits)) is None:
            if job.is_short(model, settings):
                caches.pool.clear()
            rows = next((size for size in BUCKETS if size >= settings.rows), settings.rows)
            return PagedStorage(len(caches.kinds), settings.pages, settings.size, rows, settings.width, model.device)
        assert isinstance(found, PagedStorage)
        found.reset()
        return found

    def _forwards(
        self, model: hf.PreTrainedModel, storage: PagedStorage, settings: job.Settings
    ) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """The forward of a step of one token of each row, by a graph where there is one, and that of prompts."""
        generation = self.__self__
        run, step = generation.own(hf.CALL), None
        stock = not hf.other_code({hf.PROCESSORS: settings.processors})
        if generation.graph:
            refused = "model.compile() was called" if vars(model).get(hf.COMPILED) is not None else None
            refused = refused or graphs.why_no_graph(model.device)
            step = Forwards(
                generation.graphs, model, run, generation.say, refused=refused, stock=stock, whole=True, storage=storage
            )
            step.begun = True

        def check() -> None:
            if generation.graphs.closed:
                raise RuntimeError(_UNDONE)

        def decode(**given: Any) -> Any:
            check()
            return (step or run)(**given)

        def read(**given: Any) -> Any:
            check()
            if step is not None:
                step.present.forget()  # Python runs, and may change the model
            return run(**given)

        return decode, read
