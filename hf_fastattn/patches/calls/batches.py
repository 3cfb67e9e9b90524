"""generate_batch() of a patched model: the arguments and results are those of Transformers, the loop is `batch.loop`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from ... import hf
from ...batch import job
from ...batch.loop import BUCKETS, Loop
from ...batch.manager import Manager, paused
from ...batch.requests import Row
from ...caches import forward
from ...caches.paged import PagedStorage
from ..graphs import graphs
from ..graphs.snapshot import Last
from ..graphs.state import MARK, Uncapturable
from .forwards import Forwards

if TYPE_CHECKING:
    from .methods import Generation

_UNDONE = "The patch was undone during a generate_batch(). Undo it after the call, and patch the model again."


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
        with self.alone():
            model = self.__self__.model
            prompts = self.prompts(model, inputs)
            if not prompts:
                return {}
            given = kwargs.pop("max_new_tokens", None)
            asked = job.asked_of(model, generation_config, kwargs)
            new = job.limits_of(model, asked, prompts, given)
            texts = job.texts_of(prompts, new, asked.copies)
            with (
                self.loop(model, asked, texts, continuous_batching_config) as loop,
                hf.progress(len(texts), progress_bar) as progress,
            ):
                return job.run(loop, prompts, new, asked.copies, record_timestamps, progress)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """The time of one job of the model."""
        generation = self.__self__
        if not generation.job_lock.acquire(blocking=generation.model not in paused.models):
            raise RuntimeError(
                "generate_batch() would wait for the manager that this thread has paused. Leave its pause() before."
            )
        try:
            if generation.in_job:
                raise RuntimeError("generate_batch() was called by code that it runs. Call it after the other call has returned.")
            with torch.no_grad():
                generation.in_job = True
                try:
                    yield
                finally:
                    generation.in_job = False
        finally:
            generation.job_lock.release()

    def prompts(self, model: hf.PreTrainedModel, inputs: Any) -> list[list[int]]:
        """The prompts of a call. Raises TypeError and ValueError, also for a model that cannot run."""
        self.__self__.caches.refit(model)
        if reason := self._why_not(model):
            raise ValueError(
                f"generate_batch() cannot run this {type(model).__name__}: {reason}. Use generate(), or call "
                "hf_fastattn.unpatch() on the model for Transformers' generate_batch()."
            )
        text = model.config.get_text_config(decoder=True)
        table = getattr(model.get_input_embeddings(), "weight", None)
        return job.read_prompts(inputs, text.vocab_size if table is None else len(table))

    @contextmanager
    def loop(
        self, model: hf.PreTrainedModel, asked: job.Asked, texts: list[job.Text], batching: hf.ContinuousBatchingConfig | None
    ) -> Iterator[Loop]:
        """The loop of a job. The model is in eval mode meanwhile, as in Transformers."""
        caches = self.__self__.caches
        settings = job.settings_of(model, asked, texts, batching, caches.run, caches.pool.idle_bytes)
        vars(model)[MARK].begin_batches(settings.size)
        forward.abandon(model)
        storage = self._storage(model, settings)
        forward.free_for_training(model, caches.pool)
        training = [module for module in model.modules() if module.training]
        try:
            for module in training:
                module.training = False
            forwards = self._forwards(model, storage, asked.processors)
            yield job.loop_of(model, storage, asked, settings, *forwards, fingerprint_of(model))
        finally:
            for module in training:
                module.training = True
            storage.reset()
            caches.pool.give(storage, -settings.size)

    def _why_not(self, model: hf.PreTrainedModel) -> str | None:
        generation, name = self.__self__, model.config._attn_implementation
        others = job.why_not_backend(name)
        if others is None and generation.caches.streaming is not None:
            others = f"{name!r} drops tokens, and pages keep them"
        elif others is None and generation.caches.kv_dtype is not None:
            others = f"kv_dtype={generation.caches.kv_dtype!r} stores K and V in 8 bits, and pages hold them as they are computed"
        elif others is None and generation.ranks.several:
            others = "several ranks share it"
        return job.why_not(model, generation.caches.run, others)

    def _storage(self, model: hf.PreTrainedModel, settings: job.Settings) -> PagedStorage:
        """An empty storage for this call: an idle one that is large enough, or a new one."""
        caches, kind = self.__self__.caches, model.device.type
        dtypes = model.dtype, torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None

        def fits(storage: Any) -> bool:
            return bool(
                storage.fits(settings.windows, settings.pages, dtypes)
                and storage.most_rows >= settings.rows
                and storage.width >= settings.width
                and storage.tables.device == model.device
            )

        if (found := caches.pool.lend(-settings.size, fits)) is None:
            if job.is_short(model, settings):
                caches.pool.clear()
                if kind == "cuda":
                    torch.cuda.empty_cache()  # unused memory between tensors is too small for the pages of a layer
            rows = next((size for size in BUCKETS if size >= settings.rows), settings.rows)
            made = PagedStorage(settings.windows, settings.pages, settings.size, rows, settings.width, model.device)
            made.made_for = dtypes
            return made
        assert isinstance(found, PagedStorage)
        found.reset()
        return found

    def _forwards(
        self, model: hf.PreTrainedModel, storage: PagedStorage, processors: Any
    ) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """The forward of a step of one token of each row, by a graph where there is one, and that of prompts."""
        generation = self.__self__
        run, step = generation.own(hf.CALL), None
        stock = not hf.other_code({hf.PROCESSORS: processors})
        if generation.graph:
            refused = "model.compile() was called" if vars(model).get(hf.COMPILED) is not None else None
            refused = refused or graphs.why_no_graph(model.device)
            options: dict[str, Any] = {"stock": stock, "whole": True, "storage": storage, "begun": True}
            step = Forwards(generation.graphs, model, run, generation.say, refused, **options)

        def read(**given: Any) -> Any:
            if step is not None:
                step.present.forget()  # Python runs, and may change the model
            return run(**given)

        return checked(generation, step or run), checked(generation, read)


class Managers:
    """The instance's init_continuous_batching(). The thread of a manager runs a job while it has requests."""

    def __init__(self, generation: Generation):
        self.__self__ = generation

    def __call__(
        self,
        generation_config: hf.GenerationConfig | None = None,
        continuous_batching_config: hf.ContinuousBatchingConfig | None = None,
        workload_hints: object = None,
        **kwargs: Any,
    ) -> Manager:
        """A manager, whose methods are those of Transformers'. kwargs: fields of a GenerationConfig, tokenizer, logits_processor.
        Raises ValueError or TypeError, with the reason, for what it does not support. workload_hints have no effect."""
        generation, batches, batching = self.__self__, Batches(self.__self__), continuous_batching_config
        model = generation.model
        batches.prompts(model, [])
        asked = job.asked_of(model, generation_config, kwargs)
        job.settings_of(model, asked, [job.Text(1, 1)], batching, generation.caches.run)

        def read(inputs: list[list[int]], new: int | None) -> list[tuple[list[int], int]]:
            check_open(generation)
            model = generation.model
            prompts = batches.prompts(model, inputs)
            return [*zip(prompts, job.limits_of(model, asked, prompts, new), strict=True)] if prompts else []

        @contextmanager
        def opened(rows: list[Row]) -> Iterator[Loop]:
            check_open(generation)
            model = generation.model
            with batches.alone(), device_of(model), batches.loop(model, asked, job.room_for(rows, model), batching) as loop:
                yield loop

        return Manager(model, asked.config, read, opened)


def check_open(generation: Generation) -> None:
    if generation.graphs.closed:
        raise RuntimeError(_UNDONE)


def checked(generation: Generation, run: Callable[..., Any]) -> Callable[..., Any]:
    """A forward of a job, which raises RuntimeError if the patch is undone before it or by another thread during it."""

    def call(**given: Any) -> Any:
        check_open(generation)
        try:
            return run(**given)
        except Exception:
            check_open(generation)
            raise

    return call


def device_of(model: hf.PreTrainedModel) -> AbstractContextManager[object]:
    """A context with the model's device as that of the thread."""
    return torch.cuda.device(model.device) if model.device.type == "cuda" else nullcontext()


def fingerprint_of(model: hf.PreTrainedModel) -> Callable[[], object]:
    """A function whose result changes with the state of the model (its tensors, adapters and attributes), and when an operation
    writes a weight in place. It does not see writes by `.data`."""
    last = Last()

    def fingerprint() -> object:
        try:
            state, tensors = last.current(model)
        except Uncapturable:
            state, tensors = None, [*model.parameters(), *model.buffers()]
        return state, [(id(each), each.data_ptr(), 0 if each.is_inference() else each._version) for each in tensors]

    return fingerprint
